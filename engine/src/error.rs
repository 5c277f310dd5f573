//! Errors of the engine, by how callers handle them: a checkpoint that cannot be loaded (the process reports
//! it and exits), a forward that does not fit (the worker preempts or refuses), a request that refers to
//! something that does not exist.

use std::path::PathBuf;

use cpu_kernels::KernelError;

use crate::SlotId;

/// Error of an engine call.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A file of the checkpoint is missing or cannot be opened.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file of the checkpoint has invalid content.
    #[error("{}: {reason}", path.display())]
    BrokenFile {
        /// The file.
        path: PathBuf,
        /// Description of the fault.
        reason: String,
    },
    /// A required field is missing.
    #[error("{}: field `{field}` is missing", path.display())]
    MissingField {
        /// The configuration file.
        path: PathBuf,
        /// The field, dotted where nested.
        field: String,
    },
    /// A field has a value that the engine does not support.
    #[error("{}: field `{field}` {reason}", path.display())]
    BadField {
        /// The configuration file.
        path: PathBuf,
        /// The field, dotted where nested.
        field: String,
        /// What was found and what is accepted.
        reason: String,
    },
    /// The model family is not supported.
    #[error("{}: architecture {found} is not supported, expected one of {supported}", path.display())]
    UnknownArchitecture {
        /// The configuration file.
        path: PathBuf,
        /// The architecture as the configuration spells it.
        found: String,
        /// The supported architectures.
        supported: String,
    },
    /// No file of the checkpoint has a tensor that the configuration implies.
    #[error("tensor `{tensor}` is missing in {}", path.display())]
    MissingTensor {
        /// Name of the tensor.
        tensor: String,
        /// The file or index that should contain it.
        path: PathBuf,
    },
    /// A tensor's shape differs from the one that the configuration implies.
    #[error("tensor `{tensor}` in {} has shape {found:?}, config.json implies {expected:?}", path.display())]
    WrongShape {
        /// Name of the tensor.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// Shape implied by the configuration.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// A tensor is stored in a format that the engine does not read.
    #[error("tensor `{tensor}` in {} is stored as {found}, expected F32, F16, BF16, or F8_E4M3 for a matrix", path.display())]
    WrongDtype {
        /// Name of the tensor.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// The stored format.
        found: String,
    },
    /// A tensor of a checkpoint that is quantized in an unsupported way is not as the configuration implies.
    #[error(
        "{error}: the checkpoint is quantized ({method}), only FP8 is supported: use the original checkpoint"
    )]
    Quantized {
        /// What is wrong with the tensor.
        error: Box<EngineError>,
        /// Method and format of the quantization.
        method: String,
    },
    /// A load option is out of range.
    #[error("option {option} is {value}: {reason}")]
    BadOption {
        /// Name of the field of [`crate::LoadOptions`], or `gpu_memory_utilization`.
        option: &'static str,
        /// Its value.
        value: String,
        /// The limit, and what to do.
        reason: String,
    },
    /// The CPU kernels do not support the requested configuration, or an allocation failed.
    #[error(transparent)]
    Kernel(KernelError),
    /// A GPU cannot be used, or reported an error.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    /// The weights do not fit in free memory; nothing was read.
    #[error(
        "the weights need {:.1} GB of memory and {:.1} GB are free: use a smaller model, `weights` int8 or int4, or less ballast",
        *needed as f64 / 1e9, *free as f64 / 1e9
    )]
    NotEnoughMemory {
        /// Bytes of weights.
        needed: u64,
        /// Bytes that this process may still allocate.
        free: u64,
    },
    /// The batch needs more KV blocks than are free. Nothing was changed: preempt a sequence and retry.
    #[error("out of kv memory: {needed} blocks needed, {free} free")]
    OutOfKv {
        /// Blocks that the batch needs.
        needed: u64,
        /// Blocks that were free.
        free: u64,
    },
    /// A sequence would exceed the maximum model length. Nothing was changed.
    #[error("sequence of {len} tokens exceeds the maximum model length of {max}")]
    TooLong {
        /// Length after the forward.
        len: u64,
        /// [`crate::EngineInfo::max_model_len`].
        max: u32,
    },
    /// No open sequence has this id. Nothing was changed.
    #[error("slot {0:?} is not open")]
    UnknownSlot(SlotId),
    /// The batch is inconsistent. Nothing was changed.
    #[error("bad batch: {0}")]
    BadBatch(String),
    /// A token id is outside the vocabulary. Nothing was changed.
    #[error("token id {token_id} is not below the vocabulary size {vocab_size}")]
    UnknownToken {
        /// The id.
        token_id: u32,
        /// The vocabulary's size.
        vocab_size: u32,
    },
    /// A rank of the engine panicked or hung. The engine is unusable and must be reloaded.
    #[error("rank {rank} is lost: {reason}; the engine must be reloaded")]
    RankLost {
        /// Number of the rank.
        rank: usize,
        /// Panic message, failure or timeout of the rank.
        reason: String,
    },
    /// Nodes of one model do not fit together.
    #[error("{0}")]
    BadNode(String),
    /// Another node of the same model failed to do its part.
    #[error("node {node}: {reason}")]
    NodeFailed {
        /// Number of the node.
        node: usize,
        /// Its own error, or how it was lost.
        reason: String,
    },
}

impl EngineError {
    /// Whether the engine is unusable and the process must be restarted.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::RankLost { .. } => true,
            Self::Cuda(error) => error.is_fatal(),
            _ => false,
        }
    }
}

impl From<KernelError> for EngineError {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Rows(error) => *error
                .downcast()
                .expect("only the engine's row sources return this variant, with an EngineError inside"),
            other => Self::Kernel(other),
        }
    }
}
