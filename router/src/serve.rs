//! A router process: bind, schedule, follow the workers, serve the APIs.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use service::accept::{Connections, Listener, bind};
use service::discovery::{self, Discovery};
use service::health::{Health, serve_admin};
use service::metrics::{Gauge, Metrics};
use service::polled_file::POLL_INTERVAL;
use service::shutdown::Lifetime;
use service::tls::{PresentedCertificates, ServerTls};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::service::Routes;

use crate::admission::Admission;
use crate::api::admin::read_only;
use crate::api::allowed_hosts::{AllowedHosts, check_host};
use crate::api::cors::allow_origins;
use crate::api::grpc::grpc_service;
use crate::api::grpc_key::require_key;
use crate::api::http::{admin_app, http_app};
use crate::api::openai::respond::KEEP_ALIVE;
use crate::api::vllm_grpc::vllm_grpc_service;
use crate::catalog::Catalog;
use crate::config::{RequestLogConfig, RouterConfig};
use crate::console::console_app;
use crate::console::pair::PairCheck;
use crate::metrics::RouterMetrics;
use crate::pipeline::AppState;
use crate::pipeline::body_memory::BodyMemory;
use crate::pipeline::buffer_memory::BufferMemory;
use crate::pipeline::response_store::ResponseStore;
use crate::request::Auth;
use crate::request_log::RequestLog;
use crate::scheduler::driver::{Driver, NO_TARGET};
use crate::scheduler::timelines::Timelines;
use crate::scheduler::{pool_gauges, queues};
use crate::tokenize::TokenizePool;
use crate::workers::connection::RouterIdentity;
use crate::workers::registry::Registry;
use crate::workers::{Membership, follow};

/// Number of threads reserved for the scheduler's driver.
pub const SCHEDULER_THREADS: usize = 1;

/// Services known to gRPC's health service.
const GRPC_SERVICES: [&str; 2] = ["outrider.v1.Inference", "vllm.grpc.engine.VllmEngine"];

/// Why a router is not ready before it first reads discovery.
const DISCOVERY_UNREAD: &str = "the list of workers was never read: discovery does not answer, or refuses this \
                                router (see its log)";

/// Addresses that a router listens on.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    /// HTTP APIs.
    pub http: SocketAddr,
    /// gRPC APIs.
    pub grpc: SocketAddr,
    /// Health, metrics, console and the state of the lanes.
    pub admin: SocketAddr,
}

/// Starts a router; all its tasks run under `lifetime`.
pub async fn serve(config: RouterConfig, lifetime: Lifetime, health: Health) -> anyhow::Result<Addresses> {
    let discovery = discovery::open(&config.process.discovery, &lifetime).await?;
    serve_with(config, discovery, lifetime, health).await
}

/// Like [`serve`], with an already open discovery.
pub async fn serve_with(
    config: RouterConfig,
    discovery: Arc<dyn Discovery>,
    lifetime: Lifetime,
    health: Health,
) -> anyhow::Result<Addresses> {
    let auth = match &config.api_keys {
        Some(path) => Auth::watch_file(path.clone(), POLL_INTERVAL, &lifetime)?,
        None => Auth::default(),
    };
    let sockets = Sockets::bind(&config).await?;
    let addresses = sockets.addresses()?;

    let metrics_page = Metrics::of_process();
    health.register(&metrics_page);
    let connections = Connections::new(config.listener, &metrics_page);
    presented_certificates(&config).register(&metrics_page);
    let metrics = RouterMetrics::register(&metrics_page);
    let catalog = Catalog::new(config.models);
    let (scheduler, worker_events, inbox) = queues();
    health.set_not_ready(DISCOVERY_UNREAD);
    let policy = Arc::new(config.scheduler.policy.clone());
    let timelines = Timelines::default();
    let driver = Driver::new(config.scheduler, metrics.clone(), health.clone(), timelines.clone());
    let identity = RouterIdentity { router_id: rand::random(), tls: config.worker_tls };
    let registry = Arc::new(Registry::new(identity, catalog.clone(), worker_events));
    keep_showing_discovery(discovery.watched(), &metrics, &health, &lifetime);
    let task_lifetime = lifetime.clone();
    let membership = Membership { members: discovery.watch().await?, unlisted: discovery.unlisted() };
    start_scheduler(&lifetime, async move {
        let driver = driver.run(inbox, task_lifetime.clone());
        let driver = task_lifetime.spawn_essential("scheduler", driver);
        let registry = follow(registry, membership, task_lifetime.clone());
        let registry = task_lifetime.spawn_essential("registry", registry);
        // A panic of either ends the process. Until then the runtime runs the other one.
        drop(tokio::join!(driver, registry));
    })?;

    let gauges = pool_gauges::run(scheduler.clone(), metrics.clone());
    lifetime.spawn("pool gauges", lifetime.until_cancelled(gauges));

    let state = AppState {
        generation: Arc::new(scheduler),
        catalog,
        admission: Admission::new(config.admission),
        auth,
        health,
        metrics_page,
        policy,
        objectives: Arc::new(config.objectives),
        tokenize: TokenizePool::start(config.tokenize_threads, &lifetime, metrics.tokenize_queue())?,
        request_log: start_request_log(config.request_log, &lifetime, &metrics)?,
        access_log: config.access_log,
        metrics,
        keep_alive: KEEP_ALIVE,
        response_memory: BufferMemory::default(),
        body_memory: BodyMemory::default(),
        responses: ResponseStore::default(),
        lifetime,
    };
    let pair = PairCheck::new(config.pair_check, state.lifetime.clone());
    let admin = admin_app(state.clone()).merge(console_app(state.clone(), timelines, pair));
    let admin = protected(admin, addresses.admin, &state.auth);
    let hosts = allowed_hosts(&config.tls, addresses.http, &state.auth);
    let http = allow_origins(http_app(state.clone(), hosts), &config.allowed_origins);
    sockets.serve(state, Apps { http, admin }, config.tls, &connections).await?;
    tracing::info!(http = %addresses.http, grpc = %addresses.grpc, admin = %addresses.admin, "listening");
    Ok(addresses)
}

