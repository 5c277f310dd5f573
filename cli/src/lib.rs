//! The `outrider` tool as a library: what a person at one machine needs around the three server binaries.
//!
//! [`cluster`] starts router and workers as operating-system processes, watches them and tears them down; end-to-end tests
//! use it as it is. [`up`] is the subcommand on top: checks first, progress, one ready line, logs, an orderly end.
//! [`engine_bench`] measures the engine by itself, without processes. [`check_pair`] judges a pair in this process;
//! [`mod@distill`] retrains a draft on a router's log; [`plan`] works out from configurations alone what a pair needs.
//! [`load`] is the one load generator of all programs; [`mod@bench`] puts an endpoint under it and says whether speculation pays.
//! Nothing here is needed in production, and no server crate may depend on it.

#![forbid(unsafe_code)]

/// The exit code of a command line that makes no sense, as servers have it for their configuration.
pub(crate) use service::config::EXIT_BAD_CONFIG as EXIT_USAGE;

pub mod bench;
pub mod check_pair;
pub mod cluster;
pub mod distill;
pub mod engine_bench;
pub mod load;
pub mod plan;
pub mod up;
