//! The process shell: what every Outrider binary needs besides its own job, in one place so that the binaries
//! do not diverge.
//!
//! In the order used by a `main`: [`config`] (file, then environment, then flags), [`telemetry`] (logs and
//! traces), [`shutdown`] (the [`Lifetime`](shutdown::Lifetime) of all tasks), [`metrics`], [`health`] (live,
//! ready, draining), [`discovery`] (workers and their addresses), [`accept`] (incoming connections, within
//! the process's [`descriptors`]) and [`process`] (all of it in order). [`unix_time`] is the time of day, and
//! [`release`] is what the program was built from.
//!
//! This crate must never know models, tokens or sequences: facts about a worker pass through it as opaque
//! JSON.

#![forbid(unsafe_code)]

pub mod accept;
pub mod config;
pub mod descriptors;
pub mod discovery;
mod error_text;
pub mod health;
pub mod metrics;
pub mod on_wake;
pub mod polled_file;
pub mod process;
pub mod release;
mod reloaded_files;
pub mod secret;
pub mod shutdown;
pub mod telemetry;
pub mod tls;
pub mod unix_time;

mod toml_file;

pub use error_text::error_text;
