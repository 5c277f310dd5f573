//! Compares the closed form of `outrider plan` with the simulator on the same profiles (deploy/profiles), and
//! prints the ratio for each point: `cargo run -p outrider --example plan_against_simulator`. Both sides are
//! simulated; nothing is measured. The optional argument is the seed of the drawn points; the default is the
//! seed of the report.

#![forbid(unsafe_code)]

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use outrider_cli::plan::round::{Drafting, RoundEstimate, RoundModel};
use outrider_cli::plan::step_time::{ForwardBatch, StepCost};
use scheduling::profile::text::{mix, unit};
use scheduling::profile::{ForwardRows, Profile, StepCurve};
use simulator::{ENDLESS, Policy, RequestKind, Setup, Traffic, run};

/// Ids in a sequence.
const CONTEXT: u32 = 512;
/// Rounds that are counted, and warm-up rounds before them.
const ROUNDS: f64 = 400.0;
const WARM_UP_ROUNDS: f64 = 50.0;

/// Profile, sequences, k, acceptance.
type Point = (&'static str, u32, u32, f64);

/// Flat and steep steps, few and many draft workers, where drafting pays and where it does not.
const POINTS: [Point; 10] = [
    ("70b-8xh100-l4", 1, 4, 0.8),
    ("70b-8xh100-l4", 16, 4, 0.65),
    ("70b-8xh100-l4", 64, 0, 0.65),
    ("70b-8xh100-l4", 256, 2, 0.5),
    ("8b-h100", 1, 5, 0.8),
    ("8b-h100", 16, 3, 0.65),
    ("8b-h100", 256, 0, 0.8),
    ("cpu-pair", 1, 2, 0.59),
    ("cpu-pair", 4, 4, 0.8),
    ("cpu-pair", 16, 0, 0.65),
];

/// Chosen after the closed form was written, and not used to develop it.
const HELD_OUT: [Point; 10] = [
    ("70b-8xh100-l4", 3, 3, 0.6),
    ("70b-8xh100-l4", 48, 5, 0.9),
    ("70b-8xh100-l4", 192, 3, 0.35),
    ("70b-8xh100-l4", 384, 6, 0.7),
    ("8b-h100", 6, 7, 0.9),
    ("8b-h100", 96, 3, 0.6),
    ("8b-h100", 192, 2, 0.35),
    ("8b-h100", 384, 1, 0.7),
    ("cpu-pair", 3, 3, 0.6),
    ("cpu-pair", 12, 2, 0.9),
];

/// Ten more points are drawn: the profiles in turn, 1 to 512 sequences (uniform in the logarithm), k from 0
/// to 8, acceptance from 0.3 to 0.95.
const DRAWN: usize = 10;
const SEED: u64 = 35;
const PROFILES: [&str; 3] = ["70b-8xh100-l4", "8b-h100", "cpu-pair"];

fn drawn(seed: u64) -> [Point; DRAWN] {
    let mut state = mix(seed);
    let mut next = || {
        state = mix(state);
        unit(state)
    };
    std::array::from_fn(|i| {
        let sequences = 512f64.powf(next()).round() as u32;
        let (k, twentieth) = ((9.0 * next()) as u32, (14.0 * next()) as u32);
        (PROFILES[i % PROFILES.len()], sequences, k, f64::from(6 + twentieth) / 20.0)
    })
}

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn main() -> Result<(), Box<dyn Error>> {
    let seed = std::env::args().nth(1).map(|word| word.parse()).transpose()?.unwrap_or(SEED);
    println!("profile, sequences, k, acceptance: tokens/s planned, simulated (mean of 3 seeds), ratio");
    let mut worst = [1.0f64; 3];
    let sets = [("ten points", POINTS), ("ten held out", HELD_OUT), ("ten drawn", drawn(seed))];
    for (i, (title, points)) in sets.into_iter().enumerate() {
        println!("{title}:");
        for point in points {
            let (planned, simulated) = both(point)?;
            let (name, sequences, k, acceptance) = point;
            let ratio = planned / simulated;
            println!(
                "{name:<16}{sequences:>4}{k:>3}{acceptance:>6}{planned:>10.0}{simulated:>10.0}{ratio:>7.3}"
            );
            worst[i] = worst[i].max(ratio).max(1.0 / ratio);
        }
    }
    println!(
        "worst_factor={:.3} worst_factor_held_out={:.3} worst_factor_drawn={:.3}",
        worst[0], worst[1], worst[2]
    );
    Ok(())
}

/// The step times of a profile's pool ([`scheduling::profile`]) in place of a data sheet: the simulator uses
/// the same.
struct Profiled<'a>(&'a StepCurve);

impl StepCost for Profiled<'_> {
    fn micros(&self, forward: ForwardBatch) -> f64 {
        let kv_tokens = forward.sequences * forward.context;
        self.0.micros(ForwardRows {
            rows: (forward.sequences * forward.rows_each).ceil() as u32,
            prefill_rows: 0,
            kv_tokens: kv_tokens.ceil() as u64,
            row_kv_tokens: (kv_tokens * forward.rows_each).ceil() as u64,
        })
    }
}

/// The closed form for one target of `profile`. Without prompts, with sequences that start together and
/// without router time, as in the simulator's closed traffic.
fn plan(profile: &Profile, acceptance: f64, (sequences, k): (u32, u32)) -> RoundEstimate {
    let wire_us = 2.0 * profile.wire_us;
    let workers = f64::from(profile.draft.workers) / f64::from(profile.target.workers);
    let rounds = RoundModel {
        target: &Profiled(&profile.target.curve),
        known: &profile.target.curve.profiled_times(),
        target_wire_us: wire_us,
        router_us: 0.0,
        target_rows_max: f64::from(profile.target.max_batch_rows),
        drafting: Drafting::Apart { draft: &Profiled(&profile.draft.curve), workers, wire_us },
        acceptance: &[acceptance],
        context: f64::from(CONTEXT),
        prompt_us_per_token: 0.0,
    };
    rounds.at(f64::from(sequences), k)
}

/// Tokens per second, planned and simulated.
fn both((name, sequences, k, acceptance): Point) -> Result<(f64, f64), Box<dyn Error>> {
    let profiles = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/profiles");
    let path = profiles.join(name).with_extension("toml");
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let profile = Profile::parse(&text)?.with_acceptance(acceptance);
    let planned = plan(&profile, acceptance, (sequences, k));
    let round_s = planned.tpot_ms / 1e3 * planned.expected_tokens;
    let kind =
        RequestKind { task_type: String::new(), share: 1.0, prompt_tokens: CONTEXT, output_tokens: ENDLESS };
    let simulated = |seed| {
        run(&Setup {
            profile: &profile,
            traffic: Traffic::Closed { sequences, kinds: vec![kind.clone()] },
            policy: Policy::Fixed(k),
            seed,
            duration: Duration::from_secs_f64(round_s * ROUNDS),
            warm_up: Duration::from_secs_f64(round_s * WARM_UP_ROUNDS),
        })
        .tokens_per_second()
    };
    Ok((planned.tokens_per_second, (1..=3).map(simulated).sum::<f64>() / 3.0))
}
