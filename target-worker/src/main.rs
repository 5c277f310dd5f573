//! `outrider-target-worker`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use service::config::{self, ENV_PREFIX};
use target_worker::config::{Flags, RawTarget};
use worker::step_loop::DEVICE_THREADS;

fn main() -> ExitCode {
    let flags = match config::parse_flags::<RawTarget, Flags>() {
        Ok(flags) => flags,
        Err(code) => return code,
    };
    let config = match config::load::<RawTarget>(&flags, flags.worker.process.config.as_deref(), ENV_PREFIX) {
        Ok(config) => config,
        Err(error) => return config::report(&error),
    };
    let process = config.worker.process.clone();
    service::process::run(DEVICE_THREADS, "outrider-target-worker", &process, |lifetime, health| async move {
        target_worker::serve(config, lifetime, health).await
    })
}
