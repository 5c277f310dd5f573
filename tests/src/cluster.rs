//! A cluster in this process: the real router and the real workers over loopback, on free ports, and fake
//! workers that speak the worker's wire protocol.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use draft_worker::config::{DraftConfig, DraftMethod};
use proto::v1::worker_server::Worker;
use router::config::{RawRouter, RouterConfig};
use service::config::{Faults, RawConfig as _};
use service::discovery::{self, DRAFT, Discovery, DiscoveryUri, Member, TARGET};
use service::health::Health;
use service::shutdown::{Lifetime, ShutdownOutcome};
use worker::config::{DefaultPorts, RawWorker, SyntheticConfig, WorkerConfig};

use crate::case::Case;
use crate::client::{Answer, Client};
use crate::fake_worker;
use crate::faulty_wire::{FaultyWire, FrameCounts, WireFaults};
use crate::lanes_report;
use crate::metrics::Page;
use crate::pair::{self, MODEL};
use crate::wait::until;

/// Number of outcomes for which [`WorkerKind::DraftAhead`] drafts ahead.
const DRAFT_AHEAD: usize = 9;

/// Time within which everything must stop.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// A router and the workers added to it.
pub struct Cluster {
    lifetime: Lifetime,
    discovery: Arc<dyn Discovery>,
    router: router::serve::Addresses,
    health: Health,
}

/// The kind of a real worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerKind {
    /// The bundled target.
    Target,
    /// The bundled draft.
    Draft,
    /// The bundled draft with draft-ahead.
    DraftAhead,
    /// N-grams of the sequence.
    Ngram,
    /// The bundled draft as a shadow draft.
    ShadowDraft,
    /// N-grams as a shadow draft.
    ShadowNgram,
    /// The target of deploy/profiles/cpu-pair.toml, which only reproduces step times.
    SyntheticTarget,
    /// The draft of the same profile.
    SyntheticDraft,
}

/// A worker of a cluster.
#[derive(Debug)]
pub struct RunningWorker {
    lifetime: Lifetime,
    admin: SocketAddr,
    listen: SocketAddr,
}

impl Cluster {
    /// Starts a router without workers; `change` may modify its configuration.
    pub async fn start(change: impl FnOnce(&mut RouterConfig)) -> anyhow::Result<Self> {
        let mut config = router_config()?;
        change(&mut config);
        let (lifetime, health) = (Lifetime::new(), Health::new());
        let discovery = discovery::open(&DiscoveryUri::Memory.into(), &lifetime).await?;
        let router =
            router::serve::serve_with(config, Arc::clone(&discovery), lifetime.clone(), health.clone())
                .await?;
        Ok(Self { lifetime, discovery, router, health })
    }

    /// Starts the bundled pair: one target, and one draft worker of that kind.
    pub async fn of_pair(draft: WorkerKind) -> anyhow::Result<(Self, RunningWorker, RunningWorker)> {
        let cluster = Self::start(|_| ()).await?;
        let target = cluster.add(WorkerKind::Target).await?;
        let draft = cluster.add(draft).await?;
        Ok((cluster, target, draft))
    }

    /// Waits until the router can serve: it is connected to a target and knows its model.
    pub async fn ready(&self) -> anyhow::Result<()> {
        until("the router is ready", async || Ok(self.health.is_ready())).await
    }

    /// Connects a client once the router can serve.
    pub async fn client(&self) -> anyhow::Result<Client> {
        self.ready().await?;
        Client::connect(&format!("http://{}", self.router.grpc)).await
    }

    /// Starts another router over the same workers, and connects a client to it.
    pub async fn add_router(&self) -> anyhow::Result<Client> {
        let config = router_config()?;
        let (lifetime, health) = (self.lifetime.child(), Health::new());
        let discovery = Arc::clone(&self.discovery);
        let addresses = router::serve::serve_with(config, discovery, lifetime, health.clone()).await?;
        until("the added router is ready", async || Ok(health.is_ready())).await?;
        Client::connect(&format!("http://{}", addresses.grpc)).await
    }

