//! Errors of `outrider bench`.

use std::path::PathBuf;

use crate::load::LoadError;
use crate::usage::UsageError;

/// Why nothing was measured or the report was not written.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The command line is invalid.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// No endpoint or no prompts.
    #[error("{0}")]
    Load(#[from] LoadError),
    /// No request of the warm-up was answered.
    #[error("arm `{arm}`: every warm-up request failed; the first: {first}")]
    WarmupFailed {
        /// The arm's name.
        arm: String,
        /// The outcome of the first request.
        first: String,
    },
    /// Ctrl-C before the first block had ended.
    #[error("interrupted before anything was measured")]
    Interrupted,
    /// A report could not be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// Path of the report.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
}
