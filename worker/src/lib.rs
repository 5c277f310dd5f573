//! Common part of draft and target workers: a gRPC service that routers connect to, a table of cached
//! sequences, and one thread that owns the model. Draft and target workers differ only in what they do with
//! the logits after a step's context, which they implement in [`role_logic::RoleLogic`].
//!
//! Reading order, following a step: [`grpc`] reads it from the stream, [`step_loop`] admits it against the
//! [`table`] and schedules it into the next forward, [`model`] runs that forward, and the service sends the
//! reply. [`reactor`] decides which thread drives the I/O. [`grammars`] computes masks of sequences whose
//! output must match a grammar. [`serve`] runs all of it as a process. [`synthetic`] replaces the model where
//! only timing matters.
//!
//! A worker is never the source of truth: all its state can be rebuilt from ids, and a step that does not
//! match the cached state is answered `need_context`.

#![forbid(unsafe_code)]

pub mod ahead;
pub mod assets;
pub mod batch_plan;
pub mod compute_device;
pub mod config;
pub mod credits;
pub mod executor;
pub mod facts;
pub mod failed_forward;
pub mod grammars;
pub mod grpc;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod profile;
pub mod reactor;
mod registration;
pub mod role_logic;
pub mod serve;
pub mod step_loop;
pub mod synthetic;
pub mod table;
pub mod task;

pub use executor::StepExecutor;
pub use role_logic::{OutputRows, RoleLogic, StepProgress};
pub use task::Task;
