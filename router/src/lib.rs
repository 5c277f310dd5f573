//! The router: clients in, verified tokens out.
//!
//! A request passes the modules in this order: [`api`] -> [`pipeline`], which checks ([`request`]), admits
//! ([`admission`]), tokenizes ([`tokenize`], [`task_type`]) and schedules it ([`scheduler`], through the
//! interface [`generation`], on the [`workers`]), and converts its tokens back to text ([`detokenize`]).
//! [`catalog`] lists the models and their tokenizers, [`request_log`] keeps finished requests if an operator
//! enables it, [`console`] serves web pages, [`error`] defines how each failure is reported; [`config`] and
//! [`serve`] make a process of it.

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
