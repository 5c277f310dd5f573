//! The CUDA backend: kernels as source, compiled at run time for the device that is there, behind a binary that
//! needs no toolkit to build and no GPU to start.
//!
//! `kernels/*.cu` are the operations; `sources` lists them, `nvrtc` compiles them. `executor` is what must run them:
//! `device` does on a GPU, `emulator` does on the host, thread by thread, in tests. Everything above it
//! (`ops`: checked launches; `backend`: what a forward calls; `parity`: every kernel against its naive twin) is the same
//! code over both, so that what the tests ran is what a GPU runs. docs/cuda.md says what has been seen on one.
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
mod kv_room;
mod memory_pool;
mod numerics;
mod nvrtc;
mod on_host;
mod ops;
mod parity;
mod ranks;
#[cfg(test)]
mod roofline;
mod sass;
mod sources;
mod staging;
mod toolkit;
mod whole_model;

pub use device::{CudaDevice, DeviceFacts};
pub use error::CudaError;
pub use gpus::GpuOptions;
pub(crate) use gpus::load_on_gpus;
pub(crate) use ops::{DrawRow, FilterRow, LogitEdit, ScoreRow, edits_of};
