//! Scale: one router, 16 targets, 64 draft workers, and about a thousand sequences of two kinds for five
//! virtual minutes.

use std::time::Duration;

use scheduling::profile::{Acceptance, Profile};
use simulator::outcome::percentile;
use simulator::{Experiment, Policy, RequestKind, Setup, Traffic, run_with};

use crate::{MAX_K, print_line};

const TARGETS: u32 = 16;
const DRAFTS: u32 = 64;
const SEQUENCES: u32 = 1_024;

/// Prints the results of each kind.
pub(crate) fn print(profile: &Profile, experiment: &Experiment) {
    let mut profile =
        Profile { acceptance: Acceptance::by_task(&[("easy", 0.82), ("hard", 0.38)]), ..profile.clone() };
    (profile.target.workers, profile.draft.workers) = (TARGETS, DRAFTS);
    let kind = |task: &str, share| RequestKind {
        task_type: task.to_owned(),
        share,
        prompt_tokens: 256,
        output_tokens: 192,
    };
    print_line(&format!("\n# Scale: {TARGETS} targets and {DRAFTS} draft workers of {}", profile.name));
    // More requests than are admitted, so that the system is always full.
    let setup = |minutes: u64| Setup {
        profile: &profile,
        traffic: Traffic::Open {
            per_second: 1_000.0,
            kinds: vec![kind("easy", 0.6), kind("hard", 0.4)],
            sequences_max: SEQUENCES,
        },
        policy: Policy::Lanes { max_k: MAX_K },
        seed: 1,
        duration: Duration::from_secs(60 * minutes),
        warm_up: Duration::from_secs(10),
    };
    // Memory must not grow with finished requests, except for the times per request that are reported below.
    let held: Vec<String> = [1, 3]
        .map(|minutes| {
            run_with(&setup(minutes), experiment);
            format!("{:.1} MB after {minutes}", peak_memory_mb())
        })
        .to_vec();
    let outcome = run_with(&setup(5), experiment);
    print_line(&format!(
        "Peak memory of this program: {}, {:.1} MB after 5 minutes",
        held.join(", "),
        peak_memory_mb()
    ));
    print_line(&format!(
        "{} sequences at the end, {:.0} tokens/s, {} requests rejected",
        outcome.sequences_at_end,
        outcome.tokens_per_second(),
        outcome.num_rejected
    ));
    for (kind, lane) in outcome.kinds.iter().zip(&outcome.lanes) {
        print_line(&format!(
            "{}: {} ended, TPOT {:.2}/{:.2} ms (P50/P99), TTFT {:.0}/{:.0} ms, longest wait for a token {:.0} ms, mean k {:.1}",
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

/// Peak memory as reported by the kernel; 0 if it is not available.
fn peak_memory_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.and_then(|kb| kb.trim().strip_suffix(" kB")?.parse::<f64>().ok()).unwrap_or_default() / 1e3
}
