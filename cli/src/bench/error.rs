//! Why there is no report.

use std::path::PathBuf;

use crate::load::LoadError;

/// Why nothing was measured, or its report not written.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The command line makes no sense.
    #[error("{flag} is `{value}`, expected {expected}")]
    Usage {
        /// Which part of it.
        flag: &'static str,
        /// As given.
        value: String,
        /// What would do.
        expected: String,
    },
    /// There is no endpoint, or there are no prompts.
    #[error("{0}")]
    Load(#[from] LoadError),
    /// Not one request of the warm-up was answered.
    #[error("arm `{arm}`: no request of the warm-up was answered, the first was {first}")]
    NothingAnswered {
        /// Of which arm.
        arm: String,
        /// What happened to the first.
        first: String,
    },
    /// A report could not be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// Where to.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
}
