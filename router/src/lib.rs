//! The router: clients in; lanes and rounds; verified token spans out.
//!
//! One request is one line of modules: [`ingress`] (its door, its checks) -> [`admission`] -> [`tokenize`] (and [`task_type`]) -> [`lane`],
//! behind the seam [`generation`]: rounds of draft and verify on the [`workers`] -> [`token_span`] (text again) ->
//! [`stream`] (what the client reads). [`catalog`] says which models there are, [`text`] what their tokens mean,
//! [`error`] how each failure is told; [`config`] and [`serve`] put a process around it.

#![forbid(unsafe_code)]

pub mod ingress;

pub mod admission;
pub mod task_type;
pub mod tokenize;

pub mod generation;
pub mod lane;
pub mod workers;

pub mod stream;
pub mod token_span;

pub mod catalog;
pub mod config;
pub mod error;
pub mod metrics;
pub mod request_record;
pub mod request_span;
pub mod serve;
pub mod text;
pub mod waits;
