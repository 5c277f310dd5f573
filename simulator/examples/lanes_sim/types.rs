//! A few sequences of many task types on one target: lanes of one sequence each that share the target.
//! Compared with every fixed k.

use std::time::Duration;

use scheduling::profile::{Acceptance, Profile};
use simulator::outcome::percentile;
use simulator::{Experiment, Policy, RequestKind, RunOutcome, Setup, Traffic, run_with};

use crate::{SEEDS, print_line};

/// Number of task types; their acceptance differs about as much as with the bundled pair.
const TYPES: u32 = 11;

/// Acceptance of the first and the last task type.
const ACCEPTANCES: [(f64, f64); 2] = [(0.42, 0.74), (0.54, 0.86)];

const SEQUENCES: [u32; 6] = [1, 2, 3, 4, 8, 16];

const MAX_K: u32 = 8;

/// Prompt tokens of a request. They are computed: with short outputs they take a good part of the time.
const PROMPT: u32 = 128;
const OUTPUT: u32 = 64;
const SECONDS: u64 = 60;

/// Tokens per second, and P99 of the milliseconds per token of a request.
type Figures = (f64, f64);

/// Prints the own choice compared with each fixed k.
pub(crate) fn print(profile: &Profile, experiment: &Experiment) {
    for (least, most) in ACCEPTANCES {
        print_line(&format!(
            "\n{TYPES} task types with acceptance {least} to {most}, outputs of {OUTPUT}: own over best fixed k and over k = 0 \
             (tokens/s), P99 of the time a token over k = 0's"
        ));
        let step = (most - least) / f64::from(TYPES - 1);
        let types: Vec<(String, f64)> =
            (0..TYPES).map(|i| (format!("type {i}"), least + step * f64::from(i))).collect();
        let rates: Vec<(&str, f64)> = types.iter().map(|(name, rate)| (name.as_str(), *rate)).collect();
        let profile = Profile { acceptance: Acceptance::by_task(&rates), ..profile.clone() };
        for sequences in SEQUENCES {
            let figures = |policy| play(&profile, experiment, (sequences, policy));
            let fixed: Vec<Figures> = (0..=MAX_K).map(|k| figures(Policy::Fixed(k))).collect();
            let own = figures(Policy::Lanes { max_k: MAX_K });
            let (best_k, best) =
                (0..).zip(&fixed).max_by(|a, b| a.1.0.total_cmp(&b.1.0)).expect("k = 0 is among them");
            print_line(&format!(
                "{sequences:>4} sequences: {:.2} {:.2}, P99 {:.2}; best k = {best_k}, {:.2} of k = 0, P99 {:.2}",
                own.0 / best.0,
                own.0 / fixed[0].0,
                own.1 / fixed[0].1,
                best.0 / fixed[0].0,
                best.1 / fixed[0].1,
            ));
        }
    }
}

fn play(profile: &Profile, experiment: &Experiment, (sequences, policy): (u32, Policy)) -> Figures {
    let kinds: Vec<RequestKind> = (0..TYPES)
        .map(|i| RequestKind {
            task_type: format!("type {i}"),
            share: 1.0 / f64::from(TYPES),
            prompt_tokens: PROMPT,
            output_tokens: OUTPUT,
        })
        .collect();
    let run = |seed| {
        let setup = Setup {
            profile,
            traffic: Traffic::Closed { sequences, kinds: kinds.clone() },
            policy,
            seed,
            duration: Duration::from_secs(SECONDS),
            warm_up: Duration::ZERO,
        };
        run_with(&setup, &Experiment { computes_prompts: true, ..*experiment })
    };
    let runs: Vec<RunOutcome> = (1..=SEEDS).map(run).collect();
    let p99 = |run: &RunOutcome| {
        let all: Vec<f64> = run.kinds.iter().flat_map(|kind| kind.tpot_ms.iter().copied()).collect();
        percentile(&all, 0.99)
    };
    let mean = |of: &dyn Fn(&RunOutcome) -> f64| runs.iter().map(of).sum::<f64>() / runs.len() as f64;
    (mean(&RunOutcome::tokens_per_second), mean(&p99))
}
