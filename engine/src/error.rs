//! Everything that can go wrong here, as callers tell it apart: a checkpoint that cannot be loaded (the
//! process says so and exits), a forward that does not fit (the worker preempts or refuses), a request that
//! names what does not exist.

use std::path::PathBuf;

use cpu_kernels::KernelError;

use crate::SlotId;

/// Why the engine refused.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A file of the checkpoint is missing or cannot be opened.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of the checkpoint was read but makes no sense.
    #[error("{}: {reason}", path.display())]
    BrokenFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A field that the model needs is not there.
    #[error("{}: field `{field}` is missing", path.display())]
    MissingField {
        /// The configuration file.
        path: PathBuf,
        /// The field, dotted where nested.
        field: String,
    },
    /// A field holds what the engine cannot run.
    #[error("{}: field `{field}` {reason}", path.display())]
    BadField {
        /// The configuration file.
        path: PathBuf,
        /// The field, dotted where nested.
        field: String,
        /// What was found and what is accepted.
        reason: String,
    },
    /// The model is of a family that the engine does not know.
    #[error("{}: architecture {found} is not supported, expected one of {known}", path.display())]
    UnknownArchitecture {
        /// The configuration file.
        path: PathBuf,
        /// As the configuration spells it.
        found: String,
        /// Those that would have worked.
        known: String,
    },
    /// A tensor that the configuration asks for is in no file of the checkpoint.
    #[error("tensor `{tensor}` is missing in {}", path.display())]
    MissingTensor {
        /// Its name.
        tensor: String,
        /// The file or index that should name it.
        path: PathBuf,
    },
    /// A tensor's shape is not the one that the configuration implies.
    #[error("tensor `{tensor}` in {} has shape {found:?}, config.json implies {expected:?}", path.display())]
    WrongShape {
        /// Its name.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// From the configuration.
        expected: Vec<usize>,
        /// From the file.
        found: Vec<usize>,
    },
    /// A tensor is stored in a format that the engine does not read.
    #[error("tensor `{tensor}` in {} is stored as {found}, expected F32, F16, BF16, or F8_E4M3 for a matrix", path.display())]
    WrongDtype {
        /// Its name.
        tensor: String,
        /// The file that holds it.
        path: PathBuf,
        /// The stored format.
        found: String,
    },
    /// A load option is out of range.
    #[error("option {option} is {value}: {reason}")]
    BadOption {
        /// Its name in [`crate::LoadOptions`].
        option: &'static str,
        /// Its value.
        value: u64,
        /// The limit, and what to do.
        reason: String,
    },
    /// The CPU kernels cannot run as asked, or got no memory.
    #[error(transparent)]
    Kernel(KernelError),
    /// A GPU cannot be used, or said no.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    /// The weights would not fit in the memory that is free; nothing was read.
    #[error(
        "the weights take {:.1} GB of memory and {:.1} GB are free: take a smaller model, `weights` int8 or int4, or less ballast",
        *needed as f64 / 1e9, *free as f64 / 1e9
    )]
    NotEnoughMemory {
        /// Bytes of weights.
        needed: u64,
        /// Bytes that this process may still take.
        free: u64,
    },
    /// The batch needs more KV blocks than are free. Nothing was changed: preempt something and try again.
    #[error("out of kv memory: {needed} blocks needed, {free} free")]
    OutOfKv {
        /// Blocks that the batch would have taken.
        needed: u64,
        /// Blocks there were.
        free: u64,
    },
    /// A sequence would outgrow the model's window. Nothing was changed.
    #[error("sequence of {len} tokens is over the model's window of {max}")]
    TooLong {
        /// Length after the forward.
        len: u64,
        /// [`crate::EngineInfo::max_model_len`].
        max: u32,
    },
    /// No open sequence has this id. Nothing was changed.
    #[error("slot {0:?} is not open")]
    UnknownSlot(SlotId),
    /// The batch contradicts itself. Nothing was changed.
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
    /// A rank of a tensor-parallel engine panicked or hangs. The engine is of no use any more: load it anew.
    #[error("rank {rank} is lost: {reason}; the engine must be loaded anew")]
    RankLost {
        /// Which.
        rank: usize,
        /// What was seen of it last.
        reason: String,
    },
}

impl EngineError {
    /// Whether nothing can be computed any more: the process has to be started anew.
    pub fn is_fatal(&self) -> bool {
        use crate::cuda::CudaError::{Driver, Nccl, RanksApart};
        matches!(self, Self::RankLost { .. } | Self::Cuda(Driver { .. } | Nccl { .. } | RanksApart { .. }))
    }
}

impl From<KernelError> for EngineError {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Rows(error) => *error
                .downcast()
                .expect("rows are read by `Stacked` alone, which fails with an engine's error"),
            other => Self::Kernel(other),
        }
    }
}
