//! The map: acceptance by number of sequences. Compares a lane's own choice of k with every fixed k and with
//! no speculation.

use std::time::Duration;

use scheduling::profile::Profile;
use simulator::{Experiment, Policy, Setup, Traffic, plain, run_with};

use crate::{MAX_K, SEEDS, one_kind, print_line};

const ACCEPTANCE: [f64; 6] = [0.2, 0.35, 0.5, 0.65, 0.8, 0.95];
const SEQUENCES: [u32; 6] = [1, 4, 16, 64, 256, 512];

/// Initial length of a sequence, in tokens.
pub(crate) const CONTEXT: u32 = 512;

/// Decode rounds per run, including a cold start.
const ROUNDS: u32 = 600;

/// The smallest ratios so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Worst {
    pub(crate) vs_best: f64,
    pub(crate) vs_off: f64,
}

impl Default for Worst {
    fn default() -> Self {
        Self { vs_best: f64::MAX, vs_off: f64::MAX }
    }
}

impl Worst {
    pub(crate) fn and(self, other: Self) -> Self {
        Self { vs_best: self.vs_best.min(other.vs_best), vs_off: self.vs_off.min(other.vs_off) }
    }
}

/// One point of the map, as drawn.
pub(crate) struct Point {
    pub(crate) sequences: u32,
    pub(crate) acceptance: f64,
    pub(crate) vs_best: f64,
    pub(crate) vs_off: f64,
    pub(crate) best_k: u32,
}

/// One point of the map.
struct Cell {
    adaptive: f64,
    best: f64,
    off: f64,
    best_k: u32,
    /// k at the end of the last run.
    k: u32,
    /// Mean number of changes of k in the second half of a run.
    changes: f64,
}

/// Duration of a run: the time of the wanted number of decode rounds.
pub(crate) fn duration(profile: &Profile, sequences: u32) -> Duration {
    let forward = scheduling::profile::ForwardRows::even(sequences, 1, CONTEXT);
    let micros = profile.target.curve.micros(forward) + 2.0 * profile.wire_us;
    Duration::from_secs_f64(micros * f64::from(rounds(sequences)) / 1e6)
}

/// Decode rounds per run. With many sequences fewer rounds suffice.
pub(crate) fn rounds(sequences: u32) -> u32 {
    if sequences > 64 { ROUNDS / 2 } else { ROUNDS }
}

fn cell(profile: &Profile, experiment: &Experiment, sequences: u32) -> Cell {
    let setup = |policy, seed| Setup {
        profile,
        traffic: Traffic::Closed { sequences, kinds: one_kind(CONTEXT) },
        policy,
        seed,
        duration: duration(profile, sequences),
        warm_up: Duration::ZERO,
    };
    let mean = |of: &mut dyn FnMut(u64) -> f64| (1..=SEEDS).map(of).sum::<f64>() / SEEDS as f64;
    let fixed =
        |k| mean(&mut |seed| run_with(&setup(Policy::Fixed(k), seed), experiment).tokens_per_second());
    let (best, best_k) =
        (0..=MAX_K).map(|k| (fixed(k), k)).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
    let off =
        mean(&mut |seed| plain::tokens_per_second(profile, (sequences, CONTEXT), rounds(sequences), seed));
    let (mut k, mut changes) = (0, 0.0);
    let adaptive = mean(&mut |seed| {
        let outcome = run_with(&setup(Policy::Lanes { max_k: MAX_K }, seed), experiment);
        let explained = &outcome.lanes[0].explanation;
        k = explained.k;
        let half = explained.lane_rounds / 2;
        let late = explained.changes.iter().filter(|change| change.lane_round > half).count();
        changes += late as f64 / SEEDS as f64;
        outcome.tokens_per_second()
    });
    Cell { adaptive, best, off, best_k, k, changes }
}

/// Prints the map of a profile. Returns its smallest ratios, and its points by acceptance.
pub(crate) fn print(profile: &Profile, experiment: &Experiment, quick: bool) -> (Worst, Vec<Vec<Point>>) {
    let sequences: &[u32] = if quick { &[1, 16, 256] } else { &SEQUENCES };
    print_line(&format!(
        "\nEach point: own choice / best fixed k of 0..={MAX_K}, own choice / no speculation, best fixed k, k at the end, (changes of k in the second half)"
    ));
    let heads: Vec<String> = sequences.iter().map(|n| format!("{:>25}", format!("{n} sequences"))).collect();
    print_line(&format!("acceptance {}", heads.join(" ")));
    let mut worst = Worst::default();
    let (mut picture, mut rows) = (Vec::new(), Vec::new());
    for acceptance in ACCEPTANCE {
        let profile = profile.with_acceptance(acceptance);
        let cells: Vec<Cell> = sequences.iter().map(|&n| cell(&profile, experiment, n)).collect();
        let mut texts = Vec::new();
        let (mut signs, mut points) = (String::new(), Vec::new());
        for (cell, &sequences) in cells.iter().zip(sequences) {
            let (vs_best, vs_off) = (cell.adaptive / cell.best, cell.adaptive / cell.off);
            worst = worst.and(Worst { vs_best, vs_off });
            let text = format!("{vs_best:.2} {vs_off:.2} k={}/{} ({:.1})", cell.best_k, cell.k, cell.changes);
            texts.push(format!("{text:>25}"));
            points.push(Point { sequences, acceptance, vs_best, vs_off, best_k: cell.best_k });
            signs.push_str(&format!("{:>4}", sign(vs_best)));
        }
        print_line(&format!("{acceptance:>10} {}", texts.join(" ")));
        rows.push(points);
        picture.push(format!("{acceptance:>10} {signs}"));
    }
    print_line("\nOwn choice / best fixed k: # at least 0.97, + at least 0.94, . below");
    picture.iter().for_each(|line| print_line(line));
    (worst, rows)
}

fn sign(ratio: f64) -> char {
    match ratio {
        ratio if ratio >= 0.97 => '#',
        ratio if ratio >= 0.94 => '+',
        _ => '.',
    }
}
