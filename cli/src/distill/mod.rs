//! `outrider distill`: from a router's log of requests to a draft that agrees with the target more often.
//!
//! The log is read into rows, some of which are held out ([`rows`]); crate `distill` trains the draft that serves on the others, with the
//! engine as teacher ([`teacher`]); the new checkpoint is written whole or not at all, and [`check_pair`](crate::check_pair) judges both
//! drafts on the rows that were held out ([`mod@run`]). Must never touch what is served: rolling out is the operator's.

mod args;
pub mod error;
mod progress;
pub mod rows;
mod run;
mod teacher;

use std::process::ExitCode;

pub use args::DistillArgs;
use error::DistillCommandError;
pub use run::run;

use crate::EXIT_USAGE;

/// Run the subcommand to its end. What goes wrong is printed here, on one line.
#[expect(clippy::print_stderr, reason = "the program's own complaint")]
pub fn main(args: &DistillArgs) -> ExitCode {
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("outrider: {error}");
            match error {
                DistillCommandError::Usage { .. } => ExitCode::from(EXIT_USAGE),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
