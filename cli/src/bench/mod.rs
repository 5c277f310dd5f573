//! `outrider bench`: loads any OpenAI endpoint with and without speculation, and judges whether to ship it.
//!
//! In order: [`args`] parses the command line and [`arm`] defines what is compared; [`plan`] lays out blocks
//! of requests with alternating arms; [`run`] sends them through [`crate::load`] and keeps the measurements;
//! [`mod@compare`] and [`mod@break_even`] judge; [`report`] collects everything for [`table`], JSON and
//! [`page`]. Planning and judging are pure and tested on simulated servers.

mod args;
mod arm;
mod break_even;
mod compare;
mod error;
mod machine;
mod page;
mod plan;
mod progress;
mod report;
mod run;
mod table;

use std::path::Path;
use std::process::ExitCode;

pub use args::BenchArgs;
pub use break_even::{BreakEven, break_even};
pub use compare::{Comparison, Difference, ShipVerdict, VerdictRules, compare};
pub use error::BenchError;
pub use plan::LoadLevel;

use crate::EXIT_USAGE;

/// Runs the subcommand. Prints an error on one line.
#[expect(clippy::print_stderr, reason = "errors are printed for the user")]
pub async fn main(args: BenchArgs) -> ExitCode {
    match bench(&args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("outrider: {error}");
            match error {
                BenchError::Usage { .. } => ExitCode::from(EXIT_USAGE),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

#[expect(clippy::print_stdout, reason = "the report is the program's output")]
async fn bench(args: &BenchArgs) -> Result<(), BenchError> {
    let experiment = run::prepare(args).await?;
    let observations = run::run(&experiment).await?;
    let report = report::Report::new(args, &experiment, &observations);
    let json = format!("{:#}\n", report.to_json());
    match args.json {
        true => print!("{json}"),
        false => print!("{}", table::table(&report)),
    }
    if let Some(path) = &args.save_json {
        write(path, &json)?;
    }
    if let Some(path) = &args.html {
        write(path, &page::page(&report))?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    std::fs::write(path, text).map_err(|source| BenchError::Write { path: path.to_owned(), source })
}
