//! `outrider-router`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use mimalloc::MiMalloc;
use router::config::{Flags, RawRouter};
use router::serve::SCHEDULER_THREADS;
use service::config::{self, ENV_PREFIX};

/// Ids and events are allocated on the scheduler's thread and freed on others, or by the hundred after a
/// frame. glibc's allocator takes an eighth of the scheduler's instructions for that.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    let flags = match config::parse_flags::<RawRouter, Flags>() {
        Ok(flags) => flags,
        Err(code) => return code,
    };
    let config = match config::load::<RawRouter>(&flags, flags.process.config.as_deref(), ENV_PREFIX) {
        Ok(config) => config,
        Err(error) => return config::report(&error),
    };
    let process = config.process.clone();
    service::process::run(SCHEDULER_THREADS, "outrider-router", &process, |lifetime, health| async move {
        router::serve::serve(config, lifetime, health).await.map(drop)
    })
}
