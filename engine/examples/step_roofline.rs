//! Writes the roofline table (`engine::cuda::gpu_check::step_roofline`) into docs/design/gpu.md. Needs no
//! GPU.
//!
//!     cargo run --package outrider-engine --example step_roofline -- docs/design/gpu.md

use std::path::Path;
use std::process::ExitCode;

use engine::cuda::gpu_check::step_roofline::{table, with_table};

/// The run that modelled times are compared with.
const REPORT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/gpu-runs/2-report.txt");

#[expect(clippy::print_stderr, reason = "one line with the reason")]
fn main() -> ExitCode {
    match write() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("step_roofline: {error}");
            ExitCode::FAILURE
        }
    }
}

fn write() -> Result<(), String> {
    let path = std::env::args().nth(1).ok_or("name the page: docs/design/gpu.md")?;
    let read =
        |path: &Path| std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()));
    let (page, report) = (read(Path::new(&path))?, read(Path::new(REPORT))?);
    let table = table(&report).map_err(|error| error.to_string())?;
    let page = with_table(&page, &table).ok_or_else(|| format!("{path} has no lines around the table"))?;
    std::fs::write(&path, page).map_err(|error| format!("{path}: {error}"))
}
