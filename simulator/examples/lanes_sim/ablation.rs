//! Ablation: the value of each mechanism of choosing k and of batching. Each is left out at points that could
//! need it: wrong step tables, prompts among the decode steps, lanes with different knees, sudden changes of
//! the text, and lanes that live for three requests.

use std::time::Duration;

use scheduling::profile::{Acceptance, ForwardRows, Profile};
use simulator::{ENDLESS, Experiment, Policy, RequestKind, RunOutcome, Setup, Traffic, run_with};

use crate::map::CONTEXT;
use crate::{MAX_K, print_line};

/// Number of runs per point, and per short or busy point.
const SEEDS: u64 = 6;
const MORE_SEEDS: u64 = 24;

/// Task types that requests take in turn, each with its own lane.
const TASKS: u32 = 11;

/// Loss of speed at some point from which a mechanism counts as worthwhile.
const WORTH: f64 = 0.01;

/// Ratio of reported to true step times, for targets and drafts.
const TABLES: [(&str, (f64, f64)); 3] = [
    ("", (1.0, 1.0)),
    ("reported times: target 0.7, draft 1.3 of the true ones", (0.7, 1.3)),
    ("reported times: target 1.3, draft 0.7 of the true ones", (1.3, 0.7)),
];

/// A mechanism that can be left out.
struct Mechanism {
    name: &'static str,
    leave_out: fn(&mut Experiment),
}

fn mechanisms() -> Vec<Mechanism> {
    let by = |name, leave_out| Mechanism { name, leave_out };
    vec![
        by("probes and feeds at k = 0", |e| e.rules.evidence_share = 0.0),
        by("agreement of fed tokens", |e| e.reports_agreement = false),
        by("unconfirmed hysteresis", |e| e.rules.unconfirmed_hysteresis = e.rules.hysteresis),
        by("hysteresis", |e| (e.rules.unconfirmed_hysteresis, e.rules.hysteresis) = (0.0, 0.0)),
        by("settling", |e| e.rules.settling_lane_rounds = 0),
        by("change detection", |e| e.rules.acceptance.change_deviations = f64::MAX),
        by("residuals", |e| e.rules.residuals.deviation = 1e-6),
        by("residuals shared by neighbours", |e| e.rules.residuals.neighbour = 0.0),
        by("groups in prices", |e| e.rules.groups_max = 1),
        by("groups at workers", |e| e.groups.groups_max = 1),
        by("groups", |e| (e.rules.groups_max, e.groups.groups_max) = (1, 1)),
        by("regrouping margin", |e| (e.groups.regroup_margin, e.groups.regroup_rounds) = (0.0, 1.0)),
        by("groups by lane", |e| e.groups.by_lane = false),
    ]
}

/// One point: the simulated load and its duration.
struct Point {
    name: String,
    profile: Profile,
    traffic: Traffic,
    duration: Duration,
    reported_over_true: (f64, f64),
    /// Whether draft workers report agreement with fed tokens.
    reports_agreement: bool,
    /// Number of runs; a single short one tells little.
    seeds: u64,
}

impl Point {
    /// Logarithm of the score, for each run.
    fn scores(&self, left_out: &[&Mechanism], first_seed: u64) -> Vec<f64> {
        let mut experiment = Experiment {
            reported_over_true: self.reported_over_true,
            reports_agreement: self.reports_agreement,
            ..Experiment::default()
        };
        left_out.iter().for_each(|mechanism| (mechanism.leave_out)(&mut experiment));
        let score = |seed| {
            let setup = Setup {
                profile: &self.profile,
                traffic: self.traffic.clone(),
                policy: Policy::Lanes { max_k: MAX_K },
                seed,
                duration: self.duration,
                warm_up: Duration::ZERO,
            };
            self.score(&run_with(&setup, &experiment)).ln()
        };
        (first_seed..first_seed + self.seeds).map(score).collect()
    }

    /// The score: tokens per second, or for open traffic the inverse of the mean time per output token.
    fn score(&self, outcome: &RunOutcome) -> f64 {
        match self.traffic {
            Traffic::Closed { .. } => outcome.tokens_per_second(),
            Traffic::Open { .. } => {
                let all: Vec<f64> = outcome.kinds.iter().flat_map(|kind| kind.tpot_ms.clone()).collect();
                1e3 / (all.iter().sum::<f64>() / all.len() as f64)
            }
        }
    }
}

fn kind(task: &str, share: f64, (prompt_tokens, output_tokens): (u32, u32)) -> RequestKind {
    RequestKind { task_type: task.to_owned(), share, prompt_tokens, output_tokens }
}

