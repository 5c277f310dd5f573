//! Holds the closed form of `outrider plan` against the simulator, on the same profiles (deploy/profiles), and prints the ratio
//! of each point: `cargo run -p outrider --example plan_against_simulator`. Simulated; nothing here is measured.

#![forbid(unsafe_code)]

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use outrider_cli::plan::profiled;
use speculation::profile::Profile;
use speculation::simulation::{Kind, Policy, Setup, Sharing, Traffic, run};

/// Ids in a sequence.
const CONTEXT: u32 = 512;
/// Rounds that are counted, and rounds before those.
const ROUNDS: f64 = 400.0;
const WARM_UP_ROUNDS: f64 = 50.0;

/// Profile, sequences, k, acceptance: flat and steep steps, few and many draft workers, where drafting pays and where it does not.
const POINTS: [(&str, u32, u32, f64); 10] = [
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

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn main() -> Result<(), Box<dyn Error>> {
    let mut worst: f64 = 1.0;
    println!("profile, sequences, k, acceptance: tokens/s planned, simulated (mean of 3 seeds), ratio");
    for point in POINTS {
        let (planned, simulated) = both(point)?;
        let (name, sequences, k, acceptance) = point;
        let ratio = planned / simulated;
        println!("{name:<16}{sequences:>4}{k:>3}{acceptance:>6}{planned:>10.0}{simulated:>10.0}{ratio:>7.3}");
        worst = worst.max(ratio).max(1.0 / ratio);
    }
    println!("worst_factor={worst:.3}");
    Ok(())
}

/// Tokens per second, planned and simulated.
fn both((name, sequences, k, acceptance): (&str, u32, u32, f64)) -> Result<(f64, f64), Box<dyn Error>> {
    let profiles = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/profiles");
    let path = profiles.join(name).with_extension("toml");
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let profile = Profile::parse(&text)?.with_acceptance(acceptance);
    let rates = [acceptance];
    let planned = profiled::rounds(&profile, &rates, CONTEXT).at(f64::from(sequences), k);
    let round_s = planned.tpot_ms / 1e3 * planned.expected_tokens;
    let kind = Kind { task_type: String::new(), share: 1.0, prompt_tokens: CONTEXT, output_tokens: 1 };
    let simulated = |seed| {
        run(&Setup {
            profile: &profile,
            traffic: Traffic::Closed { sequences, kinds: vec![kind.clone()] },
            policy: Policy::Fixed(k),
            sharing: Sharing::ByCost,
            seed,
            duration: Duration::from_secs_f64(round_s * ROUNDS),
            warm_up: Duration::from_secs_f64(round_s * WARM_UP_ROUNDS),
        })
        .tokens_per_second()
    };
    Ok((planned.tokens_per_second, (1..=3).map(simulated).sum::<f64>() / 3.0))
}
