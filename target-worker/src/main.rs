//! `outrider-target-worker`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use target_worker::config::{Flags, RawTarget};
use worker::step_loop::DEVICE_THREADS;

fn main() -> ExitCode {
    service::process::main::<RawTarget, Flags, _>(
        DEVICE_THREADS,
        "outrider-target-worker",
        |flags| flags.worker.process.config.as_deref(),
        |config| &config.worker.process,
        target_worker::serve,
    )
}
