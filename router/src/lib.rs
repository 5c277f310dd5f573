//! The router: clients in, verified tokens out.
//!
//! A request passes the modules in this order: [`api`] -> [`pipeline`], which has it checked ([`request`]), admitted
//! ([`admission`]), tokenized ([`tokenize`], [`task_type`]) and scheduled ([`scheduler`], behind the seam [`generation`],
//! on the [`workers`]), and turns its tokens into text again ([`detokenize`]). [`catalog`] lists the models and
//! their tokenizers, [`request_log`] keeps finished requests where an operator asks for that, [`console`] is for people, [`error`] says how each failure is reported; [`config`] and [`serve`] put a process around it.

#![forbid(unsafe_code)]

pub mod api;
pub mod console;
pub mod output;
pub mod pipeline;
pub mod request;
pub mod request_log;

pub mod admission;
pub mod task_type;
pub mod tokenize;

pub mod generation;
pub mod scheduler;
pub mod workers;

pub mod detokenize;

pub mod catalog;
pub mod config;
pub mod error;
pub mod lane_config;
pub mod metrics;
pub mod serve;
