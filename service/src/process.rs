//! The life of a process, the same for every role: check the configuration, set up telemetry, start the role,
//! wait for a signal, drain work in flight (a second signal ends that), stop everything, return the exit
//! code.
//!
//! A role supplies only its start ([`run`]'s `start`); it must never install a signal handler or exit.

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::Faults;
use crate::discovery::{DiscoveryUri, EtcdUser, Source, check_static_file};
use crate::health::Health;
use crate::secret::Secret;
use crate::shutdown::{Lifetime, TerminationSignals};
use crate::telemetry::{self, LogFilter, LogFormat, TelemetryConfig};
use crate::tls::ClientFiles;

/// Time for cancelled tasks to end after the drain.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Flags common to all processes.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
#[command(next_help_heading = "Process")]
pub struct ProcessFlags {
    /// TOML file with any of these settings, named as the flags with underscores
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Source of the list of workers, the same for all routers and workers of a cluster: static:FILE or
    /// etcd://HOST:PORT,HOST:PORT/PREFIX; memory: within this process only, so nothing is found
    #[arg(long, value_name = "URI")]
    pub discovery: Option<String>,
    /// CA certificate for etcd, PEM; with it etcd is reached over TLS only
    #[arg(long, value_name = "FILE")]
    pub discovery_ca: Option<PathBuf>,
    /// Client certificate for etcd (its --client-cert-auth), PEM
    #[arg(long, value_name = "FILE")]
    pub discovery_cert: Option<PathBuf>,
    /// Private key of --discovery-cert, PEM
    #[arg(long, value_name = "FILE")]
    pub discovery_key: Option<PathBuf>,
    /// User name for etcd; the password is not a flag, because other users could see it: set
    /// OUTRIDER_DISCOVERY_PASSWORD, or `discovery_password` in the file
    #[arg(long, value_name = "NAME")]
    pub discovery_user: Option<String>,
    /// Log filter, for example `info` or `warn,router=debug`
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Format of log lines: text, or json with one object per line
    #[arg(long, value_enum, value_name = "FORMAT", hide_possible_values = true)]
    pub log_format: Option<LogFormat>,
    /// How long requests in flight may take to finish after a signal to stop
    #[arg(long, value_name = "SECONDS")]
    pub grace_seconds: Option<u64>,
    /// Stop when stdin closes, for a parent that must not leave processes behind
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub exit_on_stdin_close: bool,
}

/// Raw settings common to all processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RawProcess {
    discovery: String,
    discovery_ca: Option<PathBuf>,
    discovery_cert: Option<PathBuf>,
    discovery_key: Option<PathBuf>,
    discovery_user: Option<String>,
    discovery_password: Option<Secret>,
    log: String,
    log_format: LogFormat,
    grace_seconds: u64,
    exit_on_stdin_close: bool,
}

impl Default for RawProcess {
    fn default() -> Self {
        Self {
            discovery: "memory".to_owned(),
            discovery_ca: None,
            discovery_cert: None,
            discovery_key: None,
            discovery_user: None,
            discovery_password: None,
            log: "info".to_owned(),
            log_format: LogFormat::Text,
            grace_seconds: 30,
            exit_on_stdin_close: false,
        }
    }
}

/// Checked settings common to all processes.
#[derive(Debug, Clone)]
pub struct ProcessConfig {
    /// Source of the list of workers.
    pub discovery: Source,
    /// Filter of log lines.
    pub log_filter: LogFilter,
    /// Format of log lines.
    pub log_format: LogFormat,
    /// How long the process keeps serving after a signal to stop, while it asks clients to connect elsewhere.
    pub lame_duck: Duration,
    /// Maximum duration of a drain.
    pub grace: Duration,
    /// Whether closing stdin stops the process.
    pub exit_on_stdin_close: bool,
}

impl RawProcess {
    /// Checks all settings.
    pub fn validate(&self, faults: &mut Faults) -> Option<ProcessConfig> {
        let discovery = self.source(faults);
        let log_filter = faults.parse("log", &self.log);
        faults.check("grace_seconds", self.grace_seconds <= 3_600, || {
            format!("{} is over an hour (3600)", self.grace_seconds)
        });
        Some(ProcessConfig {
            discovery: discovery?,
            log_filter: log_filter?,
            log_format: self.log_format,
            lame_duck: Duration::ZERO,
            grace: Duration::from_secs(self.grace_seconds),
            exit_on_stdin_close: self.exit_on_stdin_close,
        })
    }

    fn source(&self, faults: &mut Faults) -> Option<Source> {
        let [ca, cert, key] =
            [&self.discovery_ca, &self.discovery_cert, &self.discovery_key].map(Option::as_deref);
        let tls = ClientFiles { name: "discovery", ca, cert, key }.validate(faults);
        // Not `Faults::parse`, which repeats the text: it may hold a password.
        let uri: DiscoveryUri =
            self.discovery.parse().map_err(|error| faults.add("discovery", error)).ok()?;
        faults.check("discovery_ca", ca.is_none() || matches!(uri, DiscoveryUri::Etcd { .. }), || {
            format!("applies only to etcd, but --discovery is `{uri}`")
        });
        if let DiscoveryUri::Static(path) = &uri
            && let Err(error) = check_static_file(path)
        {
            faults.add("discovery", error);
        }
        let user = self.etcd_user(&uri, faults);
        Some(Source { uri, tls, user })
    }