    /// Adds a draft worker, for instance with a modified [`draft_config`].
    pub async fn add_draft(&self, config: DraftConfig) -> anyhow::Result<RunningWorker> {
        let (lifetime, discovery) = (self.lifetime.child(), self.discovery.as_ref());
        let addresses = draft_worker::serve_with(config, discovery, lifetime.clone(), Health::new()).await?;
        let worker = RunningWorker::new(lifetime, addresses);
        worker.wait_connected().await?;
        Ok(worker)
    }

    /// Base URL of the router's HTTP listener.
    pub fn http_url(&self) -> String {
        format!("http://{}", self.router.http)
    }

    /// Base URL of the router's admin listener: metrics, and the state of its lanes.
    pub fn admin_url(&self) -> String {
        format!("http://{}", self.router.admin)
    }

    /// The router's metrics.
    pub async fn metrics(&self) -> anyhow::Result<Page> {
        Page::scrape(&self.admin_url()).await
    }

    /// Address of the router's gRPC listener.
    pub fn grpc_address(&self) -> SocketAddr {
        self.router.grpc
    }

    /// Adds a worker and waits until the router is connected to it.
    pub async fn add(&self, kind: WorkerKind) -> anyhow::Result<RunningWorker> {
        self.add_with(kind, |_| ()).await
    }

    /// Waits until the router can use all these workers, which is later than its connection to them.
    pub async fn wait_known(&self, workers: &[&RunningWorker]) -> anyhow::Result<()> {
        let addresses: Vec<String> = workers.iter().map(|worker| worker.url()).collect();
        lanes_report::wait_known(&self.admin_url(), &addresses).await
    }

    /// Like [`Self::add`], with a modified configuration.
    pub async fn add_with(
        &self,
        kind: WorkerKind,
        change: impl FnOnce(&mut WorkerConfig),
    ) -> anyhow::Result<RunningWorker> {
        let lifetime = self.lifetime.child();
        let worker = start_worker((kind, change), self.discovery.as_ref(), lifetime).await?;
        worker.wait_connected().await?;
        Ok(worker)
    }

    /// Adds the bundled target for a test that drafts nothing: it does not measure at its start what routers
    /// choose k with. `change` may modify its configuration.
    pub async fn add_plain_target(
        &self,
        change: impl FnOnce(&mut WorkerConfig),
    ) -> anyhow::Result<RunningWorker> {
        self.add_with(WorkerKind::Target, |config| {
            config.profile_steps = false;
            change(config);
        })
        .await
    }

    /// Adds a worker behind a wire with these faults.
    pub async fn add_behind(
        &self,
        kind: WorkerKind,
        faults: WireFaults,
    ) -> anyhow::Result<(RunningWorker, Arc<FrameCounts>)> {
        let lifetime = self.lifetime.child();
        // The worker registers with a discovery that no router uses; the wire is registered instead.
        let nowhere = discovery::open(&DiscoveryUri::Memory.into(), &lifetime).await?;
        let worker =
            start_worker((kind, |_: &mut WorkerConfig| ()), nowhere.as_ref(), lifetime.clone()).await?;
        let wire =
            FaultyWire::connect(&format!("http://{}", worker.listen), faults, lifetime.clone()).await?;
        let frame_counts = wire.frame_counts();
        self.announce(kind.role(), wire, lifetime).await?;
        worker.wait_connected().await?;
        Ok((worker, frame_counts))
    }

    /// Adds a worker behind a wire on which 100 steps take a second, so that a test can act while a text is
    /// generated.
    pub async fn add_far(&self, kind: WorkerKind) -> anyhow::Result<RunningWorker> {
        let far = WireFaults { latency: Duration::from_millis(5), ..WireFaults::default() };
        let (worker, _) = self.add_behind(kind, far).await?;
        Ok(worker)
    }

