//! Comparisons of simulated servers: hundreds of fast runs, with more noise than on a calm machine.

use std::time::Duration;

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};

use super::*;
use crate::load::sample::RequestOutcome;

const RULES: VerdictRules = VerdictRules { threshold: 1.3, confidence: 0.99 };
const TASKS: usize = 11;

fn sample(block: usize, item: usize, e2el: Duration, tokens: u64) -> Sample {
    Sample {
        task: format!("task {}", item % TASKS),
        item,
        block,
        outcome: RequestOutcome::Completed,
        intended_after: Duration::ZERO,
        ttft: Some(e2el / 10),
        e2el,
        gaps: Vec::new(),
        input_tokens: 10,
        output_tokens: tokens,
        speculation: None,
        accepted_by_position: None,
        text_hash: 7,
    }
}

/// Two servers on one machine. Requests of one task type are similar with about 10% noise, one in fifty takes
/// twice as long, and the machine's speed drifts over several blocks.
struct Simulation {
    random: Xoshiro256PlusPlus,
    mood: f64,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        Self { random: Xoshiro256PlusPlus::seed_from_u64(seed), mood: 0.0 }
    }

    fn normal(&mut self) -> f64 {
        let (u, v): (f64, f64) = (1.0 - self.random.random::<f64>(), self.random.random());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    /// Samples of both arms; times of the first are multiplied by `slowdown`.
    fn run(&mut self, blocks: usize, slowdown: f64) -> [Vec<Sample>; 2] {
        let mut arms: [Vec<Sample>; 2] = Default::default();
        for block in 0..blocks {
            for turn in 0..2 {
                let arm = (turn + block) % 2;
                self.mood = 0.8 * self.mood + 0.03 * self.normal();
                for item in 0..TASKS {
                    let tokens = 20 + 4 * (item as u64 % 5);
                    let noise = (0.1 * self.normal() + self.mood).exp();
                    let hiccup = if self.random.random::<f64>() < 0.02 { 2.0 } else { 1.0 };
                    let slow = if arm == 0 { slowdown } else { 1.0 };
                    let per_token = 0.01 * (1.0 + item as f64 / 10.0);
                    let seconds = tokens as f64 * per_token * noise * hiccup * slow;
                    arms[arm].push(sample(block, item, Duration::from_secs_f64(seconds), tokens));
                }
            }
        }
        arms
    }
}

fn compared(arms: &[Vec<Sample>; 2]) -> Comparison {
    let [first, second] = arms.each_ref().map(|samples| samples.iter().collect::<Vec<_>>());
    compare(&first, &second, &RULES)
}

/// Number of 100 seeded runs with this result.
fn count(slowdown: f64, difference: Difference) -> usize {
    (0..100)
        .filter(|seed| compared(&Simulation::new(*seed).run(16, slowdown)).difference == difference)
        .count()
}

#[test]
fn a_server_against_itself_shows_no_difference() {
    let none = count(1.0, Difference::NoneFound);
    println!("no difference in {none} of 100 runs");
    assert!(none >= 95, "{none} of 100 runs");
}

#[test]
fn a_slowdown_of_a_tenth_is_found() {
    let slower = count(1.1, Difference::Slower);
    println!("slower in {slower} of 100 runs");
    assert!(slower >= 90, "{slower} of 100 runs");
}

/// The mean over all requests, one arm after the other, would be biased by the machine's drift: the reason to
/// alternate arms.
#[test]
fn the_interval_holds_the_truth_as_often_as_it_says() {
    let truth = 1.0 / 1.25;
    let held = (0..200).filter(|seed| {
        let speedup = compared(&Simulation::new(1000 + seed).run(8, 1.25)).speedup.unwrap();
        speedup.low <= truth && truth <= speedup.high
    });
    let held = held.count();
    assert!(held >= 194, "{held} of 200 intervals of 99%");
}

/// Blocks with known ratios: each is one observation, regardless of the number of its requests.
#[test]
fn verdicts_follow_the_interval() {
    let arms = |ratios: &[f64]| -> [Vec<Sample>; 2] {
        let of = |arm: usize| {
            let times = ratios.iter().map(move |ratio| if arm == 0 { 0.1 } else { 0.1 * ratio });
            let block = |(block, time): (usize, f64)| {
                (0..=block).map(move |item| sample(block, item, Duration::from_secs_f64(time), 10))
            };
            times.enumerate().flat_map(block).collect()
        };
        [of(0), of(1)]
    };
    for (ratios, word, difference) in [
        (&[2.0, 2.1, 2.0, 1.9][..], "ship", Difference::Faster),
        (&[1.1, 1.12, 1.1, 1.09], "do not", Difference::Faster),
        (&[0.8, 0.82, 0.8, 0.81], "do not", Difference::Slower),
        (&[1.0, 1.02, 1.0, 0.99], "do not", Difference::NoneFound),
        (&[1.0, 2.0, 1.2, 1.6], "undecided", Difference::NoneFound),
        (&[2.0, 2.0, 2.0], "undecided", Difference::NoneFound),
    ] {
        let found = compared(&arms(ratios));
        assert_eq!((found.verdict.label(), found.difference), (word, difference), "{ratios:?}: {found:?}");
        assert_eq!(found.observations, ratios.len());
        assert_eq!(found.same_text, found.pairs);
    }
    let undecided = compared(&arms(&[1.0, 2.0, 1.2, 1.6])).verdict;
    assert!(matches!(&undecided, ShipVerdict::Undecided(why) if why.contains("--blocks")), "{undecided:?}");
}

#[test]
fn arms_with_failed_requests_are_not_judged() {
    let mut arms = Simulation::new(1).run(16, 0.5);
    assert_eq!(compared(&arms).verdict, ShipVerdict::Ship);
    arms[1].iter_mut().step_by(20).for_each(|sample| sample.outcome = RequestOutcome::TimedOut);
    let found = compared(&arms);
    assert_eq!((found.failed, found.pairs), (9, 176 - 9));
    assert!(matches!(&found.verdict, ShipVerdict::Undecided(why) if why.contains("5%")), "{found:?}");
}
