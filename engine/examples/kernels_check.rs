//! `make kernels-check`: compiles every CUDA kernel for every architecture that is served, prints registers and
//! spills, and fails where one is over its budget. Needs NVRTC (deploy/nvrtc.sh fetches it) and no GPU.

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a report for people")]
fn main() -> std::process::ExitCode {
    let report = match engine::cuda::kernels_check::kernels_check() {
        Ok(report) => report,
        Err(error) => {
            eprintln!("kernels-check: {error}");
            return std::process::ExitCode::FAILURE;
        }
    };
    print!("{}", report.table);
    for fault in &report.faults {
        eprintln!("kernels-check: {fault}");
    }
    if report.faults.is_empty() { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
