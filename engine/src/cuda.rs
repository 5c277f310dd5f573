//! The CUDA backend: kernels are shipped as source and compiled at run time for the device found. The binary
//! needs no toolkit to build and no GPU to start.
//!
//! `kernels/*.cu` are the operations; `sources` lists them, `nvrtc` compiles them. `executor` is the
//! interface that runs them: `device` implements it on a GPU, and in tests `emulator` on the host, thread by
//! thread. The code above it (`ops`: checked launches; `backend`: the operations of a forward; `parity`:
//! every kernel against its naive twin) is the same for both, so that tests run the code that a GPU runs.
//! docs/cuda.md says what has been tested on a GPU.
#![expect(unsafe_code, reason = "launches, the driver and the compiler are foreign; see each SAFETY note")]

mod backend;
mod blas;
mod device;
#[cfg(test)]
mod emulator;
mod error;
mod executor;
mod functions;
pub mod gpu_check;
mod gpus;
mod graphs;
pub mod host_driver;
mod kernel_files;
pub mod kernels_check;
mod kv_budget;
mod memory_pool;
mod numerics;
mod nvrtc;
mod on_host;
mod ops;
mod parity;
mod ranks;
mod sass;
mod sources;
mod staging;
#[cfg(test)]
mod step_counts;
#[cfg(test)]
mod test_model;
mod toolkit;
mod warm_up;
mod whole_model;

pub use device::{CudaDevice, DeviceProperties};
pub use error::CudaError;
pub use gpus::GpuOptions;
pub(crate) use gpus::load_on_gpus;
pub(crate) use ops::{ContextEdits, DrawRow, FilterRow, ListedRow, LogitEdit, ScoreRow, ScoredToken};
