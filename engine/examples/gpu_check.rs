//! `make gpu-check`: on a machine with a GPU, every kernel against its naive twin and what each takes. Without one it
//! says so in one line and fails. Arguments: the device's number, 0 where none is given.

use engine::cuda::{CudaDevice, CudaError, gpu_check};

fn main() -> std::process::ExitCode {
    let ordinal = std::env::args().nth(1).unwrap_or_else(|| "0".to_owned());
    match run(&ordinal) {
        Ok(0) => std::process::ExitCode::SUCCESS,
        Ok(failed) => fail(&format!("{failed} kernels differ from their twins")),
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
fn run(ordinal: &str) -> Result<usize, String> {
    let ordinal = ordinal.parse().map_err(|_| format!("`{ordinal}` is no device number"))?;
    let says = |error: CudaError| error.to_string();
    let mut device = CudaDevice::open(ordinal).map_err(says)?;
    let facts = device.facts().map_err(says)?;
    println!(
        "cuda:{ordinal} {} {}, {} of {} bytes free\n",
        facts.name, facts.arch, facts.free_bytes, facts.total_bytes
    );

    let parity = gpu_check::parity(&mut device).map_err(says)?;
    for line in &parity.lines {
        println!("{line}");
    }
    println!("\n{:<40}{:>12}{:>12}", "weight products", "us", "GB/s");
    for timing in gpu_check::timings(&mut device).map_err(says)? {
        println!("{:<40}{:>12.1}{:>12.0}", timing.case, timing.best_us, timing.gb_per_s);
    }
    Ok(parity.failed)
}
