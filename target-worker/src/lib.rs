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
use worker::serve::{Addresses, load, start};

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
    if let Some(synthetic) = &config.synthetic {
        let loaded = worker::synthetic::load(&config, synthetic, Role::Target)?;
        return start(loaded, &config, discovery, &lifetime, &health).await;
    }
    let loading = config.clone();
    let loading = move || load(&loading, Role::Target, verify::Verify);
    let loaded = tokio::task::spawn_blocking(loading).await??;
    start(loaded, &config, discovery, &lifetime, &health).await
}
