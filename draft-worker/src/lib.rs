//! The draft worker: guesses the next k tokens, by a small model or from the sequence itself.
//!
//! [`propose`] and [`mod@ngram`] are the two methods; the rest of the process is the `worker` crate's.

#![forbid(unsafe_code)]

pub mod config;
pub mod ngram;
pub mod propose;

use service::discovery::{self, Discovery};
use service::health::Health;
use service::shutdown::Lifetime;
use speculation::Role;
use worker::config::WorkerConfig;
use worker::facts::WorkerFacts;
use worker::model::ModelMethod;
use worker::profile::profile;
use worker::serve::{Addresses, Loaded, load_engine, start};

use config::{DraftConfig, DraftMethod};

/// Loads what the method needs, then serves it; everything that is started runs under `lifetime`.
pub async fn serve(config: DraftConfig, lifetime: Lifetime, health: Health) -> anyhow::Result<Addresses> {
    let discovery = discovery::open(&config.worker.process.discovery, &lifetime).await?;
    serve_with(config, discovery.as_ref(), lifetime, health).await
}

/// The same, announced through a discovery that is open already.
pub async fn serve_with(
    config: DraftConfig,
    discovery: &dyn Discovery,
    lifetime: Lifetime,
    health: Health,
) -> anyhow::Result<Addresses> {
    match config.method {
        DraftMethod::Model => {
            let loading = config.clone();
            let loaded = tokio::task::spawn_blocking(move || load_model(&loading)).await??;
            start(loaded, &config.worker, discovery, &lifetime, &health).await
        }
        DraftMethod::Ngram => start(ngram(&config), &config.worker, discovery, &lifetime, &health).await,
    }
}

fn load_model(config: &DraftConfig) -> anyhow::Result<Loaded<ModelMethod<propose::Propose>>> {
    let (mut engine, assets) = load_engine(&config.worker)?;
    let vocab_size = assets.token_list().num_ids();
    let info = engine.info().clone();
    let facts = WorkerFacts {
        model_id: config.worker.served_model_name.clone().unwrap_or(info.model_id),
        numerics_id: info.numerics_id,
        vocab_size,
        max_model_len: info.max_model_len,
        eos_token_ids: info.eos_token_ids,
        kv_blocks: info.kv_blocks,
        kv_block_size: info.kv_block_size,
        step_times: if config.worker.profile_steps { profile(&mut engine) } else { Vec::new() },
        ..facts_without_model(config)
    };
    let WorkerConfig { max_batch_rows, .. } = config.worker;
    let method = ModelMethod::new(engine, Role::Draft, vocab_size, max_batch_rows, propose::Propose);
    Ok(Loaded { method, facts, assets: Some(assets) })
}

fn ngram(config: &DraftConfig) -> Loaded<ngram::Ngram> {
    Loaded { method: ngram::Ngram::default(), facts: facts_without_model(config), assets: None }
}

/// A worker without a model takes any ids and any length, and works beside any tokenizer.
fn facts_without_model(config: &DraftConfig) -> WorkerFacts {
    WorkerFacts {
        worker_id: rand::random(),
        role: Role::Draft,
        model_id: "ngram".to_owned(),
        numerics_id: String::new(),
        vocab_size: 0,
        max_model_len: u32::MAX,
        eos_token_ids: Vec::new(),
        kv_blocks: 0,
        kv_block_size: 0,
        task_types: config.task_types.clone(),
        step_times: Vec::new(),
    }
}