    fn etcd_user(&self, uri: &DiscoveryUri, faults: &mut Faults) -> Option<EtcdUser> {
        let (name, password) = (self.discovery_user.as_ref(), self.discovery_password.as_ref());
        let is_etcd = matches!(uri, DiscoveryUri::Etcd { .. });
        faults.check("discovery_user", name.is_none() || is_etcd, || {
            format!("applies only to etcd, but --discovery is `{uri}`")
        });
        faults.check("discovery_user", name.is_none() || password.is_some(), || {
            "needs its password: set OUTRIDER_DISCOVERY_PASSWORD, or discovery_password in the file"
                .to_owned()
        });
        faults.check("discovery_password", password.is_none() || name.is_some(), || {
            "needs --discovery-user NAME as well".to_owned()
        });
        Some(EtcdUser { name: name?.clone(), password: password?.clone() })
    }
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
        Err(error) => return fail(&anyhow::Error::new(error).context("cannot start the async runtime")),
    };
    let code = runtime.block_on(async {
        let telemetry = TelemetryConfig {
            service_name: service_name.to_owned(),
            log_format: config.log_format,
            log_filter: config.log_filter.clone(),
        };
        let guard = match telemetry::init(&telemetry) {
            Ok(guard) => guard,
            Err(error) => return fail(&error.into()),
        };
        let code = live(config, start).await;
        guard.shut_down().await;
        code
    });
    // Hung blocking threads (stdin, a disk) must not keep a stopped process alive.
    runtime.shutdown_background();
    code
}

async fn live<F, S>(config: &ProcessConfig, start: S) -> ExitCode
where
    S: FnOnce(Lifetime, Health) -> F,
    F: Future<Output = anyhow::Result<()>>,
{
    crate::descriptors::raise_limit();
    let (lifetime, health) = (Lifetime::new(), Health::new());
    let mut signals = TerminationSignals::listen();
    let (code, lame_duck) = tokio::select! {
        biased;
        // A signal to stop during the start aborts it.
        () = stop_requested(&mut signals, config.exit_on_stdin_close) => {
            if config.lame_duck.is_zero() {
                tracing::info!("stopping: requests in flight may finish");
            } else {
                tracing::info!(lame_duck = ?config.lame_duck, "stopping: requests in flight may finish");
            }
            (ExitCode::SUCCESS, config.lame_duck)
        }
        // When the role fails, the reason is the last line of the log.
        code = start_and_report(start(lifetime.clone(), health.clone()), &health) => (code, Duration::ZERO),
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
    code
}

/// Resolves only if the start fails or the role declares itself failed.
async fn start_and_report(start: impl Future<Output = anyhow::Result<()>>, health: &Health) -> ExitCode {
    if let Err(error) = start.await {
        return fail(&error);
    }
    let mut state = health.subscribe();
    let failed = state.wait_for(|state| matches!(state, crate::health::State::Failed(_))).await;
    match failed {
        Ok(state) => tracing::error!(reason = state.reason(), "the process failed and stops"),
        Err(_) => tracing::error!("the health state was dropped: stopping"),
    }
    ExitCode::FAILURE
}

async fn stop_requested(signals: &mut TerminationSignals, on_stdin_close: bool) {
    tokio::select! {
        biased;
        _ = signals.next() => {}
        // The parent has ended.
        () = stdin_closed(), if on_stdin_close => {}
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

/// Writes the error as one line to stderr, for users and for the parent process.
fn fail(error: &anyhow::Error) -> ExitCode {
    use std::io::Write as _;
    // If stderr is closed, the exit code still reports the failure.
    drop(writeln!(std::io::stderr(), "error: {}", describe(error)));
    ExitCode::FAILURE
}

/// The error and its causes, each once: many errors end with the text of their cause.
fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string).filter(|cause| !cause.is_empty()) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_described_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot read a file: {source}")]
        struct Read {
            source: std::io::Error,
        }
        let read = Read { source: std::io::Error::other("no such file") };
        let error = anyhow::Error::new(read).context("--model m");
        assert_eq!(describe(&error), "--model m: cannot read a file: no such file");
    }

    /// Returns the etcd user of these settings, or the fault.
    fn user(uri: &str, name: Option<&str>, password: Option<&str>) -> Result<Option<EtcdUser>, String> {
        let raw = RawProcess {
            discovery: uri.to_owned(),
            discovery_user: name.map(str::to_owned),
            discovery_password: password.map(Secret::new),
            ..RawProcess::default()
        };
        let mut faults = Faults::new();
        let config = raw.validate(&mut faults);
        faults.finish().map_err(|error| error.to_string())?;
        Ok(config.and_then(|config| config.discovery.user))
    }

    #[test]
    fn a_user_and_a_password_need_each_other_and_etcd() {
        let etcd = "etcd://127.0.0.1:2379/outrider";
        assert_eq!(user(etcd, None, None), Ok(None));
        let both = user(etcd, Some("workers"), Some("sesame")).unwrap().unwrap();
        assert_eq!((both.name.as_str(), both.password.expose()), ("workers", "sesame"));
        for (uri, name, password, expected) in [
            (etcd, Some("workers"), None, "OUTRIDER_DISCOVERY_PASSWORD"),
            (etcd, None, Some("sesame"), "--discovery-user"),
            ("memory", Some("workers"), Some("sesame"), "applies only to etcd"),
            ("etcd://workers:sesame@127.0.0.1:2379/outrider", None, None, "do not belong into the URI"),
        ] {
            let error = user(uri, name, password).unwrap_err();
            assert!(error.contains(expected) && !error.contains("sesame"), "{error}");
        }
    }
}
