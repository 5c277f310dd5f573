//! The target worker: verifies drafts in one forward pass over all their rows, and draws every committed
//! token itself.
//!
//! [`verify`] contains the role's logic; [`nodes`] connects processes that share a model. Everything else is
//! in the `worker` crate.

#![forbid(unsafe_code)]

pub mod config;
pub mod nodes;
pub mod verify;

use service::discovery::{self, Discovery};
use service::health::Health;
use service::shutdown::Lifetime;
use speculation::Role;
use worker::config::WorkerConfig;
use worker::serve::{Addresses, load, start};

use crate::config::TargetConfig;

/// Loads the model and serves it, or follows the node that does; everything that it starts runs under
/// `lifetime`.
pub async fn serve(config: TargetConfig, lifetime: Lifetime, health: Health) -> anyhow::Result<()> {
    let TargetConfig { worker, nodes } = config;
    if let Some(nodes) = nodes.clone().filter(|nodes| nodes.node > 0) {
        return nodes::follow((worker, nodes), lifetime, health).await;
    }
    let discovery = discovery::open(&worker.process.discovery, &lifetime).await?;
    match nodes {
        Some(nodes) => nodes::lead((worker, nodes), discovery.as_ref(), lifetime, health).await?,
        None => serve_with(worker, discovery.as_ref(), lifetime, health).await?,
    };
    Ok(())
}

/// Loads the model into this process alone and serves it, with an open discovery.
pub async fn serve_with(
    config: WorkerConfig,
    discovery: &dyn Discovery,
    lifetime: Lifetime,
    health: Health,
) -> anyhow::Result<Addresses> {
    if let Some(synthetic) = &config.synthetic {
        let loaded = worker::synthetic::load(&config, synthetic, Role::Target)?;
        return start(loaded, &config, discovery, &lifetime, &health).await;
    }
    let loading = config.clone();
    let loading = move || load(&loading, Role::Target, verify::Verify, None);
    let loaded = tokio::task::spawn_blocking(loading).await??;
    start(loaded, &config, discovery, &lifetime, &health).await
}
