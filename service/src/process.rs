//! The life of a process, the same for every role: check the configuration, set up telemetry, start the role,
//! wait for a signal, drain work in flight (a second signal ends that), stop everything, return the exit
//! code.
//!
//! A role supplies only its start ([`main`]'s `start`); it must never install a signal handler or exit.

mod config;

use std::borrow::Cow;
use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;

pub use self::config::{ProcessConfig, ProcessFlags, RawProcess};

use crate::config::{
    ENV_PREFIX, EXIT_BAD_CONFIG, RawConfig, load, parse_flags, report, warn_of_unknown_variables,
};
use crate::error_text;
use crate::health::Health;
use crate::shutdown::{Lifetime, TerminationSignals};
use crate::telemetry::{self, TelemetryConfig};

/// Time for cancelled tasks to end after the drain.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// The `main` of a role: loads the configuration `R` from the file that the flags `F` name, the environment
/// and the flags, then [`run`]s the role.
pub fn main<R, F, S>(
    own_threads: usize,
    service_name: &str,
    file_of: impl FnOnce(&F) -> Option<&Path>,
    process_of: impl FnOnce(&R::Config) -> &ProcessConfig,
    start: impl FnOnce(R::Config, Lifetime, Health) -> S,
) -> ExitCode
where
    R: RawConfig,
    F: clap::Parser + Serialize,
    S: Future<Output = anyhow::Result<()>>,
{
    let flags = match parse_flags::<R, F>() {
        Ok(flags) => flags,
        Err(code) => return code,
    };
    let config = match load::<R>(&flags, file_of(&flags), ENV_PREFIX) {
        Ok(config) => config,
        Err(error) => return report(&error),
    };
    let process = process_of(&config).clone();
    run(own_threads, service_name, &process, |lifetime, health| start(config, lifetime, health))
}

/// Runs a role until the process is told to stop. `start` starts the role and returns; its tasks run under
/// the lifetime.
///
/// The role keeps `own_threads` cores busy with its own threads. The runtime gets the other cores, and at
/// least one: more runtime threads than cores only add wake-ups.
pub fn run<F, S>(own_threads: usize, service_name: &str, config: &ProcessConfig, start: S) -> ExitCode
where
    S: FnOnce(Lifetime, Health) -> F,
    F: Future<Output = anyhow::Result<()>>,
{
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(cores.saturating_sub(own_threads).max(1)).enable_all();
    let runtime = match builder.build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let error = anyhow::Error::new(error).context("cannot start the async runtime");
            return fail(&error, ExitCode::FAILURE);
        }
    };
    let code = runtime.block_on(async {
        let telemetry = TelemetryConfig {
            service_name: service_name.to_owned(),
            log_format: config.log_format,
            log_filter: config.log_filter.clone(),
        };
        let guard = match telemetry::init(&telemetry) {
            Ok(guard) => guard,
            Err(error) => {
                let is_of_configuration = error.is_of_configuration();
                let code =
                    if is_of_configuration { ExitCode::from(EXIT_BAD_CONFIG) } else { ExitCode::FAILURE };
                return fail(&error.into(), code);
            }
        };
        warn_of_unknown_variables();
        let ended = live(config, start).await;
        let code = ended.unwrap_or_else(|error| {
            // After all lines of the shutdown: a parent process reports the last line.
            guard.write_line(&error_line(&error));
            ExitCode::FAILURE
        });
        guard.shut_down().await;
        code
    });
    // Hung blocking threads (stdin, a disk) must not keep a stopped process alive.
    runtime.shutdown_background();
    code
}

