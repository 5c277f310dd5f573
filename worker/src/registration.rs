//! Registers the worker and its facts with discovery.

use std::net::SocketAddr;

use service::discovery::{Discovery, Member};
use service::metrics::Gauge;
use service::shutdown::Lifetime;
use tokio::sync::watch;

use crate::assets::Assets;
use crate::config::WorkerConfig;
use crate::facts::WorkerFacts;

/// Registers the worker until it drains, and shows in `registered` whether discovery lists it.
pub(crate) async fn register(
    member: Member,
    discovery: &dyn Discovery,
    registered: Gauge,
    lifetime: &Lifetime,
) -> anyhow::Result<()> {
    let registration = discovery.register(member).await?;
    let (draining, listed) = (lifetime.draining(), registration.listed());
    lifetime.spawn_essential("registration", async move {
        tokio::select! {
            biased;
            // The worker drains.
            () = draining => {}
            // Never ends.
            () = export_listed(listed, &registered) => {}
        }
        registration.leave().await;
        registered.set(0);
    });
    Ok(())
}

/// Copies each change of `listed` to the gauge.
async fn export_listed(mut listed: watch::Receiver<bool>, registered: &Gauge) {
    loop {
        registered.set(i64::from(*listed.borrow_and_update()));
        if listed.changed().await.is_err() {
            // The value will not change any more.
            return std::future::pending().await;
        }
    }
}

/// The worker's entry in discovery.
pub(crate) fn member(
    facts: &WorkerFacts,
    assets: Option<&Assets>,
    config: &WorkerConfig,
    listen: SocketAddr,
) -> Member {
    let hello = facts.hello(assets);
    Member {
        id: format!("{:016x}", facts.worker_id),
        role: facts.role.as_str().to_owned(),
        address: config.advertise.clone().unwrap_or_else(|| format!("{}://{listen}", config.scheme())),
        facts: serde_json::json!({
            "version": service::release::version(),
            "zone": config.zone,
            "model_id": hello.model_id,
            "numerics_id": hello.numerics_id,
            "vocab_size": hello.vocab_size,
            "tokenizer_fingerprint": hello.tokenizer_fingerprint,
            "sampling_scheme": hello.sampling_scheme,
            "protocol_versions": [hello.protocol_version_min, hello.protocol_version_max],
            "max_draft_tokens": hello.max_draft_tokens,
            "max_model_len": hello.max_model_len,
            "kv_blocks": hello.kv_blocks,
            "task_types": hello.task_types,
            "ballast_parameters": facts.ballast_parameters,
        }),
    }
}
