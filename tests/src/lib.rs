//! End-to-end tests: whole clusters, in this process or as real processes, judged by token ids.
//!
//! [`pair`] is the bundled model pair with its prompts, [`case`] is one request, and [`client`] sends it.
//! [`cluster`] and [`processes`] start clusters. [`oracle`] computes the expected answer. [`hostile`] and
//! [`faulty_wire`] are disturbances that must not change a token; [`metrics`], [`lanes_report`] and [`wait`]
//! observe what happened, and when. [`fake_worker`] serves fake workers, [`http_client`] sends requests that
//! only HTTP supports, [`python`] and [`node`] run third-party clients, which [`clients`] lists. [`schemas`]
//! generates JSON schemas and [`structured`] requests under them; the program `schemas` sends thousands of
//! these. [`checkpoint_copy`] is a model to damage, [`foreign_draft`] one with another tokenizer; [`etcd`]
//! and [`mod@trace_collector`] are the real services next to a cluster. [`tcp_proxy`] is an unreliable
//! network, [`hostile_target`] an untrusted target, and [`chaos`] injects faults of every kind into a whole
//! fleet; the program `chaos` prints their effect. [`untrusted`] parses untrusted bytes wherever the programs
//! do, for the fuzzer in `fuzz/` and for the gate. [`acceptance`] and [`tree_shapes`] measure instead of
//! judging; the program `acceptance-table` prints their results. [`block_verification`] is a rule of the
//! literature; the example `tree_shapes`, which runs a pair without servers, compares it with the served
//! ones.
//!
//! The tests themselves are in `tests/`, one file per guarantee. Nothing in this crate is ever shipped.

#![forbid(unsafe_code)]

pub mod acceptance;
pub mod authority;
pub mod block_verification;
pub mod case;
pub mod chaos;
pub mod checkpoint_copy;
pub mod client;
pub mod clients;
pub mod cluster;
pub mod configuration;
pub mod etcd;
pub mod fake_worker;
pub mod faulty_wire;
pub mod foreign_draft;
pub mod hostile;
pub mod hostile_target;
pub mod http_client;
pub mod lanes_report;
pub mod metrics;
pub mod metrics_reference;
pub mod node;
pub mod nodes;
pub mod oracle;
pub mod pair;
pub mod predictions;
pub mod processes;
pub mod python;
pub mod schemas;
pub mod structured;
pub mod tcp_proxy;
pub mod trace_collector;
pub mod tree_shapes;
pub mod untrusted;
pub mod wait;