/// From the start to the last task's end. Returns the error of a start that failed.
async fn live<F, S>(config: &ProcessConfig, start: S) -> anyhow::Result<ExitCode>
where
    S: FnOnce(Lifetime, Health) -> F,
    F: Future<Output = anyhow::Result<()>>,
{
    crate::descriptors::raise_limit();
    let (lifetime, health) = (Lifetime::new(), Health::new());
    let mut signals = TerminationSignals::listen();
    let (ended, lame_duck) = tokio::select! {
        biased;
        // A signal to stop during the start aborts it.
        cause = stop_requested(&mut signals, config.exit_on_stdin_close, &lifetime) => {
            tracing::info!(cause = &*cause, lame_duck = ?config.lame_duck, "stopping: requests in flight may finish");
            (Ok(ExitCode::SUCCESS), config.lame_duck)
        }
        // Without this task the process would look alive and do nothing.
        task = lifetime.failed() => {
            health.set_failed(format!("the task `{task}` panicked"));
            tracing::error!(task, "a task panicked that the process cannot do without: stopping");
            (Ok(ExitCode::FAILURE), Duration::ZERO)
        }
        ended = start_and_watch(start(lifetime.clone(), health.clone()), &health) => (ended, Duration::ZERO),
    };
    health.set_draining("the process is stopping");
    let finish = async {
        lifetime.leave();
        tokio::time::sleep(lame_duck).await;
        lifetime.drain(config.grace).await;
    };
    tokio::select! {
        biased;
        // A second signal asks to stop without waiting.
        signal = signals.next() => {
            tracing::warn!(signal, "stopping at once: requests in flight are ended");
        }
        () = finish => {}
    }
    lifetime.shut_down(STOP_GRACE).await;
    ended.map(|code| code_at_the_end(code, &lifetime))
}

/// The exit code, also after a panic that came while the process stopped: requests in flight were lost, and
/// whoever started the process must learn of it.
fn code_at_the_end(code: ExitCode, lifetime: &Lifetime) -> ExitCode {
    match lifetime.failed_task() {
        Some(task) if code == ExitCode::SUCCESS => {
            tracing::error!(task, "a task panicked that the process cannot do without, while it stopped");
            ExitCode::FAILURE
        }
        _ => code,
    }
}

/// Resolves only if the start fails or the role declares itself failed.
async fn start_and_watch(
    start: impl Future<Output = anyhow::Result<()>>,
    health: &Health,
) -> anyhow::Result<ExitCode> {
    start.await?;
    let mut state = health.subscribe();
    let failed = state.wait_for(|state| matches!(state, crate::health::State::Failed(_))).await;
    match failed {
        Ok(state) => tracing::error!(reason = state.reason(), "the process failed and stops"),
        Err(_) => tracing::error!("the health state was dropped: stopping"),
    }
    Ok(ExitCode::FAILURE)
}

/// Returns why the process is to stop.
async fn stop_requested(
    signals: &mut TerminationSignals,
    on_stdin_close: bool,
    lifetime: &Lifetime,
) -> Cow<'static, str> {
    tokio::select! {
        biased;
        signal = signals.next() => signal.into(),
        // The parent has ended.
        () = stdin_closed(), if on_stdin_close => "stdin was closed".into(),
        // A task knows that the process is not needed any more.
        reason = lifetime.stop_requested() => reason.into(),
    }
}

/// Resolves when stdin is closed. The blocking read runs on its own thread, which ends with the process.
pub async fn stdin_closed() {
    let (closed, seen) = tokio::sync::oneshot::channel::<Infallible>();
    let reader = move || {
        // The input is ignored; only its end matters.
        if let Err(error) = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()) {
            tracing::warn!(%error, "cannot read stdin: treating it as closed");
        }
        drop(closed);
    };
    if let Err(error) = std::thread::Builder::new().name("stdin".to_owned()).spawn(reader) {
        tracing::error!(%error, "cannot watch stdin: treating it as closed");
    }
    let Err(_) = seen.await;
}

/// Writes the error to stderr before there is a log.
fn fail(error: &anyhow::Error, code: ExitCode) -> ExitCode {
    use std::io::Write as _;
    // If stderr is closed, the exit code still reports the failure.
    drop(writeln!(std::io::stderr(), "{}", error_line(error)));
    code
}

/// The error as one line, for users and for the parent process.
fn error_line(error: &anyhow::Error) -> String {
    format!("error: {}", error_text(error))
}
