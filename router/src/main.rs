//! `outrider-router`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use mimalloc::MiMalloc;
use router::config::{Flags, RawRouter};
use router::serve::SCHEDULER_THREADS;

/// Ids and events are allocated on the scheduler's thread and freed on others, or by the hundred after a
/// frame. glibc's allocator takes an eighth of the scheduler's instructions for that.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    service::process::main::<RawRouter, Flags, _>(
        SCHEDULER_THREADS,
        "outrider-router",
        |flags| flags.process.config.as_deref(),
        |config| &config.process,
        |config, lifetime, health| async move { router::serve::serve(config, lifetime, health).await.map(drop) },
    )
}
