//! Rules that decide when and where work runs: which worker serves a sequence, how many tokens a round
//! drafts, which steps share a forward. Like the rules of `speculation` they are pure. They cannot change a
//! token: if any of them is wrong, the text is still the target's.
//!
//! Begin with the two state machines that apply the rules: [`scheduler`] in a router, [`batch_former`] in a
//! worker. The other modules are rules that know neither, here in the order in which a sequence meets them:
//!
//! - Waiting for a target and its choice: [`fair_queue`], [`replay_budget`], [`output_length`],
//!   [`placement`], [`target_health`], [`wait_stats`].
//! - The draft length of a round: [`draft_length`], from [`acceptance_by_position`], [`agreement`], [`cost`],
//!   [`prompt_time`], [`drafted_ahead`], [`cpu_share`], [`tree_size`] and [`lookup_rates`].
//! - When its steps leave: [`draft_health`] for a draft, [`decode_delay`] for decode steps.
//! - The forwards of a worker: [`mod@batch`].
//! - Trial of a new draft beside the serving one: [`rollout`], [`draft_score`], [`cluster_mean`].
//! - Numbers for gateways and autoscalers: [`headroom`], [`pool_size`].
//!
//! [`profile`] describes a pool of workers in a file, for simulations and synthetic workers.

#![forbid(unsafe_code)]

pub mod acceptance_by_position;
mod agreement;
pub mod batch;
pub mod batch_former;
pub mod cluster_mean;
pub mod cost;
pub mod cpu_share;
mod decode_delay;
pub mod draft_health;
pub mod draft_length;
pub mod draft_score;
pub mod drafted_ahead;
pub mod fair_queue;
mod headroom;
pub mod lookup_rates;
mod output_length;
mod placement;
pub mod pool_size;
pub mod profile;
pub mod prompt_time;
mod replay_budget;
pub mod rollout;
pub mod scheduler;
mod smoothing;
pub mod target_health;
#[cfg(test)]
mod testdata;
mod tree_size;
pub mod wait_stats;
