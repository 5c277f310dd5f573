//! Simulates a day's traffic on autoscaled pools, which follow the router's gauges, and on fixed pools, and
//! prints the cost of each: `cargo run -p outrider --example plan_day [PROFILE.toml]`. Simulated with the
//! closed form of `outrider plan`; nothing is measured.

#![forbid(unsafe_code)]

use std::error::Error;
use std::path::{Path, PathBuf};

use outrider_cli::plan::day::{Autoscaler, DayResult, Pools, Scaling, Traffic, simulate};
use outrider_cli::plan::profiled;
use scheduling::profile::Profile;

/// Mean length of a sequence (prompt and output), in ids, and the profile's acceptance.
const CONTEXT: u32 = 1_024;
const ACCEPTANCE: f64 = 0.705;
/// One office day of 86,400 s, with ten minutes at 1.5 times the rate at 11 o'clock.
const TRAFFIC: Traffic = Traffic { rate: (10.0, 60.0), burst: (11 * 3600, 600, 1.5), output_tokens: 400.0 };
/// The longest acceptable time per output token, milliseconds.
const TPOT_MS: f64 = 15.0;
/// The defaults of a horizontal pod autoscaler, and three minutes to load a model.
const AUTOSCALER: Autoscaler = Autoscaler { poll_every_s: 15, startup_s: 180, stabilization_s: 300 };
/// Example prices per hour: a target is 8 GPUs at 1.80, a draft worker one GPU at 0.60.
const PRICE: (f64, f64) = (8.0 * 1.80, 0.60);

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn main() -> Result<(), Box<dyn Error>> {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/profiles/70b-8xh100-l4.toml");
    let path = std::env::args().nth(1).map_or(default, PathBuf::from);
    let profile = Profile::parse(&std::fs::read_to_string(path)?)?;
    let known = profile.target.curve.profiled_times();
    let acceptance = [ACCEPTANCE];
    let rounds = profiled::rounds((&profile, &known), &acceptance, CONTEXT);
    let tokens = profile.target.kv_blocks as f64 * f64::from(profile.target.kv_block_size);
    let pools = Pools::new(rounds, (tokens / f64::from(CONTEXT)).floor(), TPOT_MS);

    let follows = |least| Scaling::Autoscaled { min: least, max: 512 };
    let both = simulate(&pools, &TRAFFIC, (follows(1), follows(0)), &AUTOSCALER);
    let (most_targets, most_drafts) = both.peak_workers;
    let plain_rounds = profiled::rounds((&profile, &known), &[0.0], CONTEXT);
    let undrafted = Pools::new(plain_rounds, pools.concurrency, TPOT_MS);
    let plain = simulate(&undrafted, &TRAFFIC, (follows(1), Scaling::Fixed(0)), &AUTOSCALER);
    let rows = [
        ("both follow, drafts down to 0", both),
        (
            "targets follow, drafts fixed",
            simulate(&pools, &TRAFFIC, (follows(1), Scaling::Fixed(most_drafts)), &AUTOSCALER),
        ),
        (
            "both fixed at the highest of the first line",
            simulate(
                &pools,
                &TRAFFIC,
                (Scaling::Fixed(most_targets), Scaling::Fixed(most_drafts)),
                &AUTOSCALER,
            ),
        ),
        ("no drafts, targets follow", plain),
        (
            "no drafts, targets fixed at the highest of the line above",
            simulate(
                &undrafted,
                &TRAFFIC,
                (Scaling::Fixed(plain.peak_workers.0), Scaling::Fixed(0)),
                &AUTOSCALER,
            ),
        ),
    ];
    println!("{}: at most {TPOT_MS} ms a token wanted", profile.name);
    println!(
        "| pools | target hours | draft hours | most at once | hours without drafts | cost | cost against the first line | mean ms a token | slower than wanted | waited for KV |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let first = cost(&both);
    for (name, day) in rows {
        let (cost, (targets, drafts)) = (cost(&day), day.peak_workers);
        println!(
            "| {name} | {:.1} | {:.1} | {targets} + {drafts} | {:.1} | {cost:.0} | {:.2} | {:.1} | {:.2}% | {:.2}% |",
            day.target_hours,
            day.draft_hours,
            day.hours_without_drafts,
            cost / first,
            day.tpot_ms,
            100.0 * day.slow_share,
            100.0 * day.waited_share,
        );
    }
    Ok(())
}

fn cost(day: &DayResult) -> f64 {
    day.target_hours * PRICE.0 + day.draft_hours * PRICE.1
}
