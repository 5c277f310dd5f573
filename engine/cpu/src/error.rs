//! Errors before kernels run: a choice that this machine does not support, memory that it does not have, rows
//! that cannot be read. The kernels themselves do not fail. Callers convert these errors to their own.

/// Reason why kernels cannot run, or weights cannot be packed for them.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A number of threads, a core or a format is out of range.
    #[error("option {option} is {value}: {reason}")]
    BadOption {
        /// Name of the engine option.
        option: &'static str,
        /// Its value.
        value: u64,
        /// The limit, and what to do.
        reason: String,
    },
    /// The instruction set is unknown, or this CPU lacks it.
    #[error("instruction set `{name}` is not available on this CPU, expected one of {available}")]
    MissingInstructionSet {
        /// The requested name.
        name: String,
        /// The available ones.
        available: String,
    },
    /// Another instruction set was chosen before, and kernels may have run with it.
    #[error("cannot select instruction set `{0}`, this process already uses another one")]
    InstructionSetInUse(String),
    /// The system did not provide the memory.
    #[error("out of memory: {bytes} bytes for {purpose}")]
    OutOfMemory {
        /// Requested bytes.
        bytes: u64,
        /// Purpose of the memory.
        purpose: &'static str,
    },
    /// The error of [`crate::RowBlocks::read`], unchanged.
    #[error(transparent)]
    Rows(Box<dyn std::error::Error + Send + Sync>),
}
