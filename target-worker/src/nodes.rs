//! A target whose model is spread over several nodes: processes of this program, usually one per host, each
//! with some of the model's ranks. Node 0 ([`lead`]) is a target like any other. The others ([`follow`])
//! connect to it before anything is loaded, execute its operations, and end with it.
//!
//! The engine drives the ranks ([`engine::Nodes`]); this module connects the processes: [`handshake`] and
//! [`join`] before they load, [`link`] for what the engine sends, [`pulse`] to notice that one is gone. A
//! lost node fails all of them, also while they load: routers move the target's sequences, and the processes
//! can start again.

pub mod config;
mod facts;
mod handshake;
mod join;
mod link;
mod pulse;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::{EngineError, Follower};
use service::accept::{Connections, bind};
use service::discovery::Discovery;
use service::health::{self, Health, State, serve_admin};
use service::metrics::Metrics;
use service::shutdown::Lifetime;
use speculation::Role;
use worker::config::WorkerConfig;
use worker::serve::{Addresses, load, load_follower, start};

use self::config::NodesConfig;
use self::join::{Joined, NodeEnd, Shared};
use self::pulse::End;
use crate::verify::Verify;

/// Loads and serves the model on all nodes, as node 0.
pub(crate) async fn lead(
    (config, nodes): (WorkerConfig, NodesConfig),
    discovery: &dyn Discovery,
    lifetime: Lifetime,
    health: Health,
) -> anyhow::Result<Addresses> {
    let shared = shared(&lifetime, &health);
    let Joined { nodes, ends } = join::gather(&nodes, facts::facts(&config, &nodes)?, &shared).await?;
    end_with(ends, &lifetime, &health);
    let loading = config.clone();
    let loading = move || load(&loading, Role::Target, Verify, Some(nodes));
    let starting = async {
        let loaded = tokio::task::spawn_blocking(loading).await??;
        start(loaded, &config, discovery, &lifetime, &health).await
    };
    let addresses = unless_failed(pin!(starting), &health).await?;
    shared.has_served.store(true, Ordering::Release);
    Ok(addresses)
}

/// Loads this node's ranks and executes the operations of node 0 until it ends. Serves health and metrics;
/// not ready, because routers send it nothing.
pub(crate) async fn follow(
    (config, nodes): (WorkerConfig, NodesConfig),
    lifetime: Lifetime,
    health: Health,
) -> anyhow::Result<()> {
    let metrics = Metrics::of_process();
    health.register(&metrics);
    let connections = Connections::new(config.listener, &metrics);
    let admin = bind(config.admin).await?;
    serve_admin(admin, health::router(health.clone(), metrics), &connections, &lifetime);
    health.set_not_ready(format!("node {} waits for node 0", nodes.node));
    let shared = shared(&lifetime, &health);
    let node = nodes.node;
    let Joined { nodes, ends } = join::join(&nodes, facts::facts(&config, &nodes)?, &shared).await?;
    health.set_not_ready(format!("node {node} loads"));
    end_with(ends, &lifetime, &health);
    let loading = tokio::task::spawn_blocking(move || load_follower(&config, nodes));
    let (follower, cores) = unless_failed(pin!(async { loading.await? }), &health).await?;
    health.set_not_ready(format!("node {node} follows node 0, which serves"));
    tracing::info!(kv_blocks = follower.info().kv_blocks, "node {node} follows node 0");
    run(follower, cores, &lifetime, &health)
}

fn shared(lifetime: &Lifetime, health: &Health) -> Shared {
    let (lifetime, health) = (lifetime.clone(), health.clone());
    Shared { lifetime, health, has_served: Arc::new(AtomicBool::new(false)) }
}

/// Waits for this node's start, unless the process fails before, as it does when another node is lost
/// ([`end_with`]): a thread that loads weights or waits for a third node would not notice. That thread ends
/// with the process. The other nodes are told the reason of a failure ([`pulse`]).
async fn unless_failed<T>(
    starting: impl Future<Output = anyhow::Result<T>>,
    health: &Health,
) -> anyhow::Result<T> {
    let mut state = health.subscribe();
    let failed = async {
        let failed = state.wait_for(|state| matches!(state, State::Failed(_))).await;
        failed.map(|state| state.reason().unwrap_or_default().to_owned())
    };
    let started = tokio::select! {
        biased;
        // Its own error says more.
        started = starting => started,
        reason = failed => Err(anyhow::Error::msg(reason?)),
    };
    started.inspect_err(|error| health.set_failed(format!("{error:#}")))
}

/// Ends this process with the others: as after a signal if they have finished their work, else as failed.
fn end_with(mut ends: tokio::sync::mpsc::Receiver<NodeEnd>, lifetime: &Lifetime, health: &Health) {
    let (own, health) = (lifetime.clone(), health.clone());
    lifetime.spawn_essential("nodes", async move {
        let cancelled = own.cancelled();
        tokio::select! {
            biased;
            Some((node, _, end)) = ends.recv() => match end {
                End::Ended => own.request_stop(format!("node {node} has ended")),
                End::Lost(reason) => health.set_failed(format!("node {node} is lost: {reason}")),
                End::Stopping => {}
            },
            () = cancelled => {}
        }
    });
}

/// Runs a follower on a thread of its own. A drain waits for it, so that this node does not end before node
/// 0.
fn run(
    mut follower: Follower,
    cores: Option<Vec<usize>>,
    lifetime: &Lifetime,
    health: &Health,
) -> anyhow::Result<()> {
    let (work, health) = (lifetime.work("node 0"), health.clone());
    lifetime.spawn_essential_thread("device", move || {
        let _work = work;
        if let Some(Err(error)) = cores.map(|cores| follower.pin_threads(&cores)) {
            tracing::warn!(%error, "cannot pin the compute threads: they run unpinned");
        }
        match follower.run() {
            // The pulse knows whether node 0 is lost or has finished.
            EngineError::NodeFailed { node: 0, reason } => {
                tracing::info!(reason, "node 0 asks for nothing more")
            }
            error => health.set_failed(error.to_string()),
        }
    })?;
    Ok(())
}
