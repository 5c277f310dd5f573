//! Errors of training a draft.

use std::path::PathBuf;

use engine::EngineError;

/// Why a draft could not be trained.
#[derive(Debug, thiserror::Error)]
pub enum DistillError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// A checkpoint has a format or setting that cannot be trained.
    #[error("{}: {reason}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What is not supported.
        reason: String,
    },
    /// A tensor is missing in a checkpoint or has a different shape.
    #[error("{} has no tensor {name} of shape {shape:?}", path.display())]
    NoTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The shape according to config.json.
        shape: Vec<usize>,
    },
    /// Threads of the training cannot be started.
    #[error("cannot start the threads of the training: {0}")]
    Threads(String),
    /// The loss diverged.
    #[error("the loss of step {step} is not a number: lower --learning-rate")]
    Diverged {
        /// Number of the step, from 1.
        step: usize,
    },
    /// An error of the engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
}
