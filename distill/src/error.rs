//! Why a draft could not be trained.

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
        /// What the system said.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A checkpoint says what cannot be trained.
    #[error("{}: {reason}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What it says.
        reason: String,
    },
    /// A checkpoint without a tensor, or with one of another shape.
    #[error("{} has no tensor {name} of shape {shape:?}", path.display())]
    NoTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// As config.json has it.
        shape: Vec<usize>,
    },
    /// Training went astray.
    #[error("the loss of step {step} is not a number: lower --learning-rate")]
    Diverged {
        /// From 1.
        step: usize,
    },
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] EngineError),
}
