//! The processes of a run: a real etcd, target and draft workers, each behind a TCP proxy whose address
//! routers use, and routers. Every process can be killed, stopped and restarted at its address.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::signal::Signal;
use outrider_cli::cluster::{Binaries, LogSink, Process, ProcessSpec, free_address};
use service::shutdown::Lifetime;
use speculation::Role;

use super::streams::Load;
use crate::client::Client;
use crate::etcd::Etcd;
use crate::lanes_report::LanesReport;
use crate::metrics::Page;
use crate::pair::{self, MODEL};
use crate::tcp_proxy::TcpProxy;
use crate::wait::{holds_within, until};

/// Time for a router's streams after SIGTERM, in seconds; a process that has not ended shortly after is
/// killed.
const GRACE_SECONDS: u64 = 10;

/// KV memory per worker: far more than the streams need, far less than the machine has.
pub const KV_MEMORY_MIB: u32 = 128;

/// Engine of the workers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Engine {
    /// The bundled pair.
    Pair,
    /// No computation: they reproduce the step times of the pair's profile, multiplied by this factor. A
    /// machine can run many of them.
    Synthetic(f64),
}

/// Engine of the workers, and numbers of processes.
#[derive(Debug, Clone, Copy)]
pub struct FleetSize {
    /// Engine of the workers.
    pub engine: Engine,
    /// Target workers.
    pub targets: usize,
    /// Draft workers.
    pub drafts: usize,
    /// Routers.
    pub routers: usize,
    /// Members of etcd.
    pub etcd_members: usize,
}

/// The running processes.
pub struct Fleet {
    /// The etcd where workers register.
    pub etcd: Etcd,
    /// Target workers first, then draft workers.
    pub workers: Vec<Worker>,
    /// The routers, to which clients connect.
    pub routers: Vec<Router>,
    pub(super) engine: Engine,
    binaries: Binaries,
    logs: Arc<dyn LogSink>,
    lifetime: Lifetime,
}

/// A worker process and the proxy in front of it.
pub struct Worker {
    /// Its role.
    pub role: Role,
    /// The proxy through which routers reach it.
    pub proxy: TcpProxy,
    /// The process.
    pub server: Server,
    /// The address on which the worker itself listens.
    listen: SocketAddr,
}

/// A router process.
pub struct Router {
    /// The process.
    pub server: Server,
    grpc: SocketAddr,
}

/// A process that can be restarted.
pub struct Server {
    spec: ProcessSpec,
    process: Process,
    /// Address of its health and metrics.
    admin: SocketAddr,
}

impl Fleet {
    /// Starts everything and waits until every router is connected to every worker.
    pub async fn start(size: FleetSize, logs: Arc<dyn LogSink>, lifetime: &Lifetime) -> anyhow::Result<Self> {
        let binaries = Binaries::beside_this_executable()?;
        let etcd = Etcd::start_members(size.etcd_members).await?;
        let lifetime = lifetime.child();
        let engine = size.engine;
        let mut fleet =
            Self { etcd, workers: Vec::new(), routers: Vec::new(), engine, binaries, logs, lifetime };
        for i in 0..size.targets {
            fleet.add_worker(Role::Target, i).await?;
        }
        for i in 0..size.drafts {
            fleet.add_worker(Role::Draft, i).await?;
        }
        for i in 0..size.routers {
            fleet.add_router(i)?;
        }
        until("every router is connected to every worker", async || fleet.is_fully_connected().await).await?;
        Ok(fleet)
    }

    async fn add_worker(&mut self, role: Role, i: usize) -> anyhow::Result<()> {
        let name = format!("{}-{i}", role.as_str());
        let worker = self.worker(role, name, (self.engine_args(role), &self.etcd.uri())).await?;
        self.workers.push(worker);
        Ok(())
    }

    /// Starts an additional target like the others, which registers at `discovery`.
    pub async fn extra_target(&self, name: &str, discovery: &str) -> anyhow::Result<Worker> {
        let engine = self.engine_args(Role::Target);
        self.worker(Role::Target, name.to_owned(), (engine, discovery)).await
    }

    /// Starts an additional target with another checkpoint, which registers with the others.
    pub async fn extra_target_with(&self, name: &str, model: PathBuf) -> anyhow::Result<Worker> {
        let discovery = self.etcd.uri();
        self.worker(Role::Target, name.to_owned(), (model_args(model), &discovery)).await
    }

