//! Rules that decide when and where work runs: which worker serves a sequence, how many tokens a round
//! drafts, which steps share a forward. Like the rules of `speculation` they are pure. They cannot change a
//! token: if any of them is wrong, the text is still the target's.
//!
//! Reading order: draft length ([`agreement`], [`acceptance_by_position`], [`lookup_rates`], [`cost`],
//! [`drafted_ahead`], [`draft_length`]); when decode steps leave the router ([`decode_delay`]); how long to
//! wait for a draft worker ([`draft_health`]); health of targets ([`target_health`]). Before all that,
//! admission and placement: [`placement`], [`fair_queue`], [`replay_budget`], [`output_length`]. Batches of a
//! worker: [`mod@batch`], [`batch_former`]. Spare throughput of targets, for gateways: [`headroom`]; number
//! of workers needed: [`pool_size`]. Trial of a new draft beside the serving one: [`draft_score`],
//! [`cluster_mean`], [`rollout`]. Description of a pool of workers in a file: [`profile`].

#![forbid(unsafe_code)]

pub mod acceptance_by_position;
pub mod agreement;
pub mod batch;
pub mod batch_former;
pub mod cluster_mean;
pub mod cost;
pub mod cpu_share;
pub mod decode_delay;
pub mod draft_health;
pub mod draft_length;
pub mod draft_score;
pub mod drafted_ahead;
pub mod fair_queue;
pub mod headroom;
pub mod lookup_rates;
pub mod output_length;
pub mod placement;
pub mod pool_size;
pub mod profile;
pub mod prompt_time;
pub mod replay_budget;
pub mod rollout;
pub mod scheduler;
mod smoothing;
pub mod target_health;
#[cfg(test)]
mod testdata;
pub mod tree_size;
pub mod wait_stats;