    /// Adds a draft worker implemented by a test; its tasks run under the lifetime that `make` receives.
    pub async fn add_draft_service<D: Worker>(&self, make: impl FnOnce(Lifetime) -> D) -> anyhow::Result<()> {
        let lifetime = self.lifetime.child();
        self.announce(DRAFT, make(lifetime.clone()), lifetime).await
    }

    /// Stops everything; fails if something does not stop in time.
    pub async fn stop(self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.lifetime.shut_down(STOP_GRACE).await == ShutdownOutcome::Clean,
            "the cluster did not stop"
        );
        Ok(())
    }

    /// Serves a fake worker and registers it, for as long as `lifetime` lasts.
    async fn announce<D: Worker>(&self, role: &str, worker: D, lifetime: Lifetime) -> anyhow::Result<()> {
        let address = fake_worker::serve(worker, &lifetime).await?;
        self.list(role, address, lifetime).await
    }

    /// Registers a running target a second time, with another spelling of its address.
    pub async fn list_target_again(&self, worker: &RunningWorker) -> anyhow::Result<()> {
        self.list(TARGET, format!("http://{}/", worker.listen), self.lifetime.child()).await
    }

    /// Registers a worker at `address`, for as long as `lifetime` lasts.
    async fn list(&self, role: &str, address: String, lifetime: Lifetime) -> anyhow::Result<()> {
        let member =
            Member { id: address.clone(), role: role.to_owned(), address, facts: serde_json::Value::Null };
        let registration = self.discovery.register(member).await?;
        let draining = lifetime.draining();
        lifetime.spawn("registration", async move {
            draining.await;
            registration.leave().await;
        });
        Ok(())
    }
}

impl WorkerKind {
    fn role(self) -> &'static str {
        match self {
            Self::Target | Self::SyntheticTarget => TARGET,
            Self::Draft | Self::DraftAhead | Self::Ngram | Self::SyntheticDraft => DRAFT,
            Self::ShadowDraft | Self::ShadowNgram => DRAFT,
        }
    }
}

impl RunningWorker {
    fn new(lifetime: Lifetime, addresses: worker::serve::Addresses) -> Self {
        Self { lifetime, admin: addresses.admin, listen: addresses.listen }
    }

    /// The worker's metrics.
    pub async fn metrics(&self) -> anyhow::Result<Page> {
        Page::scrape(&format!("http://{}", self.admin)).await
    }

    /// Number of steps that the worker ran.
    pub async fn steps(&self) -> anyhow::Result<u64> {
        Ok(self.metrics().await?.steps_run())
    }

    /// Number of steps whose forward or draw failed.
    pub async fn steps_failed(&self) -> anyhow::Result<u64> {
        Ok(self.metrics().await?.sum_where("outrider_worker_steps_total", "outcome=\"failed\""))
    }

    /// Number of steps that a draft worker answered from tokens drafted ahead.
    pub async fn draft_ahead_hits(&self) -> anyhow::Result<u64> {
        let page = self.metrics().await?;
        Ok(page.sum_where("outrider_worker_draft_ahead_steps_total", "result=\"hit\""))
    }

    /// Address of the worker's gRPC listener.
    pub fn grpc_address(&self) -> SocketAddr {
        self.listen
    }

    /// The worker's address as the router knows it.
    pub fn url(&self) -> String {
        format!("http://{}", self.listen)
    }

    /// Stops the worker while the router is connected to it.
    pub async fn stop(self) {
        // Even a worker that does not stop in time no longer serves.
        let _: ShutdownOutcome = self.lifetime.shut_down(STOP_GRACE).await;
    }

    async fn wait_connected(&self) -> anyhow::Result<()> {
        until("the router is connected to the worker", async || {
            Ok(self.metrics().await?.sum("outrider_worker_streams") > 0)
        })
        .await
    }
}

