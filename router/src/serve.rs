//! A router process: bind, own the sequences, follow the workers, open the doors.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use service::accept::Door;
use service::discovery::{self, Discovery};
use service::health::Health;
use service::metrics::Metrics;
use service::shutdown::Lifetime;
use tokio::net::TcpListener;
use tonic::transport::Server;

use crate::admission::Admission;
use crate::catalog::Catalog;
use crate::config::RouterConfig;
use crate::ingress::grpc::grpc_service;
use crate::ingress::http::http_app;
use crate::ingress::{AppState, Auth};
use crate::lane::owner::Owner;
use crate::lane::queues;
use crate::metrics::RouterMetrics;
use crate::tokenize::TokenizePool;
use crate::workers::connection::Caller;
use crate::workers::registry::{Registry, follow};

/// Where a router can be reached.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    /// OpenAI's API, health and metrics.
    pub http: SocketAddr,
    /// gRPC.
    pub grpc: SocketAddr,
}

/// Brings a router up; everything it starts runs under `lifetime`.
pub async fn serve(config: RouterConfig, lifetime: Lifetime, health: Health) -> anyhow::Result<Addresses> {
    let discovery = discovery::open(&config.process.discovery, &lifetime).await?;
    serve_with(config, discovery, lifetime, health).await
}

/// The same, with workers found through a discovery that is open already.
pub async fn serve_with(
    config: RouterConfig,
    discovery: Arc<dyn Discovery>,
    lifetime: Lifetime,
    health: Health,
) -> anyhow::Result<Addresses> {
    let auth = match &config.api_keys {
        Some(path) => Auth::from_file(path)?,
        None => Auth::default(),
    };
    let http = bind(config.http).await?;
    let grpc = bind(config.grpc).await?;
    let addresses = Addresses { http: http.local_addr()?, grpc: grpc.local_addr()? };

    let metrics_page = Metrics::new();
    let metrics = RouterMetrics::register(&metrics_page);
    let catalog = Catalog::default();
    let (rounds, worker_events, inbox) = queues();
    health.set_not_ready("no target worker is connected");
    let policy = Arc::new(config.rounds.policy.clone());
    let owner = Owner::new(config.rounds, metrics.clone(), health.clone());
    lifetime.spawn("rounds", owner.run(inbox, lifetime.clone()));
    let caller = Caller { router_id: rand::random(), tls: config.worker_tls };
    let registry = Arc::new(Registry::new(caller, catalog.clone(), worker_events));
    lifetime.spawn("registry", follow(registry, discovery.watch().await?, lifetime.clone()));

    let state = AppState {
        lanes: Arc::new(rounds),
        catalog,
        admission: Admission::new(config.admission),
        auth,
        health: health.clone(),
        metrics_page,
        policy,
        tokenize: TokenizePool::start(config.tokenize_threads, &lifetime, metrics.tokenize_queue())?,
        metrics,
        lifetime: lifetime.clone(),
    };
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
        .build_v1()
        .context("the descriptors of our own protos are broken")?;
    let server = Server::builder()
        .add_service(health.grpc_service(&["outrider.v1.Inference"], &lifetime).await)
        .add_service(reflection)
        .add_service(grpc_service(state.clone()));
    Door::new(grpc, config.tls.clone()).serve_grpc("grpc", server, &lifetime);
    Door::new(http, config.tls).serve_http("http", http_app(state), &lifetime)?;
    tracing::info!(http = %addresses.http, grpc = %addresses.grpc, "listening");
    Ok(addresses)
}

async fn bind(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}
