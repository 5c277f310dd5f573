//! Homogeneous and mixed batches: two kinds of request, from idle to saturation, served in four ways. Also
//! the overlap of drafting and verifying, compared with the best possible split of the sequences.

use std::time::Duration;

use scheduling::profile::{Acceptance, ForwardRows, Profile};
use simulator::outcome::percentile;
use simulator::{Experiment, Policy, RequestKind, RunOutcome, Setup, Traffic, run_with};
use speculation::Role;

use crate::{MAX_K, SEEDS, one_kind, print_line};

/// Task type, share of the requests, acceptance.
type Mix = [(&'static str, f64, f64); 2];

/// One kind that is worth drafting for beside one that is not, and two that are.
const MIXES: [Mix; 2] =
    [[("easy", 0.6, 0.82), ("hard", 0.4, 0.38)], [("easy", 0.6, 0.95), ("medium", 0.4, 0.7)]];

/// Loads as shares of the maximum throughput of plain decoding.
const LOADS: [f64; 5] = [0.05, 0.25, 0.5, 0.75, 0.9];

/// Number of runs. Tail latency varies with the noise of every forward, so chance effects need this many
/// runs.
const TAIL_SEEDS: u64 = 20;

/// Factor on arrival times that changes the noise of every forward and almost nothing else.
const TIME_SHIFT: f64 = 1.0001;

const PROMPT: u32 = 256;
const OUTPUT: u32 = 192;

fn kinds(mix: &Mix) -> Vec<RequestKind> {
    mix.map(|(task, share, _)| RequestKind {
        task_type: task.to_owned(),
        share,
        prompt_tokens: PROMPT,
        output_tokens: OUTPUT,
    })
    .to_vec()
}

/// The simulated profile, request mix and rules.
#[derive(Clone, Copy)]
struct Scenario<'a> {
    profile: &'a Profile,
    mix: &'a Mix,
    experiment: &'a Experiment,
}

fn serve(scenario: Scenario<'_>, per_second: f64, policy: Policy, (seconds, seed): (u64, u64)) -> RunOutcome {
    let setup = Setup {
        profile: scenario.profile,
        traffic: Traffic::Open { per_second, kinds: kinds(scenario.mix), sequences_max: 2_048 },
        policy,
        seed,
        duration: Duration::from_secs(seconds),
        warm_up: Duration::from_secs(seconds / 4),
    };
    run_with(&setup, scenario.experiment)
}

/// Prints P50 and P99 of the time per output token for both kinds, at each load and with each way of serving.
pub(crate) fn mixed(profile: &Profile, experiment: &Experiment, quick: bool) {
    MIXES.iter().for_each(|mix| mixed_kinds(Scenario { profile, mix, experiment }, quick));
}

fn mixed_kinds(scenario: Scenario<'_>, quick: bool) {
    let Scenario { profile, mix, experiment } = scenario;
    let rates: Vec<(&str, f64)> = mix.iter().map(|(task, _, rate)| (*task, *rate)).collect();
    let profile = Profile { acceptance: Acceptance::by_task(&rates), ..profile.clone() };
    let most = saturation_rate(&profile);
    let scenario = Scenario { profile: &profile, ..scenario };
    print_line(&format!("\n# Mixed requests: {}", profile.name));
    print_line(&format!(
        "{mix:?} (task type, share, acceptance), prompts of {PROMPT}, outputs of {OUTPUT} on average; the target is saturated at {most:.1} requests/s with k = 0.\n\
         Milliseconds per output token, P50/P99, of each kind of request; total tokens/s."
    ));
    let seconds = if quick { 40 } else { 120 };
    let mut mixed_groups = *experiment;
    mixed_groups.groups.by_lane = false;
    for load in LOADS {
        let per_second = load * most;
        print_line(&format!("load {load:.2}, {per_second:.1} requests/s"));
        let k_all = best_fixed(scenario, per_second, seconds);
        let lanes = Policy::Lanes { max_k: MAX_K };
        for (name, policy, experiment) in [
            ("lanes, groups of one lane".to_owned(), lanes, experiment),
            ("lanes, mixed groups".to_owned(), lanes, &mixed_groups),
            (format!("one k for all, best: {k_all}"), Policy::Fixed(k_all), &mixed_groups),
            ("k = 0".to_owned(), Policy::Fixed(0), experiment),
        ] {
            let outcome = serve(Scenario { experiment, ..scenario }, per_second, policy, (seconds, 1));
            let cells: Vec<String> = outcome
                .kinds
                .iter()
                .map(|kind| {
                    let at = |part| percentile(&kind.tpot_ms, part);
                    format!("{} {:>6.2}/{:>6.2}", kind.task_type, at(0.5), at(0.99))
                })
                .collect();
            let ks: Vec<String> = outcome.lanes.iter().map(|lane| format!("{:.1}", lane.mean_k)).collect();
            print_line(&format!(
                "  {name:<26} {}  {:>7.0} tokens/s  mean k {}",
                cells.join("  "),
                outcome.tokens_per_second(),
                ks.join("/")
            ));
        }
        let runs = if quick { SEEDS } else { TAIL_SEEDS };
        // By kind: results with lanes, and with a second run of k = 0.
        let mut tails = mix.map(|_| (Vec::new(), Vec::new()));
        for seed in 1..=runs {
            let p99 = |per_second, served| {
                let outcome = serve(scenario, per_second, served, (seconds, seed));
                [0, 1].map(|kind| percentile(&outcome.kinds[kind].tpot_ms, 0.99))
            };
            let plain = Policy::Fixed(0);
            let bar = p99(per_second, plain);
            let ours = p99(per_second, lanes);
            let plain_again = p99(per_second * TIME_SHIFT, plain);
            for (kind, (with_lanes, by_chance)) in tails.iter_mut().enumerate() {
                with_lanes.push(ours[kind] / bar[kind]);
                by_chance.push(plain_again[kind] / bar[kind]);
            }
        }
        for ((kind, ..), (with_lanes, by_chance)) in mix.iter().zip(&tails) {
            print_line(&format!(
                "  P99 of {kind} requests / P99 with k = 0, {runs} seeds: lanes {}; k = 0 again, arrivals shifted by 0.01%, {}",
                spread(with_lanes),
                spread(by_chance)
            ));
        }
    }
}

/// Mean, its standard error, minimum and maximum.
fn spread(ratios: &[f64]) -> String {
    let count = ratios.len() as f64;
    let mean = ratios.iter().sum::<f64>() / count;
    let variance = ratios.iter().map(|ratio| (ratio - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let (least, most) = ratios
        .iter()
        .fold((f64::MAX, f64::MIN), |(least, most), ratio| (least.min(*ratio), most.max(*ratio)));
    format!("{mean:.3} +- {:.3} ({least:.2} to {most:.2})", (variance / count).sqrt())
}

/// Requests per second that saturate the target at k = 0.
fn saturation_rate(profile: &Profile) -> f64 {
    let forward = |sequences: u32| ForwardRows::even(sequences, 1, PROMPT + OUTPUT / 2);
    // The point where doubling the sequences hardly increases the throughput.
    let per_second = |sequences: u32| {
        f64::from(sequences) * 1e6 / (profile.target.curve.micros(forward(sequences)) + 2.0 * profile.wire_us)
    };
    let tokens = [64, 128, 256, 512].map(per_second).into_iter().fold(0.0, f64::max);
    let prompt_us = f64::from(PROMPT) * profile.target.curve.prefill_us_per_row();
    1e6 / (f64::from(OUTPUT) * 1e6 / tokens + prompt_us)
}

/// The k with the lowest median over both kinds if it applies to all.
fn best_fixed(scenario: Scenario<'_>, per_second: f64, seconds: u64) -> u32 {
    let median = |k: u32| {
        let outcome = serve(scenario, per_second, Policy::Fixed(k), (seconds / 2, 1));
        let all: Vec<f64> = outcome.kinds.iter().flat_map(|kind| kind.tpot_ms.clone()).collect();
        if all.is_empty() { f64::MAX } else { percentile(&all, 0.5) }
    };
    (0..=MAX_K).map(|k| (median(k), k)).min_by(|a, b| a.0.total_cmp(&b.0)).map_or(0, |best| best.1)
}

/// Prints how close lanes come to the best split of the sequences into groups that alternate between drafting
/// and verifying.
pub(crate) fn overlap(profile: &Profile, experiment: &Experiment) {
    const CONTEXT: u32 = 512;
    print_line(&format!("\n# Overlap of drafting and verifying: {}", profile.name));
    print_line(
        "own choice / best schedule: any k, any number of equal alternating groups, no noise, mean acceptance in every round",
    );
    for acceptance in [0.5, 0.8, 0.95] {
        let profile = profile.with_acceptance(acceptance);
        let mut cells = Vec::new();
        for sequences in [1, 4, 16, 64, 256] {
            let setup = Setup {
                profile: &profile,
                traffic: Traffic::Closed { sequences, kinds: one_kind(CONTEXT) },
                policy: Policy::Lanes { max_k: MAX_K },
                seed: 1,
                duration: Duration::from_secs(20),
                warm_up: Duration::from_secs(5),
            };
            let outcome = run_with(&setup, experiment);
            let (best, k, groups) = best_schedule(&profile, acceptance, (sequences, CONTEXT));
            cells.push(format!(
                "{sequences}: {:.2} (k={k}, {groups} group{}, target busy {:.2})",
                outcome.tokens_per_second() / best,
                if groups == 1 { "" } else { "s" },
                outcome.busy(Role::Target),
            ));
        }
        print_line(&format!("acceptance {acceptance}: {}", cells.join(", ")));
    }
}

/// Tokens per second of the best schedule, its k and its number of groups. A group's round takes at least its
/// draft, its verify step and the network times; in that time the target and each draft worker must process
/// all groups.
fn best_schedule(profile: &Profile, acceptance: f64, (sequences, context): (u32, u32)) -> (f64, u32, u32) {
    let mut best = (0.0, 0, 1);
    for k in 0..=MAX_K {
        let tokens = (0..=k).map(|i| acceptance.powi(i as i32)).sum::<f64>();
        for groups in 1..=4_u32.min(sequences) {
            let group = sequences.div_ceil(groups);
            let verify = profile.target.curve.micros(ForwardRows::even(group, k + 1, context));
            let at_draft = group.div_ceil(profile.draft.workers);
            let draft = f64::from(k) * profile.draft.curve.micros(ForwardRows::even(at_draft, 1, context));
            let wire = if k == 0 { 2.0 } else { 4.0 } * profile.wire_us;
            let used_drafts = profile.draft.workers.min(group);
            // Groups smaller than the pool of draft workers do not compete there.
            let at_drafts = draft * f64::from((groups * used_drafts).div_ceil(profile.draft.workers));
            let round = (verify + draft + wire).max(f64::from(groups) * verify).max(at_drafts);
            let speed = f64::from(sequences) * tokens * 1e6 / round;
            if speed > best.0 {
                best = (speed, k, groups);
            }
        }
    }
    best
}
