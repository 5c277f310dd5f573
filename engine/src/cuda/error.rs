//! Errors of the CUDA backend, separated as an operator needs them: missing library or device, kernel that
//! does not compile, invalid launch, driver error.

/// Error of the CUDA backend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library of the driver or of CUDA was not found.
    #[error("{library} was not found: {advice}")]
    LibraryMissing {
        /// File name of the library.
        library: &'static str,
        /// What to install.
        advice: &'static str,
    },
    /// The driver works, but has no such device.
    #[error("there is no cuda:{ordinal}: the driver shows {count} devices (see CUDA_VISIBLE_DEVICES)")]
    NoSuchDevice {
        /// The requested device.
        ordinal: usize,
        /// Number of devices.
        count: usize,
    },
    /// The device is older than the kernels support.
    #[error("cuda:{ordinal} is of compute capability {major}.{minor}, the kernels need 8.0 or above")]
    TooOld {
        /// The requested device.
        ordinal: usize,
        /// Major compute capability.
        major: i32,
        /// Minor compute capability.
        minor: i32,
    },
    /// The driver cannot load kernels that this version of CUDA compiled.
    #[error(
        "the driver is for cuda {driver} and does not load kernels made by cuda {toolkit}: install a driver for cuda {toolkit} or newer \
         (branch 580 for cuda 13), or kernels made by the driver's own cuda"
    )]
    DriverTooOld {
        /// The newest CUDA version that the driver supports.
        driver: String,
        /// The CUDA version that compiled the kernels.
        toolkit: String,
    },
    /// A driver call failed.
    #[error("the cuda driver refused to {action}: {reason}")]
    Driver {
        /// What was requested.
        action: &'static str,
        /// The driver's error.
        reason: String,
    },
    /// A kernel did not compile.
    #[error("{file} does not compile for {arch}: {log}")]
    Compile {
        /// The kernel's file.
        file: &'static str,
        /// Architecture that it was compiled for.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// Compiled kernels that cannot be used or written.
    #[error("kernels in {dir}: {reason}")]
    BadKernelFiles {
        /// Their folder.
        dir: String,
        /// What is wrong.
        reason: String,
    },
    /// A launch violates the kernel's contract; nothing was launched.
    #[error("{kernel}: {what} is {found}, expected {expected}")]
    BadLaunch {
        /// The kernel.
        kernel: &'static str,
        /// Name of the wrong number.
        what: &'static str,
        /// Its value.
        found: usize,
        /// Values that the kernel accepts.
        expected: String,
    },
    /// Weights were requested in a format that no kernel reads.
    #[error(
        "{format} weights have no cuda kernels: pass --weights bf16 or fp8, or int8 if the checkpoint is bf16"
    )]
    UnsupportedFormat {
        /// The format.
        format: &'static str,
    },
    /// The requested format keeps the embedding table as stored, and no kernel reads that.
    #[error(
        "--weights {format} keeps the embedding table as stored, but this checkpoint is not all bf16 and no \
         cuda kernel reads an f32 table: pass --weights bf16 or fp8"
    )]
    UnsupportedTable {
        /// The format.
        format: &'static str,
    },
    /// cuBLASLt has no algorithm for a product. It looks for one on the host: the device still works.
    #[error("cublaslt cannot multiply {rows} x {k} by {n} x {k}: {reason}")]
    NoBlasAlgorithm {
        /// Rows of the activations.
        rows: usize,
        /// Outputs per row.
        n: usize,
        /// Inputs per row.
        k: usize,
        /// The library's error.
        reason: String,
    },
    /// A cuBLASLt call failed, or a function is missing.
    #[error("cublaslt failed at {action}: {reason}")]
    Blas {
        /// The function.
        action: &'static str,
        /// The library's error.
        reason: String,
    },
    /// An NCCL call failed, or a function is missing.
    #[error("nccl failed at {action}: {reason}")]
    Nccl {
        /// The function.
        action: &'static str,
        /// The library's error.
        reason: String,
    },
    /// A rank waited in vain for other ranks: the model cannot be used any more.
    #[error("ranks lost each other: {reason}")]
    RankFailure {
        /// What was observed.
        reason: String,
    },
    /// The device does not have enough memory.
    #[error("out of device memory: {bytes} bytes for {purpose}, {free} free")]
    OutOfMemory {
        /// Requested bytes.
        bytes: u64,
        /// Purpose of the memory.
        purpose: &'static str,
        /// Free bytes.
        free: u64,
    },
}

impl CudaError {
    /// Whether the device's context or a connection between ranks may be lost, so that the process must be
    /// restarted. Libraries report a lost context with errors of their own.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Driver { .. } | Self::Blas { .. } | Self::Nccl { .. } | Self::RankFailure { .. } => true,
            Self::LibraryMissing { .. }
            | Self::NoSuchDevice { .. }
            | Self::TooOld { .. }
            | Self::DriverTooOld { .. }
            | Self::Compile { .. }
            | Self::BadKernelFiles { .. }
            | Self::BadLaunch { .. }
            | Self::UnsupportedFormat { .. }
            | Self::UnsupportedTable { .. }
            | Self::NoBlasAlgorithm { .. }
            | Self::OutOfMemory { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EngineError;

    #[test]
    fn errors_of_a_lost_context_end_the_process() {
        let reason = || "status 13: execution failed".to_owned();
        let fatal = |error: CudaError| EngineError::from(error).is_fatal();
        assert!(fatal(CudaError::Driver { action: "finish a kernel", reason: reason() }));
        assert!(fatal(CudaError::Blas { action: "cublasLtMatmul", reason: reason() }));
        assert!(fatal(CudaError::Nccl { action: "ncclGroupEnd", reason: reason() }));
        assert!(fatal(CudaError::RankFailure { reason: reason() }));
        assert!(!fatal(CudaError::NoBlasAlgorithm { rows: 32, n: 5, k: 4, reason: reason() }));
        assert!(!fatal(CudaError::OutOfMemory { bytes: 2, purpose: "rows of a pass", free: 1 }));
    }
}
