//! The target worker: checks drafts in one forward pass over all their rows, and draws every committed token itself.
//!
//! [`verify`] is the role; the rest of the process is the `worker` crate's.

#![forbid(unsafe_code)]

pub mod config;
pub mod verify;

use service::discovery::{self, Discovery};
use service::health::Health;
use service::shutdown::Lifetime;
use speculation::Role;
use worker::config::WorkerConfig;
use worker::facts::WorkerFacts;
use worker::model::ModelMethod;
use worker::profile::profile;
use worker::serve::{Addresses, Loaded, load_engine, start};

/// Loads the model, then serves it; everything that is started runs under `lifetime`.
pub async fn serve(config: WorkerConfig, lifetime: Lifetime, health: Health) -> anyhow::Result<Addresses> {
    let discovery = discovery::open(&config.process.discovery, &lifetime).await?;
    serve_with(config, discovery.as_ref(), lifetime, health).await
}

/// The same, announced through a discovery that is open already.
pub async fn serve_with(
    config: WorkerConfig,
    discovery: &dyn Discovery,
    lifetime: Lifetime,
    health: Health,
) -> anyhow::Result<Addresses> {
    let loading = config.clone();
    let loaded = tokio::task::spawn_blocking(move || load(&loading)).await??;
    start(loaded, &config, discovery, &lifetime, &health).await
}

fn load(config: &WorkerConfig) -> anyhow::Result<Loaded<ModelMethod<verify::Verify>>> {
    let (mut engine, assets) = load_engine(config)?;
    let vocab_size = assets.token_list().num_ids();
    let info = engine.info().clone();
    let facts = WorkerFacts {
        worker_id: rand::random(),
        role: Role::Target,
        model_id: config.served_model_name.clone().unwrap_or(info.model_id),
        numerics_id: info.numerics_id,
        vocab_size,
        max_model_len: info.max_model_len,
        eos_token_ids: info.eos_token_ids,
        kv_blocks: info.kv_blocks,
        kv_block_size: info.kv_block_size,
        task_types: Vec::new(),
        step_times: if config.profile_steps { profile(&mut engine) } else { Vec::new() },
    };
    let method = ModelMethod::new(engine, Role::Target, vocab_size, config.max_batch_rows, verify::Verify);
    Ok(Loaded { method, facts, assets: Some(assets) })
}
