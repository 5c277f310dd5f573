//! `make kernels-check`: compiles every CUDA kernel for every supported architecture, prints registers and
//! spills, and fails if one is over its budget. Needs NVRTC (deploy/nvrtc.sh fetches it) and no GPU.
//!
//!     kernels_check [--write DIR | --host-driver]
//!
//! `--write` stores the machine code in DIR, for machines without NVRTC (`--cuda-kernels DIR`).
//! `--host-driver` checks nothing: it builds a libcuda.so that runs kernels on the host, for dry runs, and
//! prints its folder.

use std::path::Path;
use std::process::ExitCode;

use engine::cuda::host_driver::HostDriver;

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a report for people")]
fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let write_to = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => None,
        ["--write", dir] => Some(Path::new(dir)),
        ["--host-driver"] => {
            return match HostDriver::build() {
                Ok(driver) => {
                    println!("{}", driver.libraries.display());
                    ExitCode::SUCCESS
                }
                Err(error) => {
                    eprintln!("kernels-check: {error}");
                    ExitCode::FAILURE
                }
            };
        }
        _ => {
            eprintln!("usage: kernels_check [--write DIR | --host-driver]");
            return ExitCode::from(64);
        }
    };
    let report = match engine::cuda::kernels_check::kernels_check(write_to) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("kernels-check: {error}");
            return ExitCode::FAILURE;
        }
    };
    print!("{}", report.table);
    for fault in &report.faults {
        eprintln!("kernels-check: {fault}");
    }
    if report.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