/// Starts a synthetic worker without registering it, for programs whose router is another process; returns
/// its address.
pub async fn start_synthetic(
    kind: WorkerKind,
    synthetic: SyntheticConfig,
    lifetime: Lifetime,
) -> anyhow::Result<SocketAddr> {
    let nowhere = discovery::open(&DiscoveryUri::Memory.into(), &lifetime).await?;
    let change = |config: &mut WorkerConfig| config.synthetic = Some(synthetic);
    Ok(start_worker((kind, change), nowhere.as_ref(), lifetime).await?.listen)
}

async fn start_worker(
    (kind, change): (WorkerKind, impl FnOnce(&mut WorkerConfig)),
    discovery: &dyn Discovery,
    lifetime: Lifetime,
) -> anyhow::Result<RunningWorker> {
    let mut config = worker_config()?;
    match kind {
        WorkerKind::Target => config.model = Some(pair::target_dir()),
        WorkerKind::Draft | WorkerKind::DraftAhead | WorkerKind::ShadowDraft => {
            config.model = Some(pair::draft_dir());
        }
        WorkerKind::SyntheticTarget | WorkerKind::SyntheticDraft => {
            config.synthetic = Some(synthetic_config()?);
        }
        WorkerKind::Ngram | WorkerKind::ShadowNgram => {}
    }
    if kind.role() == TARGET {
        config.served_model_name = Some(MODEL.to_owned());
    }
    change(&mut config);
    let (own, health) = (lifetime.clone(), Health::new());
    let addresses = if kind.role() == TARGET {
        target_worker::serve_with(config, discovery, own, health).await?
    } else {
        let is_ngram = matches!(kind, WorkerKind::Ngram | WorkerKind::ShadowNgram);
        let method = if is_ngram { DraftMethod::Ngram } else { DraftMethod::Model };
        let is_shadow = matches!(kind, WorkerKind::ShadowDraft | WorkerKind::ShadowNgram);
        let draft_ahead = if kind == WorkerKind::DraftAhead { DRAFT_AHEAD } else { 0 };
        let (target_tokenizer, task_types) = (None, Vec::new());
        let config =
            DraftConfig { method, target_tokenizer, task_types, draft_ahead, is_shadow, worker: config };
        draft_worker::serve_with(config, discovery, own, health).await?
    };
    Ok(RunningWorker::new(lifetime, addresses))
}

fn router_config() -> anyhow::Result<RouterConfig> {
    let config =
        RawRouter::default().validate(&mut Faults::new()).context("the default configuration is invalid")?;
    Ok(RouterConfig { http: any_port(), grpc: any_port(), admin: any_port(), ..config })
}

/// Configuration of a draft worker that runs the model in `directory`, with the target's tokenizer, for all
/// task types and without draft-ahead.
pub fn draft_config(directory: &Path) -> anyhow::Result<DraftConfig> {
    Ok(DraftConfig {
        method: DraftMethod::Model,
        target_tokenizer: None,
        task_types: Vec::new(),
        draft_ahead: 0,
        is_shadow: false,
        worker: WorkerConfig { model: Some(directory.to_owned()), ..worker_config()? },
    })
}

fn worker_config() -> anyhow::Result<WorkerConfig> {
    let config = RawWorker::new(DefaultPorts { listen: 0, admin: 0 }).validate(&mut Faults::new());
    Ok(WorkerConfig { threads: 1, ..config.context("the default configuration is invalid")? })
}

fn synthetic_config() -> anyhow::Result<SyntheticConfig> {
    Ok(SyntheticConfig { profile: Arc::new(pair::profile()?), time_scale: 1.0 })
}

fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// The answers of a target without drafts: the reference for every other way of serving the cases.
pub async fn plain_answers(cases: &[Case], width: usize) -> anyhow::Result<Vec<Answer>> {
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add_plain_target(|_| ()).await?;
    let answers = cluster.client().await?.ask_plain(cases, width).await?;
    cluster.stop().await?;
    Ok(answers)
}
