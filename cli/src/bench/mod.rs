//! `outrider bench`: loads any OpenAI endpoint with and without speculation, and judges whether to ship it.
//!
//! In order: [`args`] parses the command line and [`arm`] defines what is compared; [`plan`] lays out blocks
//! of requests with alternating arms; [`run`] sends them through [`crate::load`] and keeps the measurements;
//! [`mod@compare`] and [`mod@break_even`] judge; [`report`] collects everything for [`table`], JSON and
//! [`page`]; [`failures`] decides whether too many requests failed for the figures to count. Planning and
//! judging are pure and tested on simulated servers.

mod args;
mod arm;
mod break_even;
mod compare;
mod error;
mod failures;
mod machine;
mod page;
mod plan;
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

use crate::output;
use failures::Failures;
use report::Report;

/// Exit code of `--fail-unless-ship` if a verdict is not to ship.
const EXIT_NOT_SHIP: u8 = 3;
/// Exit code if too many requests failed. The report is complete, so it differs from that of an error.
const EXIT_FAILED_REQUESTS: u8 = 4;
/// Exit code after Ctrl-C, as of a program that SIGINT ended in a shell.
const EXIT_INTERRUPTED: u8 = 130;

/// Runs the subcommand. Ctrl-C ends the measurement; what was measured is reported. Prints an error on one
/// line.
pub async fn main(args: BenchArgs) -> ExitCode {
    match bench(&args).await {
        Ok(printed) => printed,
        Err(error) => {
            let failed = output::failed(&error, matches!(error, BenchError::Usage(_)));
            match error {
                BenchError::Interrupted => ExitCode::from(EXIT_INTERRUPTED),
                _ => failed,
            }
        }
    }
}

async fn bench(args: &BenchArgs) -> Result<ExitCode, BenchError> {
    let files = [&args.save_json, &args.html];
    files.into_iter().flatten().try_for_each(|path| check_writable(path))?;
    let experiment = run::prepare(args).await?;
    let observations = run::run(&experiment).await?;
    let report = Report::new(args, &experiment, &observations);
    let json = format!("{:#}\n", report.to_json());
    // A failure of one output must not cost the others.
    let written = write_files(args, &report, &json);
    let printed = output::finish(&if args.json { json } else { table::table(&report) });
    written?;
    let failures = Failures::of(report.results.iter().flatten().map(|result| &result.overall));
    if let Some(text) = failures.explain(&report.faults) {
        output::note(&format!("outrider: {text}"));
    }
    if observations.is_interrupted {
        return Ok(ExitCode::from(EXIT_INTERRUPTED));
    }
    let verdicts = report.comparisons.iter().map(|compared| &compared.overall.verdict);
    Ok(if args.fail_unless_ship && !are_all_ship(verdicts) {
        ExitCode::from(EXIT_NOT_SHIP)
    } else if failures.are_too_many() {
        ExitCode::from(EXIT_FAILED_REQUESTS)
    } else {
        printed
    })
}

/// Whether there are verdicts, and all are to ship.
fn are_all_ship<'a>(verdicts: impl IntoIterator<Item = &'a ShipVerdict>) -> bool {
    let mut verdicts = verdicts.into_iter().peekable();
    verdicts.peek().is_some() && verdicts.all(|verdict| *verdict == ShipVerdict::Ship)
}

fn write_files(args: &BenchArgs, report: &Report, json: &str) -> Result<(), BenchError> {
    let saved = args.save_json.as_ref().map_or(Ok(()), |path| write(path, json));
    let shown = args.html.as_ref().map_or(Ok(()), |path| write(path, &page::page(report)));
    saved.and(shown)
}

/// Finds out before the measurement that a report cannot be written. Until then an old report is kept, and a
/// new file is not left behind, which would look like a report if the measurement fails.
fn check_writable(path: &Path) -> Result<(), BenchError> {
    let is_new = !path.exists();
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path).map(drop);
    let checked = opened.and_then(|()| if is_new { std::fs::remove_file(path) } else { Ok(()) });
    checked.map_err(|source| BenchError::Write { path: path.to_owned(), source })
}

fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    std::fs::write(path, text).map_err(|source| BenchError::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_verdicts_that_are_all_ship_pass() {
        let undecided = || ShipVerdict::Undecided("run longer".to_owned());
        assert!(are_all_ship(&[ShipVerdict::Ship]));
        assert!(are_all_ship(&[ShipVerdict::Ship, ShipVerdict::Ship]));
        assert!(!are_all_ship(&[] as &[ShipVerdict]), "nothing was compared");
        assert!(!are_all_ship(&[ShipVerdict::DoNot]));
        assert!(!are_all_ship(&[undecided()]));
        assert!(!are_all_ship(&[ShipVerdict::Ship, undecided()]));
        assert!(!are_all_ship(&[ShipVerdict::DoNot, ShipVerdict::Ship]));
    }
}
