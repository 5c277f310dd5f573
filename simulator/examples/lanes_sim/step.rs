//! A step of acceptance, down and up again: number of rounds until a lane is within 5% of the best fixed k.

use std::time::Duration;

use scheduling::profile::{Acceptance, Profile};
use simulator::{Experiment, Policy, Setup, Traffic, run_with};

use crate::{MAX_K, SEEDS, one_kind, print_line};

const CONTEXT: u32 = 512;
const RATES: [f64; 3] = [0.8, 0.3, 0.8];

/// Rounds after which a lane must have reached its speed.
const ROUNDS_ALLOWED: f64 = 20.0;

/// Decode rounds per stretch.
const ROUNDS: f64 = 300.0;

/// Prints the lane's speed in each stretch after its first rounds.
pub(crate) fn print(profile: &Profile, experiment: &Experiment) {
    print_line(&format!(
        "\nAcceptance {RATES:?}, {ROUNDS} plain rounds each: own choice / best fixed k, after the first {ROUNDS_ALLOWED} rounds of each stretch"
    ));
    for sequences in [1, 4, 16, 64] {
        let forward = scheduling::profile::ForwardRows::even(sequences, 1, CONTEXT);
        let round_s = (profile.target.curve.micros(forward) + 2.0 * profile.wire_us) / 1e6;
        let at = |stretch: usize| stretch as f64 * ROUNDS * round_s;
        let steps: Vec<(f64, f64)> = RATES.iter().enumerate().map(|(i, rate)| (at(i), *rate)).collect();
        let stepped = Profile { acceptance: Acceptance::steps(&steps), ..profile.clone() };
        // Rounds with a draft are longer than decode rounds; assume up to three times as long.
        let settled = |stretch: usize| at(stretch) + 3.0 * ROUNDS_ALLOWED * round_s;
        let tokens = |policy, until: f64| -> f64 {
            let setup = |seed| Setup {
                profile: &stepped,
                traffic: Traffic::Closed { sequences, kinds: one_kind(CONTEXT) },
                policy,
                seed,
                duration: Duration::from_secs_f64(until),
                warm_up: Duration::ZERO,
            };
            let total = |seed| {
                let outcome = run_with(&setup(seed), experiment);
                outcome.tokens_per_second() * outcome.seconds
            };
            (1..=SEEDS).map(total).sum::<f64>() / SEEDS as f64
        };
        let mut cells = Vec::new();
        for stretch in 0..RATES.len() {
            let speed = |policy| tokens(policy, at(stretch + 1)) - tokens(policy, settled(stretch));
            let best = (0..=MAX_K).map(|k| speed(Policy::Fixed(k))).fold(0.0, f64::max);
            cells.push(format!("{:.2}", speed(Policy::Lanes { max_k: MAX_K }) / best));
        }
        print_line(&format!("{sequences:>4} sequences: {}", cells.join(" ")));
    }
}