/// Sets the gauge. After the first read, `DISCOVERY_UNREAD` is no longer the reason for not being ready.
fn show_discovery(is_watched: bool, gauge: &Gauge, health: &Health) {
    gauge.set(i64::from(is_watched));
    if is_watched {
        health.replace_reason(DISCOVERY_UNREAD, NO_TARGET);
    }
}

/// Calls [`show_discovery`] now and after each change.
fn keep_showing_discovery(
    mut watched: watch::Receiver<bool>,
    metrics: &RouterMetrics,
    health: &Health,
    lifetime: &Lifetime,
) {
    let (gauge, health) = (metrics.discovery_watched(), health.clone());
    show_discovery(*watched.borrow_and_update(), &gauge, &health);
    let changes = async move {
        // Ends if the value cannot change any more.
        while watched.changed().await.is_ok() {
            show_discovery(*watched.borrow_and_update(), &gauge, &health);
        }
    };
    lifetime.spawn("discovery state", lifetime.until_cancelled(changes));
}

/// Names by which browsers may reach the HTTP API.
fn allowed_hosts(tls: &Option<ServerTls>, address: SocketAddr, auth: &Auth) -> AllowedHosts {
    match tls {
        None => AllowedHosts::at(address, auth),
        // A foreign host fails in the browser: the certificate is for another name.
        Some(_) => AllowedHosts::Any,
    }
}

fn presented_certificates(config: &RouterConfig) -> PresentedCertificates<'_> {
    PresentedCertificates {
        listener: config.tls.as_ref(),
        worker: config.worker_tls.as_ref().map(|tls| &tls.draft),
        discovery: config.process.discovery.tls.as_ref(),
    }
}

fn start_request_log(
    config: Option<RequestLogConfig>,
    lifetime: &Lifetime,
    metrics: &RouterMetrics,
) -> anyhow::Result<Option<RequestLog>> {
    let Some(RequestLogConfig { path, bytes_max }) = config else { return Ok(None) };
    let log = RequestLog::start(&path, bytes_max, lifetime, metrics.request_log());
    log.map(Some).with_context(|| format!("cannot write the request log {}", path.display()))
}

/// Protects the admin app. It gives orders, and its console starts generations, so, as for the clients'
/// address, both require a key if others can reach it.
fn protected(admin: axum::Router, address: SocketAddr, auth: &Auth) -> axum::Router {
    let takes_orders = !auth.is_open() || address.ip().is_loopback();
    let admin = if takes_orders { admin } else { read_only(admin) };
    check_host(admin, AllowedHosts::at(address, auth))
}

/// What a router serves over HTTP.
struct Apps {
    http: axum::Router,
    admin: axum::Router,
}

/// Listening sockets of a router.
struct Sockets {
    http: TcpListener,
    grpc: TcpListener,
    admin: TcpListener,
}

impl Sockets {
    async fn bind(config: &RouterConfig) -> anyhow::Result<Self> {
        Ok(Self {
            http: bind(config.http).await?,
            grpc: bind(config.grpc).await?,
            admin: bind(config.admin).await?,
        })
    }

    fn addresses(&self) -> anyhow::Result<Addresses> {
        let Self { http, grpc, admin } = self;
        Ok(Addresses { http: http.local_addr()?, grpc: grpc.local_addr()?, admin: admin.local_addr()? })
    }

