//! The synthetic engine: a worker that computes nothing and simulates the step times of a profile. It uses
//! the same protocol, service, table and device thread as a model's worker, so that a router with a thousand
//! sequences, or pools of GPUs, can be studied on a laptop. The router cannot tell the difference and reads
//! no profile.
//!
//! [`executor`] simulates the times and draws the tokens ([`scheduling::profile::text`]), [`vocabulary`]
//! generates the tokenizer that routers fetch, [`wire`] simulates the network. Times obtained here are
//! simulated and must never be called measured.

pub mod executor;
pub mod vocabulary;
pub mod wire;

use std::sync::Arc;
use std::time::Duration;

use scheduling::cost::StepTimePoint;
use scheduling::profile::Profile;
use speculation::Role;

use crate::config::{SyntheticConfig, WorkerConfig};
use crate::facts::WorkerFacts;
use crate::serve::LoadedWorker;

pub use executor::SyntheticExecutor;

/// Id 0 of a generated vocabulary is the end-of-text token.
const END_OF_TEXT: u32 = 0;

/// Loads a synthetic worker of a role.
pub fn load(
    config: &WorkerConfig,
    synthetic: &SyntheticConfig,
    role: Role,
) -> anyhow::Result<LoadedWorker<SyntheticExecutor>> {
    let profile = &synthetic.profile;
    let pool = profile.pool(role);
    let max_model_len = config.max_model_len.unwrap_or(u32::MAX).min(profile.max_model_len);
    let scaled = |point: StepTimePoint| StepTimePoint {
        micros: (point.micros as f64 * synthetic.time_scale) as u64,
        ..point
    };
    let step_times = if config.profile_steps { pool.curve.profiled() } else { Vec::new() };
    let facts = WorkerFacts {
        worker_id: rand::random(),
        role,
        model_id: config.served_model_name.clone().unwrap_or_else(|| "synthetic".to_owned()),
        // Tokens depend only on the vocabulary size, not on the profile's times.
        numerics_id: format!("synthetic-1-{}", profile.vocab_size),
        vocab_size: profile.vocab_size,
        max_model_len,
        eos_token_ids: vec![END_OF_TEXT],
        kv_blocks: pool.kv_blocks,
        kv_block_size: pool.kv_block_size,
        max_tree_tokens: 0,
        task_types: Vec::new(),
        is_shadow: false,
        ballast_parameters: 0,
        step_times: step_times.into_iter().map(scaled).collect(),
        // In a profile's curve a batch's KV costs what that of one sequence does.
        batch_times: Vec::new(),
        cpu: None,
    };
    tracing::info!(
        profile = profile.name,
        role = role.as_str(),
        device = pool.device,
        time_scale = synthetic.time_scale,
        "synthetic engine: simulates the step times of a profile and computes nothing"
    );
    let assets = vocabulary::assets(profile.vocab_size)?;
    let executor = SyntheticExecutor::new(Arc::clone(profile), role, (max_model_len, synthetic.time_scale));
    let round_trip = round_trip(profile, synthetic.time_scale);
    Ok(LoadedWorker { round_trip, ..LoadedWorker::new(executor, facts, Some(assets)) })
}

/// Simulated round-trip time of messages.
fn round_trip(profile: &Profile, time_scale: f64) -> Duration {
    Duration::from_secs_f64(2.0 * profile.wire_us * time_scale / 1e6)
}
