//! End-to-end tests on real processes, and tests of the repository's documents and sources. One binary:
//! linking one for each file takes longer than running most of them.

mod bad_input;
mod chaos;
mod check_pair;
mod client_gone;
mod clients;
mod conversations;
mod distill;
mod documents;
mod draft_ahead;
mod drain;
mod etcd_cluster;
mod failover;
mod faulty_wire;
mod foreign_tokenizer;
mod handshake;
mod hostile_draft;
mod lanes;
mod loading_errors;
mod lookup;
mod lossless;
mod openai_client;
mod rollout;
mod room;
mod sick_targets;
mod slow_requests;
mod speculation_is_real;
mod stalled_draft;
mod structured_output;
mod synthetic;
mod tidy;
mod tls;
mod traces;
mod trees;
mod untrusted;
mod up;
