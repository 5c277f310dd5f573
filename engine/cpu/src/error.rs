//! Everything that can go wrong before kernels run: a choice that this machine cannot follow, memory that it does not have,
//! rows that cannot be read. The kernels themselves do not fail. Whoever calls turns these into errors of its own.

/// Why kernels cannot run, or weights cannot be laid out for them.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A number of threads, a core or a format is out of range.
    #[error("option {option} is {value}: {reason}")]
    BadOption {
        /// The engine's name of the option.
        option: &'static str,
        /// Its value.
        value: u64,
        /// The limit, and what to do.
        reason: String,
    },
    /// An instruction set was asked for that this CPU lacks or nobody knows.
    #[error("instruction set `{name}` is not available on this CPU, expected one of {available}")]
    MissingInstructionSet {
        /// What was asked for.
        name: String,
        /// Those that would have worked.
        available: String,
    },
    /// Another instruction set was chosen before, and kernels may have run with it.
    #[error("instruction set `{0}` comes too late, this process computes with another one already")]
    InstructionSetInUse(String),
    /// The system did not give the memory.
    #[error("out of memory: {bytes} bytes for {purpose}")]
    OutOfMemory {
        /// How much was asked for.
        bytes: u64,
        /// What for.
        purpose: &'static str,
    },
    /// What [`crate::RowBlocks::read`] said, passed on as it is.
    #[error(transparent)]
    Rows(Box<dyn std::error::Error + Send + Sync>),
}
