//! The engine's tests of the public interface, on checkpoint files. One binary: linking several would take
//! longer than running them.
#![expect(clippy::unwrap_used, reason = "the lint sees tests, but not what tests call")]

mod ballast;
mod broken_files;
mod contents;
mod exactness;
mod fp8;
mod fp8_blocks;
mod golden;
mod host_driver;
mod limits;
mod peers;
mod prefixes;
mod quantized;
mod small_model;
mod support;
mod tensor_parallel;
mod trees;
