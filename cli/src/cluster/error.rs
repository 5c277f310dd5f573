//! Errors of a cluster of child processes.

use std::path::PathBuf;
use std::time::Duration;

use super::process::ExitReport;

/// Why a cluster failed to start or a request to it failed.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// A server binary is not in the expected directory.
    #[error("no binary {name} in {directory}: build all binaries with `cargo build --workspace --bins`")]
    MissingBinary {
        /// Its file name.
        name: &'static str,
        /// The directory that was searched.
        directory: PathBuf,
    },
    /// The path of this executable is unknown, so the server binaries cannot be found.
    #[error("cannot determine the path of this executable: {0}")]
    OwnPath(#[source] std::io::Error),
    /// The operating system could not start a program.
    #[error("cannot start {name} ({program}): {source}")]
    Spawn {
        /// The process's name in the cluster.
        name: String,
        /// The executable.
        program: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The directory for the discovery file could not be created or written.
    #[error(
        "cannot write the discovery file in the temporary directory: {0}: set TMPDIR to a directory with space \
         that this user may write to"
    )]
    Directory(#[source] std::io::Error),
    /// No free port was found.
    #[error("no free loopback port among {tried} tried from {first} on")]
    NoFreePort {
        /// Number of ports tried.
        tried: u16,
        /// The first port tried.
        first: u16,
    },
    /// A process ended unexpectedly.
    #[error("{0}")]
    Died(ExitReport),
    /// A process ended before it was ready, with a stated reason.
    #[error("{name} cannot start: {reason}")]
    CannotStart {
        /// The process's name.
        name: String,
        /// The process's error message, on one line.
        reason: String,
    },
    /// The cluster did not become ready in time.
    #[error("not ready after {} s: {}", waited.as_secs(), missing.join("; "))]
    NotReady {
        /// The timeout.
        waited: Duration,
        /// Each process that is not ready, with its last answer.
        missing: Vec<String>,
    },
    /// No process has that name.
    #[error("no process named {name} in this cluster")]
    NoSuchProcess {
        /// The requested name.
        name: String,
    },
}