    /// Engine arguments of workers of the role.
    fn engine_args(&self, role: Role) -> Vec<OsString> {
        match (self.engine, role) {
            (Engine::Pair, Role::Target) => model_args(pair::target_dir()),
            (Engine::Pair, Role::Draft) => model_args(pair::draft_dir()),
            (Engine::Synthetic(time_scale), _) => {
                let profile = pair::root().join("deploy/profiles/cpu-pair.toml");
                let (engine, scale) = (format!("synthetic:{}", profile.display()), time_scale.to_string());
                ["--engine", &engine, "--time-scale", &scale].map(OsString::from).to_vec()
            }
        }
    }

    async fn worker(
        &self,
        role: Role,
        name: String,
        (mut args, discovery): (Vec<OsString>, &str),
    ) -> anyhow::Result<Worker> {
        let (listen, admin) = (free_address()?, free_address()?);
        let proxy = TcpProxy::start(listen, &self.lifetime).await?;
        let program = match role {
            Role::Target => &self.binaries.target_worker,
            Role::Draft => &self.binaries.draft_worker,
        };
        if role == Role::Target {
            args.extend(["--served-model-name", MODEL].map(OsString::from));
        }
        let (listen_at, admin_at, url) = (listen.to_string(), admin.to_string(), proxy.url());
        let addresses = ["--listen", &listen_at, "--admin", &admin_at, "--advertise", &url];
        args.extend(addresses.map(OsString::from));
        args.extend(common_args(discovery));
        let spec = ProcessSpec { name, program: program.clone(), args, env: Vec::new() };
        Ok(Worker { role, proxy, server: Server::start(spec, admin, &self.logs)?, listen })
    }

    fn add_router(&mut self, i: usize) -> anyhow::Result<()> {
        let (grpc, admin) = (free_address()?, free_address()?);
        let [http_at, grpc_at, admin_at] = [free_address()?, grpc, admin].map(|address| address.to_string());
        let addresses = ["--http", &http_at, "--grpc", &grpc_at, "--admin", &admin_at];
        let mut args: Vec<OsString> = addresses.map(OsString::from).to_vec();
        args.extend(common_args(&self.etcd.uri()));
        let program = self.binaries.router.clone();
        let spec = ProcessSpec { name: format!("router-{i}"), program, args, env: Vec::new() };
        self.routers.push(Router { server: Server::start(spec, admin, &self.logs)?, grpc });
        Ok(())
    }

    /// The indices of the workers of a role.
    pub fn of_role(&self, role: Role) -> Vec<usize> {
        (0..self.workers.len()).filter(|&i| self.workers[i].role == role).collect()
    }

    /// Whether every router is connected to exactly the fleet's workers, as reported by both sides.
    pub async fn is_fully_connected(&self) -> anyhow::Result<bool> {
        Ok(self.missing().await.is_empty())
    }

    /// Descriptions of everything that is not as expected.
    pub async fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        for router in &self.routers {
            let name = router.server.name();
            match router.connected().await {
                Err(error) => missing.push(format!("{name}: {error:#}")),
                Ok(connected) => {
                    let all = self.workers.iter().filter(|worker| !connected.contains(&worker.proxy.url()));
                    missing.extend(all.map(|worker| format!("{name} lacks {}", worker.server.name())));
                    if connected.len() > self.workers.len() {
                        missing.push(format!("{name} is connected to {} workers", connected.len()));
                    }
                }
            }
        }
        for worker in &self.workers {
            let streams = worker.server.metrics().await.map(|page| page.sum("outrider_worker_streams"));
            if !streams.as_ref().is_ok_and(|&streams| streams == self.routers.len() as u64) {
                missing.push(format!("{} has streams: {streams:?}", worker.server.name()));
            }
        }
        missing
    }

    /// Waits for [`Self::is_fully_connected`], up to `timeout`. Then restarts what is missing, and returns a
    /// report of it.
    pub async fn restore(&mut self, timeout: Duration, load: &Load) -> anyhow::Result<Vec<String>> {
        if holds_within(timeout, async || self.is_fully_connected().await).await? {
            return Ok(Vec::new());
        }
        let (missing, logs) = (self.missing().await, Arc::clone(&self.logs));
        let mut interventions = vec![format!("missing: {}", missing.join("; "))];
        for (i, router) in self.routers.iter_mut().enumerate() {
            // Only a router that does not answer at all; one that lacks a worker may be right.
            let name = router.server.name().to_owned();
            if missing.iter().any(|line| line.starts_with(&format!("{name}: "))) {
                load.on_router_down(i);
                router.server.restart(&logs).await?;
                until("a router serves that was started by hand", async || {
                    Ok(router.server.is_ready().await)
                })
                .await?;
                load.on_router_up(i);
                interventions.push(format!("{name} was restarted manually"));
            }
        }
        for worker in &mut self.workers {
            let lacked = format!("lacks {}", worker.server.name());
            if missing.iter().any(|line| line.ends_with(&lacked)) {
                worker.server.restart(&logs).await?;
                interventions.push(format!("{} was restarted manually", worker.server.name()));
            }
        }
        if !holds_within(timeout, async || self.is_fully_connected().await).await? {
            bail!(
                "not every router is connected to every worker, even after manual restarts ({interventions:?}): {:?}",
                self.missing().await
            );
        }
        Ok(interventions)
    }

    /// The sink of the processes' log lines.
    pub fn logs(&self) -> Arc<dyn LogSink> {
        Arc::clone(&self.logs)
    }

    /// The lifetime under which this program's listeners run.
    pub fn lifetime(&self) -> &Lifetime {
        &self.lifetime
    }

    /// All worker and router processes.
    pub fn servers(&self) -> impl Iterator<Item = &Server> {
        self.workers
            .iter()
            .map(|worker| &worker.server)
            .chain(self.routers.iter().map(|router| &router.server))
    }

    /// Stops everything, routers first.
    pub async fn stop(mut self) {
        let grace = Duration::from_secs(GRACE_SECONDS);
        let routers = self.routers.iter_mut().map(|router| router.server.process.stop(grace));
        futures::future::join_all(routers).await;
        let workers = self.workers.iter_mut().map(|worker| worker.server.process.stop(grace));
        futures::future::join_all(workers).await;
    }
}

