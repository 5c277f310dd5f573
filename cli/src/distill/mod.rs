//! `outrider distill`: retrains a draft on a router's request log so that it agrees with the target more
//! often.
//!
//! [`rows`] reads the log and holds out some rows. Crate `distill` trains the current draft on the other
//! rows, with the engine as teacher ([`teacher`]), once [`space`] has found room for the result. The new
//! checkpoint is written completely or not at all, and [`check_pair`](crate::check_pair) compares both drafts
//! on held-out rows ([`mod@run`]), which [`held_out`] chooses. It must never change what is served: the
//! operator rolls out the new draft.

mod args;
pub mod error;
mod held_out;
mod progress;
pub mod rows;
mod run;
mod space;
mod teacher;

use std::process::ExitCode;

pub use args::DistillArgs;
use error::DistillCommandError;
pub use run::run;

use crate::output;

/// Runs the subcommand. Prints an error on one line.
pub fn main(args: &DistillArgs) -> ExitCode {
    match run(args) {
        Ok(text) => output::finish(&text),
        Err(error) => output::failed(&error, matches!(error, DistillCommandError::Usage(_))),
    }
}