impl Point {
    /// Creates a point with endless sequences of one lane, for this number of decode rounds.
    fn of_one_lane(name: String, profile: Profile, (sequences, rounds): (u32, f64)) -> Self {
        let traffic = Traffic::Closed { sequences, kinds: vec![kind("", 1.0, (CONTEXT, ENDLESS))] };
        let duration = duration_of(&profile, sequences, rounds);
        Self {
            name,
            profile,
            traffic,
            duration,
            reported_over_true: (1.0, 1.0),
            reports_agreement: true,
            seeds: SEEDS,
        }
    }
}

/// Duration of this number of decode rounds.
fn duration_of(profile: &Profile, sequences: u32, rounds: f64) -> Duration {
    let forward = profile.target.curve.micros(ForwardRows::even(sequences, 1, CONTEXT));
    Duration::from_secs_f64((forward + 2.0 * profile.wire_us) * rounds / 1e6)
}

/// A profile whose acceptance changes twice, after this number of decode rounds each.
fn changing(profile: &Profile, rates: [f64; 3], (sequences, rounds): (u32, f64)) -> Profile {
    let part = duration_of(profile, sequences, rounds).as_secs_f64();
    let steps: Vec<(f64, f64)> = (0..).zip(rates).map(|(at, rate)| (f64::from(at) * part, rate)).collect();
    Profile { acceptance: Acceptance::steps(&steps), ..profile.clone() }
}

/// Points with one lane: right and wrong tables, fresh lanes, sudden changes, more rows than were profiled.
fn one_lane(profile: &Profile) -> Vec<Point> {
    let mut points = Vec::new();
    for (told, reported_over_true) in TABLES {
        for (sequences, rate) in [(1, 0.8), (4, 0.5), (16, 0.65), (64, 0.8)] {
            let name = format!("{sequences} at {rate} {told}");
            let point = Point::of_one_lane(name, profile.with_acceptance(rate), (sequences, 200.0));
            points.push(Point { reported_over_true, ..point });
        }
    }
    for (sequences, rate) in [(1, 0.3), (1, 0.8), (2, 0.6), (8, 0.8)] {
        let name = format!("fresh lane of {sequences} at {rate}, three requests of 64");
        let point = Point::of_one_lane(name, profile.with_acceptance(rate), (sequences, 192.0));
        let traffic = Traffic::Closed { sequences, kinds: vec![kind("", 1.0, (CONTEXT, 64))] };
        points.push(Point { traffic, seeds: MORE_SEEDS, ..point });
    }
    for (told, reported_over_true) in TABLES {
        for (sequences, rate) in [(1, 0.3), (4, 0.3), (4, 0.8), (16, 0.5)] {
            let name = format!(
                "{TASKS} fresh lanes, {sequences} sequences in total at {rate}, outputs of 64 {told}"
            );
            let point = Point::of_one_lane(name, profile.with_acceptance(rate), (sequences, 600.0));
            let kinds = (0..TASKS).map(|task| kind(&task.to_string(), 1.0 / f64::from(TASKS), (CONTEXT, 64)));
            let traffic = Traffic::Closed { sequences, kinds: kinds.collect() };
            points.push(Point { traffic, reported_over_true, seeds: MORE_SEEDS, ..point });
        }
    }
    for sequences in [1, 4, 16] {
        let name = format!("{sequences} at 0.8, 0.2, 0.8");
        let profile = changing(profile, [0.8, 0.2, 0.8], (sequences, 200.0));
        points.push(Point::of_one_lane(name, profile, (sequences, 600.0)));
    }
    for sequences in [4, 32] {
        let name = format!("{sequences} at 0.05, 0.85, 0.05, no agreement of fed tokens reported");
        let profile = changing(profile, [0.05, 0.85, 0.05], (sequences, 300.0));
        let point = Point::of_one_lane(name, profile, (sequences, 900.0));
        points.push(Point { reports_agreement: false, ..point });
    }
    for rate in [0.65, 0.9] {
        let name = format!("512 at {rate}");
        let point = Point::of_one_lane(name, profile.with_acceptance(rate), (512, 60.0));
        points.push(Point { seeds: 2, ..point });
    }
    points
}

