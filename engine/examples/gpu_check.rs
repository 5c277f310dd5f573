//! `make gpu-check`: on a machine with a GPU, every kernel against its naive twin, whole models against the CPU
//! engine, and what things take. Without a GPU it says so in one line and fails.
//!
//!     gpu_check [DEVICE [MODELS [CONFIG]]]
//!
//! DEVICE is the driver's number [0], MODELS a directory of checkpoints [models/demo: draft and target], CONFIG a
//! config.json whose model is decoded with random weights [none].

use std::path::Path;

use engine::cuda::{CudaDevice, gpu_check};

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(0) => std::process::ExitCode::SUCCESS,
        Ok(failed) => fail(&format!("{failed} cases differ from their twins")),
        Err(error) => fail(&error),
    }
}

#[expect(clippy::print_stderr, reason = "the one line that says why")]
fn fail(reason: &str) -> std::process::ExitCode {
    eprintln!("gpu-check: {reason}");
    std::process::ExitCode::FAILURE
}

/// How many cases failed.
#[expect(clippy::print_stdout, reason = "a report for people")]
fn run(args: &[String]) -> Result<usize, String> {
    let number = args.first().map_or("0", String::as_str);
    let ordinal = number.parse().map_err(|_| format!("`{number}` is no device number"))?;
    let mut device = CudaDevice::open(ordinal).map_err(says)?;
    let facts = device.facts().map_err(says)?;
    let (free, total) = (facts.free_bytes, facts.total_bytes);
    println!("cuda:{ordinal} {} {}, {free} of {total} bytes free\n", facts.name, facts.arch);

    let parity = gpu_check::parity(&mut device).map_err(says)?;
    let mut failed = parity.failed;
    parity.lines.iter().for_each(|line| println!("{line}"));

    let models = Path::new(args.get(1).map_or("models/demo", String::as_str));
    for model in ["draft", "target"] {
        let parity = gpu_check::logits(ordinal, &models.join(model)).map_err(says)?;
        failed += parity.failed;
        parity.lines.iter().for_each(|line| println!("{line}"));
    }

    let parity = gpu_check::graphs(ordinal, &models.join("draft")).map_err(says)?;
    failed += parity.failed;
    parity.lines.iter().for_each(|line| println!("{line}"));

    println!();
    let parity = gpu_check::ranks(ordinal, &models.join("target")).map_err(says)?;
    failed += parity.failed;
    parity.lines.iter().for_each(|line| println!("{line}"));

    println!("\n{:<40}{:>12}{:>12}", "weight products", "us", "GB/s");
    for timing in gpu_check::timings(&mut device).map_err(says)? {
        println!("{:<40}{:>12.1}{:>12.0}", timing.case, timing.best_us, timing.gb_per_s);
    }
    if let Some(config) = args.get(2) {
        println!("\ndecoding {config}, random weights");
        let lines = gpu_check::decode(ordinal, Path::new(config)).map_err(says)?;
        lines.iter().for_each(|line| println!("{line}"));
    }
    Ok(failed)
}

fn says(error: impl std::error::Error) -> String {
    error.to_string()
}
