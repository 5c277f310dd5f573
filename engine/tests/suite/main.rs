//! The engine's tests from outside, on checkpoints in files. One binary: linking five would take longer than running them.

mod broken_files;
mod exactness;
mod golden;
mod limits;
mod support;
