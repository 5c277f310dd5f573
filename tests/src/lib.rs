//! End-to-end tests: whole clusters, in this process or as real processes, judged by token ids.
//!
//! [`pair`] is the bundled model pair with its prompts, [`case`] one request and [`client`] who sends it; [`cluster`] and
//! [`processes`] bring up what serves it. [`oracle`] says what the answer has to be. [`hostile`] and [`faulty_wire`] are what
//! may be put in the way without a token changing; [`metrics`], [`lanes_report`] and [`wait`] tell what happened, and when.
//! [`fake_worker`] serves what is no worker as one, [`http_client`] sends what only HTTP can carry, [`python`] and [`node`] run other people's clients, which [`clients`] lists, [`schemas`] makes JSON schemas and [`structured`] requests under them, which the program `schemas` asks by the thousand,
//! [`checkpoint_copy`] is a model to damage, [`foreign_draft`] one with another tokenizer, [`etcd`] and [`mod@trace_collector`] are the real neighbours of a cluster.
//! [`tcp_proxy`] is a network that fails, [`hostile_target`] a target that cannot be trusted, and [`chaos`] plays faults of every kind
//! to a whole fleet; the program `chaos` prints what they did.
//! [`untrusted`] reads foreign bytes wherever the programs do, for the fuzzer in `fuzz/` and for the gate.
//! [`acceptance`] and [`tree_shapes`] measure instead of judging; the program `acceptance-table` prints them.
//!
//! The tests themselves are in `tests/`, one file a promise. Nothing here is ever shipped.

#![forbid(unsafe_code)]

pub mod acceptance;
pub mod authority;
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
pub mod node;
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
