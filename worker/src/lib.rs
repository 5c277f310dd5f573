//! What both kinds of worker are: a gRPC service to which routers connect, a table of the sequences they hold, and one thread that
//! owns the model. A draft worker and a target worker differ only in what they do with the logits behind a step's
//! context, and say so through [`decide::Decide`].
//!
//! Reading order, which is the life of a step: [`grpc`] reads it off the stream, [`device`] admits it against the
//! [`table`] and takes it into the next forward, [`model`] runs that forward, and the reply leaves through the service.
//! [`reactor`] says which thread reads and writes. [`grammars`] makes the masks of sequences whose output must match a grammar. [`serve`] puts a process around it. [`synthetic`] stands in for a model where only time is to be kept.
//!
//! A worker owns no truth: all it holds can be rebuilt from ids, and whatever does not fit is answered `need_context`.

#![forbid(unsafe_code)]

pub mod ahead;
pub mod assets;
pub mod compute_device;
pub mod config;
pub mod credits;
pub mod decide;
pub mod device;
pub mod facts;
pub mod failed_forward;
pub mod grammars;
pub mod grpc;
pub mod memory;
pub mod method;
pub mod metrics;
pub mod model;
pub mod profile;
pub mod reactor;
mod registration;
pub mod serve;
pub mod synthetic;
pub mod table;
pub mod task;

pub use decide::{Decide, Decision, Rows};
pub use method::Method;
pub use task::Task;
