//! What can go wrong with a GPU, as an operator tells it apart: nothing there to run on, a kernel that does not
//! compile, a launch that contradicts itself, a driver that says no.

/// Why the CUDA backend refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library of the driver or of CUDA is not on this machine.
    #[error("{library} was not found: {advice}")]
    LibraryMissing {
        /// Its file.
        library: &'static str,
        /// What to install.
        advice: &'static str,
    },
    /// The driver is there and knows no such device.
    #[error("there is no cuda:{ordinal}: the driver shows {count} devices")]
    NoSuchDevice {
        /// The device that was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The device is older than what the kernels are written for.
    #[error("cuda:{ordinal} is of compute capability {major}.{minor}, the kernels need 8.0 or above")]
    TooOld {
        /// The device that was asked for.
        ordinal: usize,
        /// Its capability.
        major: i32,
        /// Its capability.
        minor: i32,
    },
    /// The driver does not load what this version of CUDA makes.
    #[error(
        "the driver is for cuda {driver} and does not load kernels made by cuda {toolkit}: install a driver for cuda {toolkit} or newer \
         (branch 580 for cuda 13), or kernels made by the driver's own cuda"
    )]
    DriverTooOld {
        /// The newest CUDA that the driver knows.
        driver: String,
        /// The CUDA that made the kernels.
        toolkit: String,
    },
    /// The driver refused.
    #[error("the cuda driver refused to {action}: {reason}")]
    Driver {
        /// What was asked of it.
        action: &'static str,
        /// What it said.
        reason: String,
    },
    /// A kernel did not compile.
    #[error("{file} does not compile for {arch}: {log}")]
    Compile {
        /// The kernel's file.
        file: &'static str,
        /// What for.
        arch: String,
        /// What the compiler said.
        log: String,
    },
    /// Compiled kernels that cannot be used, or not be written.
    #[error("kernels in {dir}: {reason}")]
    BadKernelFiles {
        /// Their folder.
        dir: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A launch contradicts the kernel's contract: nothing was launched.
    #[error("{kernel}: {what} is {found}, expected {expected}")]
    BadLaunch {
        /// The kernel.
        kernel: &'static str,
        /// The number that is wrong.
        what: &'static str,
        /// Its value.
        found: usize,
        /// What the kernel takes.
        expected: String,
    },
    /// Weights are wanted in a format that no kernel reads.
    #[error("{format} weights have no cuda kernels: pass --weights bf16, fp8 or int8 (these have)")]
    NoSuchFormat {
        /// The format.
        format: &'static str,
    },
    /// cuBLASLt refused, or lacks something.
    #[error("cublaslt failed at {action}: {reason}")]
    Blas {
        /// The function.
        action: &'static str,
        /// What it said.
        reason: String,
    },
    /// NCCL refused, or lacks something.
    #[error("nccl failed at {action}: {reason}")]
    Nccl {
        /// The function.
        action: &'static str,
        /// What it said.
        reason: String,
    },
    /// A rank waited for others that do not come: its model is of no use any more.
    #[error("ranks lost each other: {reason}")]
    RanksApart {
        /// What was seen.
        reason: String,
    },
    /// The device has not the memory.
    #[error("out of device memory: {bytes} bytes for {purpose}, {free} free")]
    OutOfMemory {
        /// How much was asked for.
        bytes: u64,
        /// What for.
        purpose: &'static str,
        /// How much there was.
        free: u64,
    },
}
