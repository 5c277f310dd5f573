//! The `outrider` tool as a library: what a person at one machine needs around the three server binaries.
//!
//! [`cluster`] starts router and workers as operating-system processes, monitors them and stops them;
//! end-to-end tests use it directly. [`up`] is the subcommand on top of it: preflight checks, progress, one
//! ready line, logs, an orderly shutdown. [`engine_bench`] measures the engine alone, without processes.
//! [`check_pair`] evaluates a pair in this process; [`mod@distill`] retrains a draft on a router's log;
//! [`plan`] computes the needs and the speed of a pair from configurations alone. [`load`] is the load
//! generator of all programs; [`mod@bench`] loads an endpoint and judges whether speculation pays.
//! [`completions`] prints scripts for shells. Production needs nothing from this crate, and no server crate
//! may depend on it.

#![forbid(unsafe_code)]

/// Exit code for an invalid command line, the same as for an invalid configuration of a server.
pub use service::config::EXIT_BAD_CONFIG as EXIT_USAGE;

pub mod bench;
pub mod check_pair;
pub mod cluster;
pub mod completions;
mod count;
pub mod distill;
pub mod engine_bench;
pub mod load;
mod output;
pub mod plan;
mod progress;
mod shell;
pub mod up;
pub mod usage;