/// Arguments of a worker that runs a model.
fn model_args(model: PathBuf) -> Vec<OsString> {
    let mut args = vec!["--model".into(), model.into()];
    args.extend(["--device", "cpu", "--threads", "1"].map(OsString::from));
    args.extend(["--kv-memory".into(), format!("{KV_MEMORY_MIB}MiB").into()]);
    args
}

/// Arguments of all processes.
fn common_args(discovery: &str) -> Vec<OsString> {
    let grace = GRACE_SECONDS.to_string();
    let args =
        ["--discovery", discovery, "--grace-seconds", &grace, "--log", "info", "--exit-on-stdin-close"];
    args.map(OsString::from).to_vec()
}

impl Worker {
    /// URL at which the worker itself listens, bypassing the proxy.
    pub fn url(&self) -> String {
        format!("http://{}", self.listen)
    }
}

impl Router {
    /// Connects a client to the router.
    pub async fn client(&self) -> anyhow::Result<Client> {
        Client::connect(&format!("http://{}", self.grpc)).await
    }

    /// The addresses of the workers to which it is connected.
    pub async fn connected(&self) -> anyhow::Result<Vec<String>> {
        let report = LanesReport::of(&format!("http://{}", self.server.admin)).await?;
        let workers = report.0["workers"].as_array().context("no list of workers in /debug/lanes")?;
        let address = |worker: &serde_json::Value| worker["address"].as_str().map(str::to_owned);
        Ok(workers.iter().filter_map(address).collect())
    }
}

impl Server {
    fn start(spec: ProcessSpec, admin: SocketAddr, logs: &Arc<dyn LogSink>) -> anyhow::Result<Self> {
        let process = Process::spawn(spec.clone(), Arc::clone(logs))?;
        Ok(Self { spec, process, admin })
    }

    /// Its name in logs.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its metrics.
    pub async fn metrics(&self) -> anyhow::Result<Page> {
        Page::scrape(&format!("http://{}", self.admin)).await
    }

    /// Whether it reports that it is ready.
    pub async fn is_ready(&self) -> bool {
        let response = reqwest::get(format!("http://{}/health/ready", self.admin)).await;
        response.is_ok_and(|answer| answer.status().is_success())
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Kills it and waits for its end.
    pub async fn kill(&mut self) {
        self.process.signal(Signal::SIGKILL);
        self.process.wait().await;
    }

    /// Stops it with SIGTERM and waits for its end.
    pub async fn stop(&mut self) {
        self.process.stop(Duration::from_secs(2 * GRACE_SECONDS)).await;
    }

    /// Restarts it with the same addresses; kills it first if it still runs.
    pub async fn restart(&mut self, logs: &Arc<dyn LogSink>) -> anyhow::Result<()> {
        self.kill().await;
        self.process = Process::spawn(self.spec.clone(), Arc::clone(logs))?;
        Ok(())
    }
}
