//! Measures the cost of loading a checkpoint: `cargo run -p outrider-engine --example load -- DIR
//! [auto|f32|bf16|fp8|int8|int4] [threads]`. Prints seconds, bytes of weights, the peak resident memory of
//! the process (Linux: `VmHWM`), and its ratio to the weights. Run it twice: the first run reads the disk.
#![expect(clippy::print_stdout, reason = "the line is the program's output")]

use std::process::ExitCode;
use std::time::Instant;

use engine::{Engine, LoadOptions, WeightFormat};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let format = WeightFormat::named(args.get(1).map_or("auto", String::as_str));
    let threads = args.get(2).map_or(Some(1), |threads| threads.parse().ok());
    let (Some(dir), Some(weights), Some(threads)) = (args.first(), format, threads) else {
        println!("usage: load DIR [auto|f32|bf16|fp8|int8|int4] [threads]");
        return ExitCode::from(64);
    };
    let options = LoadOptions { threads, ..LoadOptions::new(dir, weights, 1 << 30) };
    let before = peak_bytes();
    let begin = Instant::now();
    match Engine::load(&options) {
        Ok(engine) => {
            let (seconds, peak) = (begin.elapsed().as_secs_f64(), peak_bytes());
            let (held, parameters) = (engine.info().resident_bytes, engine.info().num_parameters);
            println!(
                "{weights:?}, {parameters} weights, {threads} threads: {seconds:.2} s, {:.1} MB of weights, peak {:.1} MB \
                 ({:.1} MB before), {:.3} times the weights",
                held as f64 / 1e6,
                peak as f64 / 1e6,
                before as f64 / 1e6,
                (peak - before) as f64 / held as f64
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Peak resident memory so far in bytes; 0 if the system does not report it.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
