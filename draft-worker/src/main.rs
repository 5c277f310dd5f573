//! `outrider-draft-worker`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use draft_worker::config::{Flags, RawDraft};
use worker::step_loop::DEVICE_THREADS;

fn main() -> ExitCode {
    service::process::main::<RawDraft, Flags, _>(
        DEVICE_THREADS,
        "outrider-draft-worker",
        |flags| flags.worker.process.config.as_deref(),
        |config| &config.worker.process,
        |config, lifetime, health| async move { draft_worker::serve(config, lifetime, health).await.map(drop) },
    )
}
