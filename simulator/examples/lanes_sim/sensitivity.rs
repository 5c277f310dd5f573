//! What hangs on the numbers of the rules: each of them halved and doubled, some rules left out, and what a
//! lane would get that knew the acceptance, at a few points of the maps that are easy and hard, with changes
//! of the text among them.

use std::time::Duration;

use scheduling::profile::{Acceptance, ForwardRows, Profile};
use simulator::{Experiment, Policy, Setup, Sharing, Traffic, run_with};

use crate::map::CONTEXT;
use crate::rules::RULES;
use crate::{MAX_K, SEEDS, one_kind, say};

/// Sequences and acceptance, at each profile.
const POINTS: [(u32, f64); 6] = [(1, 0.95), (4, 0.5), (16, 0.65), (64, 0.5), (64, 0.8), (256, 0.95)];

/// Sequences of the point whose acceptance changes, and between what.
const STEPPED: (u32, [f64; 3]) = (4, [0.8, 0.3, 0.8]);

/// Numbers that have no double, and what stands for it.
const CHANCES: [&str; 2] = ["prior_acceptance", "belief_neighbour"];
const CHANCE_MOST: f64 = 0.95;

/// One point, and what the best fixed k gets there.
struct Point {
    profile: Profile,
    name: String,
    sequences: u32,
    duration: Duration,
    best: f64,
    /// Where it stays as it is.
    acceptance: Option<f64>,
}

impl Point {
    fn new(profile: &Profile, sequences: u32, rates: &[f64]) -> Self {
        let plain = profile.target.curve.micros(ForwardRows::even(sequences, 1, CONTEXT));
        let plain_s = (plain + 2.0 * profile.wire_us) / 1e6;
        let duration = match rates {
            [_] => crate::map::duration(profile, sequences),
            _ => Duration::from_secs_f64(300.0 * plain_s * rates.len() as f64),
        };
        let part_s = duration.as_secs_f64() / rates.len() as f64;
        let steps: Vec<(f64, f64)> =
            rates.iter().enumerate().map(|(at, rate)| (at as f64 * part_s, *rate)).collect();
        let acceptance = if let [rate] = rates { Some(*rate) } else { None };
        let rates: Vec<String> = rates.iter().map(f64::to_string).collect();
        let name = format!("{} at {}", sequences, rates.join(" "));
        let profile = Profile { acceptance: Acceptance::steps(&steps), ..profile.clone() };
        let mut point = Self { profile, name, sequences, duration, best: 0.0, acceptance };
        let fixed = |k| point.speed(Policy::Fixed(k), &Experiment::default());
        point.best = (0..=MAX_K).map(fixed).fold(0.0, f64::max);
        point
    }

    fn speed(&self, policy: Policy, experiment: &Experiment) -> f64 {
        let of = |seed| {
            let setup = Setup {
                profile: &self.profile,
                traffic: Traffic::Closed { sequences: self.sequences, kinds: one_kind(CONTEXT) },
                policy,
                sharing: Sharing::ByCost,
                seed,
                duration: self.duration,
                warm_up: Duration::ZERO,
            };
            run_with(&setup, experiment).tokens_per_second()
        };
        (1..=SEEDS).map(of).sum::<f64>() / SEEDS as f64
    }

    fn ratio(&self, experiment: &Experiment) -> f64 {
        self.speed(Policy::Lanes { max_k: MAX_K }, experiment) / self.best
    }
}

/// Prints the smallest and the mean ratio to the best fixed k for each change of the rules.
pub(crate) fn draw(profiles: &[Profile], experiment: &Experiment) {
    say("\n# What hangs on the numbers of the rules: own choice / best fixed k (by the rules as they are)");
    let mut points = Vec::new();
    for profile in profiles {
        let fixed = POINTS.iter().map(|&(sequences, rate)| Point::new(profile, sequences, &[rate]));
        points.extend(fixed);
        points.push(Point::new(profile, STEPPED.0, &STEPPED.1));
    }
    let names: Vec<&str> = points.iter().take(POINTS.len() + 1).map(|point| point.name.as_str()).collect();
    say(&format!("Points, at each of {} profiles: {}", profiles.len(), names.join(", ")));
    let line = |name: &str, experiment: &Experiment| {
        let ratios: Vec<f64> = points.iter().map(|point| point.ratio(experiment)).collect();
        say(&format!("{name:<44} {}", told(&ratios)));
    };
    line("as it is", experiment);
    for rule in RULES {
        let value = rule.get(experiment);
        let most = if CHANCES.contains(&rule.name) { CHANCE_MOST } else { f64::MAX };
        for changed in [value / 2.0, (value * 2.0).min(most)] {
            let mut other = *experiment;
            rule.set(&mut other, changed);
            // A number that counts has no half of one.
            if rule.get(&other) == value || rule.get(&other) == 0.0 {
                continue;
            }
            line(&format!("{} {} instead of {value}", rule.name, rule.get(&other)), &other);
        }
    }
    say("\nWithout");
    let without = |name: &str, change: fn(&mut Experiment)| {
        let mut other = *experiment;
        change(&mut other);
        line(name, &other);
    };
    without("hysteresis", |other| (other.rules.hysteresis, other.rules.rash_hysteresis) = (0.0, 0.0));
    without("groups", |other| (other.rules.groups_max, other.groups.groups_max) = (1, 1));
    without("agreement of fed tokens", |other| other.tells_agreement = false);
    without("a belief: prices are right", |other| {
        (other.rules.belief.common, other.rules.belief.own, other.rules.belief.common_drift) =
            (1e-6, 1e-6, 0.0);
    });
    say("\nWhere acceptance is known from the start (points where it stays as it is)");
    let known = |name: &str, change: fn(&mut Experiment)| {
        let ratios: Vec<f64> = points
            .iter()
            .filter_map(|point| {
                let mut other = *experiment;
                other.rules.prior_acceptance = point.acceptance?;
                // Nothing that is judged changes it.
                other.rules.acceptance.prior_weight = 1e12;
                other.rules.acceptance.change_deviations = f64::MAX;
                change(&mut other);
                Some(point.ratio(&other))
            })
            .collect();
        say(&format!("{name:<44} {}", told(&ratios)));
    };
    known("acceptance known", |_| {});
    known("acceptance known, any move at once", |other| other.rules.max_move = MAX_K);
    known("acceptance known, any move, prices are right", |other| {
        other.rules.max_move = MAX_K;
        (other.rules.belief.common, other.rules.belief.own, other.rules.belief.common_drift) =
            (1e-6, 1e-6, 0.0);
    });
}

fn told(ratios: &[f64]) -> String {
    let least = ratios.iter().copied().fold(f64::MAX, f64::min);
    let mean = ratios.iter().sum::<f64>() / ratios.len().max(1) as f64;
    let below = ratios.iter().filter(|ratio| **ratio < 0.97).count();
    format!("min {least:.3} mean {mean:.3} below 0.97: {below}")
}
