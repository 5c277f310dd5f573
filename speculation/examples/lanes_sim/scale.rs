//! Scale: one router, 16 targets, 64 draft workers, about a thousand sequences of two kinds for five virtual minutes.

use std::time::Duration;

use speculation::profile::{Acceptance, Profile};
use speculation::simulation::outcome::percentile;
use speculation::simulation::{Kind, Policy, Setup, Sharing, Traffic, run};

use crate::{MAX_K, say};

const TARGETS: u32 = 16;
const DRAFTS: u32 = 64;
const SEQUENCES: u32 = 1_024;

/// Prints what each kind got.
pub(crate) fn draw(profile: &Profile) {
    let mut profile =
        Profile { acceptance: Acceptance::by_task(&[("easy", 0.82), ("hard", 0.38)]), ..profile.clone() };
    (profile.target.workers, profile.draft.workers) = (TARGETS, DRAFTS);
    let kind = |task: &str, share| Kind {
        task_type: task.to_owned(),
        share,
        prompt_tokens: 256,
        output_tokens: 192,
    };
    say(&format!("\n# Scale: {TARGETS} targets and {DRAFTS} draft workers of {}", profile.name));
    // More requests than are let in: the house is full all the time.
    let setup = |minutes: u64| Setup {
        profile: &profile,
        traffic: Traffic::Open {
            per_second: 1_000.0,
            kinds: vec![kind("easy", 0.6), kind("hard", 0.4)],
            sequences_max: SEQUENCES,
        },
        policy: Policy::Lanes { max_k: MAX_K },
        sharing: Sharing::ByCost,
        seed: 1,
        duration: Duration::from_secs(60 * minutes),
        warm_up: Duration::from_secs(10),
    };
    let outcome = run(&setup(5));
    say(&format!(
        "{} sequences at the end, {:.0} tokens/s, {} requests turned away",
        outcome.sequences_at_end,
        outcome.tokens_per_second(),
        outcome.turned_away
    ));
    for (kind, lane) in outcome.kinds.iter().zip(&outcome.lanes) {
        say(&format!(
            "{}: {} ended, {:.2}/{:.2} ms a token (P50/P99), {:.0}/{:.0} ms to the first, longest wait for a token {:.0} ms, mean k {:.1}",
            kind.task_type,
            kind.ttft_ms.len(),
            percentile(&kind.tpot_ms, 0.5),
            percentile(&kind.tpot_ms, 0.99),
            percentile(&kind.ttft_ms, 0.5),
            percentile(&kind.ttft_ms, 0.99),
            kind.worst_wait.as_secs_f64() * 1e3,
            lane.mean_k,
        ));
    }
}
