//! The draft worker: proposes the next k tokens, with a small model or from the sequence itself.
//!
//! [`propose`] and [`mod@ngram`] are the two methods, [`translated`] is the first one for a target with a
//! different tokenizer. Everything else is in the `worker` crate.

#![forbid(unsafe_code)]

pub mod config;
pub mod ngram;
pub mod propose;
pub mod translated;

use service::discovery::{self, Discovery};
use service::health::Health;
use service::shutdown::Lifetime;
use speculation::Role;
use worker::executor::StepExecutor;
use worker::facts::WorkerFacts;
use worker::serve::{Addresses, LoadedWorker, load, start};

use config::{DraftConfig, DraftMethod};

/// Loads what the draft method needs and serves it; everything that it starts runs under `lifetime`.
pub async fn serve(config: DraftConfig, lifetime: Lifetime, health: Health) -> anyhow::Result<Addresses> {
    let discovery = discovery::open(&config.worker.process.discovery, &lifetime).await?;
    serve_with(config, discovery.as_ref(), lifetime, health).await
}

/// Like [`serve`], with an open discovery.
pub async fn serve_with(
    config: DraftConfig,
    discovery: &dyn Discovery,
    lifetime: Lifetime,
    health: Health,
) -> anyhow::Result<Addresses> {
    if let Some(synthetic) = &config.worker.synthetic {
        let loaded = worker::synthetic::load(&config.worker, synthetic, Role::Draft)?;
        return start_model(loaded, config, (discovery, &lifetime, &health)).await;
    }
    let worker = config.worker.clone();
    let role_logic = propose::Propose { keeps_candidates: config.draft_ahead > 0 };
    match (config.method, config.target_tokenizer.clone()) {
        (DraftMethod::Model, None) => {
            let loaded = load_blocking(move || load(&worker, Role::Draft, role_logic, None)).await?;
            start_model(loaded, config, (discovery, &lifetime, &health)).await
        }
        (DraftMethod::Model, Some(tokenizer)) => {
            let loaded = load_blocking(move || translated::load(&worker, &tokenizer, role_logic)).await?;
            start_model(loaded, config, (discovery, &lifetime, &health)).await
        }
        (DraftMethod::Ngram, _) => start(ngram(&config), &config.worker, discovery, &lifetime, &health).await,
    }
}

/// Loads on a thread that may block.
async fn load_blocking<M: StepExecutor>(
    load: impl FnOnce() -> anyhow::Result<LoadedWorker<M>> + Send + 'static,
) -> anyhow::Result<LoadedWorker<M>> {
    tokio::task::spawn_blocking(load).await?
}

/// Starts a worker that drafts with a model, real or simulated.
async fn start_model<M: StepExecutor>(
    mut loaded: LoadedWorker<M>,
    config: DraftConfig,
    (discovery, lifetime, health): (&dyn Discovery, &Lifetime, &Health),
) -> anyhow::Result<Addresses> {
    (loaded.facts.task_types, loaded.facts.is_shadow) = (config.task_types, config.is_shadow);
    loaded.draft_ahead = config.draft_ahead;
    Box::pin(start(loaded, &config.worker, discovery, lifetime, health)).await
}

/// A worker without a model accepts any ids, any length and any tokenizer.
fn ngram(config: &DraftConfig) -> LoadedWorker<ngram::NgramExecutor> {
    let facts = WorkerFacts {
        worker_id: rand::random(),
        role: Role::Draft,
        model_id: "ngram".to_owned(),
        numerics_id: String::new(),
        vocab_size: 0,
        max_model_len: u32::MAX,
        eos_token_ids: Vec::new(),
        kv_blocks: 0,
        kv_block_size: 0,
        max_tree_tokens: 0,
        task_types: config.task_types.clone(),
        is_shadow: config.is_shadow,
        ballast_parameters: 0,
        step_times: Vec::new(),
        batch_times: Vec::new(),
        cpu: None,
    };
    LoadedWorker::new(ngram::NgramExecutor::default(), facts, None)
}
