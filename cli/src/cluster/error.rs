//! What can go wrong with a cluster of child processes.

use std::path::PathBuf;
use std::time::Duration;

use super::process::ExitReport;

/// Why a cluster did not start, or a question to it had no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// A server binary is not where this executable stands.
    #[error("no binary {name} in {directory}: build all of them with `cargo build --workspace --bins`")]
    MissingBinary {
        /// Its file name.
        name: &'static str,
        /// Where it was looked for.
        directory: PathBuf,
    },
    /// This executable's own path is unknown, so its neighbours cannot be found.
    #[error("cannot tell where this executable stands: {0}")]
    OwnPath(#[source] std::io::Error),
    /// The operating system refused to start a program.
    #[error("cannot start {name} ({program}): {source}")]
    Spawn {
        /// The process's name in the cluster.
        name: String,
        /// What was to be run.
        program: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The directory for the discovery file could not be made or written.
    #[error("cannot write the discovery file in the temporary directory: {0}")]
    Directory(#[source] std::io::Error),
    /// No free port was found.
    #[error("no free loopback port among {tried} tried from {first} on")]
    NoFreePort {
        /// How many were tried.
        tried: u16,
        /// Where the search began.
        first: u16,
    },
    /// The process cannot listen for Ctrl-C, so it would leave children behind.
    #[error("cannot listen for signals: {0}")]
    Signals(#[source] std::io::Error),
    /// A process ended while it was needed.
    #[error("{0}")]
    Died(ExitReport),
    /// A process ended before it was ready, and said why.
    #[error("{name} cannot start: {reason}")]
    CannotStart {
        /// Which one.
        name: String,
        /// In its own words, on one line.
        reason: String,
    },
    /// The cluster did not become ready in time.
    #[error("not ready after {} s: {}", waited.as_secs(), missing.join("; "))]
    NotReady {
        /// How long it was given.
        waited: Duration,
        /// Each process that is missing, with its last answer.
        missing: Vec<String>,
    },
    /// No process has that name.
    #[error("no process named {name} in this cluster")]
    NoSuchProcess {
        /// The name asked for.
        name: String,
    },
}
