//! The target worker: verifies drafts in one forward pass over all their rows, and draws every committed
//! token itself.
//!
//! [`verify`] contains the role's logic; everything else is in the `worker` crate.

#![forbid(unsafe_code)]

pub mod config;
pub mod verify;

use service::discovery::{self, Discovery};
use service::health::Health;
use service::shutdown::Lifetime;
use speculation::Role;
use worker::config::WorkerConfig;
use worker::serve::{Addresses, load, start};

/// Loads the model and serves it; everything that it starts runs under `lifetime`.
pub async fn serve(config: WorkerConfig, lifetime: Lifetime, health: Health) -> anyhow::Result<Addresses> {
    let discovery = discovery::open(&config.process.discovery, &lifetime).await?;
    serve_with(config, discovery.as_ref(), lifetime, health).await
}

/// Like [`serve`], with an open discovery.
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