/// Points with two lanes with different knees, with and without prompts.
fn two_lanes(profile: &Profile) -> Vec<Point> {
    let rates = [("easy", 0.85), ("hard", 0.4)];
    let profile = Profile { acceptance: Acceptance::by_task(&rates), ..profile.clone() };
    let mut points = Vec::new();
    for sequences in [8, 32, 128] {
        let name = format!("two lanes, {sequences} sequences in total");
        let kinds = vec![kind("easy", 0.5, (CONTEXT, 256)), kind("hard", 0.5, (CONTEXT, 256))];
        let point = Point::of_one_lane(name, profile.clone(), (sequences, 400.0));
        points.push(Point { traffic: Traffic::Closed { sequences, kinds }, seeds: 2 * SEEDS, ..point });
    }
    let tokens = 64.0 / duration_of(&profile, 64, 1.0).as_secs_f64();
    let prompt_s = 256.0 * profile.target.curve.prefill_us_per_row() / 1e6;
    for load in [0.3, 0.7] {
        let traffic = Traffic::Open {
            per_second: load / (192.0 / tokens + prompt_s),
            kinds: vec![kind("easy", 0.6, (256, 192)), kind("hard", 0.4, (256, 192))],
            sequences_max: 512,
        };
        let name = format!("two lanes with prompts of 256, load {load}");
        let point = Point::of_one_lane(name, profile.clone(), (32, 1_500.0));
        points.push(Point { traffic, seeds: MORE_SEEDS / 2, ..point });
    }
    points
}

/// Prints for each mechanism, or each `MECHANISM+MECHANISM` of `picked`, the remaining speed without it at
/// its worst points.
pub(crate) fn print(profiles: &[Profile], picked: &[String]) {
    print_line("\n# Ablation: speed without a mechanism / speed with it, standard errors over seeds");
    let all = mechanisms();
    let picked: Vec<String> = match picked {
        [] => all.iter().map(|mechanism| mechanism.name.to_owned()).collect(),
        picked => picked.to_vec(),
    };
    let points: Vec<(String, Point)> = profiles
        .iter()
        .flat_map(|profile| {
            let points = one_lane(profile).into_iter().chain(two_lanes(profile));
            points.map(|point| (format!("{}: {}", profile.name, point.name), point))
        })
        .collect();
    let with: Vec<Vec<f64>> = points.iter().map(|(_, point)| point.scores(&[], 1)).collect();
    for name in ["nothing (other seeds)".to_owned()].into_iter().chain(picked) {
        let parts: Vec<&Mechanism> =
            name.split('+').filter_map(|part| all.iter().find(|known| known.name == part)).collect();
        let first_seed = if parts.is_empty() { 1001 } else { 1 };
        let without: Vec<Vec<f64>> =
            points.iter().map(|(_, point)| point.scores(&parts, first_seed)).collect();
        print_ratios(&name, points.iter().map(|(name, _)| name.as_str()), without.iter().zip(&with));
    }
}

/// Prints the mean of all points, the numbers of worse and better points, and the three worst points.
fn print_ratios<'a>(
    name: &str,
    points: impl Iterator<Item = &'a str>,
    scores: impl Iterator<Item = (&'a Vec<f64>, &'a Vec<f64>)>,
) {
    let mut ratios: Vec<((f64, f64), &str)> =
        scores.map(|(without, with)| ratio_of(without, with)).zip(points).collect();
    ratios.sort_by(|a, b| a.0.0.total_cmp(&b.0.0));
    let mean = ratios.iter().map(|((ratio, _), _)| ratio.ln()).sum::<f64>() / ratios.len() as f64;
    let is_sure = |ratio: f64, error: f64| (ratio - 1.0).abs() > WORTH.max(2.0 * error);
    let sure = || ratios.iter().filter(|((ratio, error), _)| is_sure(*ratio, *error));
    let worse = sure().filter(|((ratio, _), _)| *ratio < 1.0).count();
    print_line(&format!(
        "without {name}: mean {:.3}, worse by at least 1% at {worse} points, better at {}",
        mean.exp(),
        sure().count() - worse
    ));
    for ((ratio, error), point) in ratios.iter().take(3).chain(ratios.last()) {
        print_line(&format!("    {ratio:.3} +- {error:.3}  {point}"));
    }
}

/// Ratio of two mean scores with its standard error; paired by seed if the seeds are the same.
fn ratio_of(without: &[f64], with: &[f64]) -> (f64, f64) {
    let differences: Vec<f64> = without.iter().zip(with).map(|(without, with)| without - with).collect();
    let count = differences.len() as f64;
    let mean = differences.iter().sum::<f64>() / count;
    let variance = differences.iter().map(|at| (at - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (mean.exp(), (variance / count).sqrt())
}
