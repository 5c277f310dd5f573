//! The rules that decide when and where work runs: which worker serves a sequence, how far a round drafts, what shares a
//! forward. They are pure, as those of `speculation` are, and cannot change a token: every one of them may be wrong and
//! the text stays the target's own.
//!
//! Reading order: how far to draft ([`agreement`], [`acceptance_by_position`], [`lookup_rates`], [`cost`], [`drafted_ahead`],
//! [`draft_length`]), when decode steps leave
//! the router ([`decode_delay`]), how long to wait for a draft worker ([`draft_health`]), whether to rely on a target
//! ([`target_health`]). Who goes where and when, before all that: [`placement`], [`fair_queue`], [`replay_budget`], [`output_length`]; what goes
//! through a worker together: [`mod@batch`], [`batch_former`]. What targets could do beyond what they do, for gateways: [`headroom`]; how many
//! workers all that takes: [`pool_size`]. How a new draft is tried beside the one that serves ([`draft_score`], [`cluster_mean`], [`rollout`]). What a pool of workers is like comes from a file
//! ([`profile`]).

#![forbid(unsafe_code)]

pub mod acceptance_by_position;
pub mod agreement;
pub mod batch;
pub mod batch_former;
pub mod cluster_mean;
pub mod cost;
pub mod decode_delay;
pub mod draft_health;
pub mod draft_length;
pub mod draft_score;
pub mod drafted_ahead;
pub mod fair_queue;
pub mod headroom;
pub mod lookup_rates;
mod memory;
pub mod output_length;
pub mod placement;
pub mod pool_size;
pub mod profile;
pub mod prompt_time;
pub mod replay_budget;
pub mod rollout;
pub mod scheduler;
pub mod target_health;
#[cfg(test)]
mod testdata;
pub mod tree_size;
pub mod waits;
