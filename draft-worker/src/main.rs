//! `outrider-draft-worker`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use draft_worker::config::{Flags, RawDraft};
use service::config::{self, ENV_PREFIX};
use worker::step_loop::DEVICE_THREADS;

fn main() -> ExitCode {
    let flags = match config::parse_flags::<RawDraft, Flags>() {
        Ok(flags) => flags,
        Err(code) => return code,
    };
    let config = match config::load::<RawDraft>(&flags, flags.worker.process.config.as_deref(), ENV_PREFIX) {
        Ok(config) => config,
        Err(error) => return config::report(&error),
    };
    let process = config.worker.process.clone();
    service::process::run(DEVICE_THREADS, "outrider-draft-worker", &process, |lifetime, health| async move {
        draft_worker::serve(config, lifetime, health).await.map(drop)
    })
}