    async fn serve(
        self,
        state: AppState,
        apps: Apps,
        tls: Option<ServerTls>,
        connections: &Connections,
    ) -> anyhow::Result<()> {
        let lifetime = state.lifetime.clone();
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .build_v1()
            .context("the embedded proto descriptors are invalid")?;
        let services = Routes::new(state.health.grpc_service(&GRPC_SERVICES, &lifetime).await)
            .add_service(reflection)
            .add_service(grpc_service(state.clone()))
            .add_service(vllm_grpc_service(state.clone()));
        let services = require_key(state.clone(), services);
        Listener::new(self.grpc, tls.clone(), connections).serve_grpc("grpc", services, &lifetime);
        serve_admin(self.admin, apps.admin, connections, &lifetime);
        Listener::new(self.http, tls, connections).serve_http("http", apps.http, &lifetime);
        Ok(())
    }
}

/// Runs the scheduler's driver and the streams to the workers on their own thread, so that no step waits for
/// another thread between a worker's frame and the reply, however many clients are written to.
fn start_scheduler(
    lifetime: &Lifetime,
    driver: impl Future<Output = ()> + Send + 'static,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the scheduler's runtime")?;
    lifetime.spawn_essential_thread("scheduler", move || runtime.block_on(driver))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use service::config::{Faults, RawConfig as _};
    use service::shutdown::ShutdownOutcome;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;
    use crate::config::RawRouter;

    /// Sends a request without a body and returns the first twelve bytes of the response.
    async fn status(address: SocketAddr, (method, path): (&str, &str), host: &str) -> String {
        let mut connection = TcpStream::connect(address).await.unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        connection.write_all(head.as_bytes()).await.unwrap();
        let mut response = String::new();
        connection.read_to_string(&mut response).await.unwrap();
        response.chars().take(12).collect()
    }

    #[tokio::test]
    async fn a_router_without_keys_refuses_foreign_hosts() {
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        let config = RawRouter::default().validate(&mut Faults::new()).unwrap();
        let config = RouterConfig { http: any_port, grpc: any_port, admin: any_port, ..config };
        let lifetime = Lifetime::new();
        let addresses = Box::pin(serve(config, lifetime.clone(), Health::new())).await.unwrap();
        for (address, path) in
            [(addresses.http, "/v1/models"), (addresses.admin, "/debug/lanes"), (addresses.admin, "/")]
        {
            for (host, expected) in [("evil.example", "HTTP/1.1 421"), ("localhost:8002", "HTTP/1.1 200")] {
                assert_eq!(status(address, ("GET", path), host).await, expected, "{path} at {host}");
            }
        }
        assert_eq!(lifetime.shut_down(Duration::from_secs(10)).await, ShutdownOutcome::Clean);
    }

    #[test]
    fn a_router_says_that_it_never_read_discovery_until_it_did() {
        let (gauge, health) = (Gauge::default(), Health::new());
        health.set_not_ready(DISCOVERY_UNREAD);
        show_discovery(false, &gauge, &health);
        assert_eq!((gauge.get(), health.state().reason()), (0, Some(DISCOVERY_UNREAD)));
        show_discovery(true, &gauge, &health);
        assert_eq!((gauge.get(), health.state().reason()), (1, Some(NO_TARGET)));
        health.set_ready();
        for is_watched in [false, true] {
            show_discovery(is_watched, &gauge, &health);
            assert_eq!((gauge.get(), health.is_ready()), (i64::from(is_watched), true));
        }
    }

    #[tokio::test]
    async fn without_keys_orders_are_taken_at_loopback_only() {
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        for (ip, expected) in [([127, 0, 0, 1], "HTTP/1.1 404"), ([0, 0, 0, 0], "HTTP/1.1 400")] {
            let config = RawRouter::default().validate(&mut Faults::new()).unwrap();
            let admin = SocketAddr::from((ip, 0));
            let config = RouterConfig { http: any_port, grpc: any_port, admin, ..config };
            let lifetime = Lifetime::new();
            let addresses = Box::pin(serve(config, lifetime.clone(), Health::new())).await.unwrap();
            let admin = SocketAddr::from(([127, 0, 0, 1], addresses.admin.port()));
            // The worker is unknown.
            let order = ("POST", "/admin/workers/10.0.0.7:8110/drain");
            assert_eq!(status(admin, order, "localhost").await, expected, "{ip:?}");
            assert_eq!(status(admin, ("GET", "/debug/lanes"), "localhost").await, "HTTP/1.1 200", "{ip:?}");
            assert_eq!(lifetime.shut_down(Duration::from_secs(10)).await, ShutdownOutcome::Clean);
        }
    }
}
