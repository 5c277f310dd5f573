//! A whole cluster as child processes of this one: a router and workers that talk over loopback.
//!
//! [`Cluster::launch`] starts the processes, [`Cluster::wait_ready`] waits until the router serves, and then processes can be
//! named, signalled, waited for and restarted. [`Cluster::stop`] ends them in order; dropping a cluster kills what is left.
//! If this process itself is killed, the children notice: each holds the read end of a pipe as its standard input and ends
//! when that closes. The cluster spawns no tasks: whoever awaits it drives it.

mod error;
mod ports;
mod process;
mod ready;
mod spec;
pub mod usage;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::{FutureExt, select_all};
use nix::sys::signal::Signal;
use tempfile::TempDir;

pub use error::ClusterError;
pub use ports::{address_is_free, free_address};
pub use process::{ExitReport, LogSink, NoLogs, Process, ProcessSpec};
pub use spec::{Binaries, ClusterSpec, Discovery, DraftKind, TargetKind};

use spec::{ProcessPlan, WorkerRole};

/// The name of the router among a cluster's processes.
pub const ROUTER: &str = "router";

/// What a process may need after SIGTERM beyond its streams' grace. After that it is killed.
const STOP_MARGIN: Duration = Duration::from_secs(6);

/// Running processes that serve one model pair.
pub struct Cluster {
    spec: ClusterSpec,
    sink: Arc<dyn LogSink>,
    members: Vec<Member>,
    http: SocketAddr,
    grpc: SocketAddr,
    discovery_uri: String,
    /// Holds the static discovery file; removed with the cluster.
    directory: TempDir,
}

/// One process and what is needed to reach it and to start it again.
struct Member {
    plan: ProcessPlan,
    process: Process,
    /// Its end was returned to the caller, so it is not an event any more.
    reported: bool,
}

impl Cluster {
    /// Start every process. None is ready yet; the first that fails to start ends the others.
    pub fn launch(spec: ClusterSpec, sink: Arc<dyn LogSink>) -> Result<Self, ClusterError> {
        let directory =
            tempfile::Builder::new().prefix("outrider-").tempdir().map_err(ClusterError::Directory)?;
        let http = ports::resolve(spec.http)?;
        let grpc = ports::resolve(spec.grpc)?;
        let discovery_uri = match &spec.discovery {
            Discovery::Static => format!("static:{}", workers_file(directory.path()).display()),
            Discovery::Uri(uri) => uri.clone(),
        };
        let mut cluster = Self { spec, sink, members: Vec::new(), http, grpc, discovery_uri, directory };
        // Every process opens the discovery file when it starts, the first worker too.
        cluster.write_workers_file()?;
        for _ in 0..cluster.spec.target_workers {
            cluster.add_worker(WorkerRole::Target)?;
        }
        for _ in 0..cluster.spec.draft_count() {
            cluster.add_worker(WorkerRole::Draft)?;
        }
        let plan = spec::router_plan(&cluster.spec, (cluster.http, cluster.grpc), &cluster.discovery_uri)?;
        cluster.start_member(plan)?;
        Ok(cluster)
    }

    /// Start every process and wait until requests can be served.
    pub async fn start(
        spec: ClusterSpec,
        sink: Arc<dyn LogSink>,
        timeout: Duration,
    ) -> Result<Self, ClusterError> {
        let mut cluster = Self::launch(spec, sink)?;
        cluster.wait_ready(timeout, &mut |_, _| ()).await?;
        Ok(cluster)
    }

    /// Wait until all processes answer that they are ready; `on_ready` hears each name with the time it took. The first
    /// process that ends instead is the error, with its own reason where it gave one.
    pub async fn wait_ready(
        &mut self,
        timeout: Duration,
        on_ready: &mut (dyn FnMut(&str, Duration) + Send),
    ) -> Result<(), ClusterError> {
        let started = Instant::now();
        let waiting = self
            .members
            .iter()
            .map(|member| (member.plan.name.clone(), member.plan.ready_url.clone()))
            .collect::<Vec<_>>();
        let mut prober = ready::Prober::new(waiting);
        loop {
            tokio::select! {
                biased;
                // A death explains itself better than the silence that follows it.
                exit = self.next_exit() => return Err(exit.before_ready()),
                outcome = tokio::time::timeout(timeout.saturating_sub(started.elapsed()), prober.next()) => match outcome {
                    Ok(Some(name)) => on_ready(&name, started.elapsed()),
                    Ok(None) => return Ok(()),
                    Err(_) => return Err(ClusterError::NotReady { waited: timeout, missing: prober.missing() }),
                },
            }
        }
    }

    /// Add a target worker to the running cluster and return its name. It is not ready yet.
    pub fn add_target_worker(&mut self) -> Result<String, ClusterError> {
        self.add_worker(WorkerRole::Target)
    }

    /// Add a draft worker to the running cluster and return its name. It is not ready yet.
    pub fn add_draft_worker(&mut self) -> Result<String, ClusterError> {
        self.add_worker(WorkerRole::Draft)
    }

    fn add_worker(&mut self, role: WorkerRole) -> Result<String, ClusterError> {
        let index = self.members.iter().filter(|member| member.plan.role == Some(role)).count();
        let plan = spec::worker_plan(&self.spec, role, index, &self.discovery_uri)?;
        let name = plan.name.clone();
        self.start_member(plan)?;
        self.write_workers_file()?;
        Ok(name)
    }

    fn start_member(&mut self, plan: ProcessPlan) -> Result<(), ClusterError> {
        let process = Process::spawn(plan.process_spec(&self.spec.env), Arc::clone(&self.sink))?;
        self.members.push(Member { plan, process, reported: false });
        Ok(())
    }

    /// Replace the static discovery file in one step, so that a watcher never reads half of it.
    fn write_workers_file(&self) -> Result<(), ClusterError> {
        if self.spec.discovery != Discovery::Static {
            return Ok(());
        }
        let path = workers_file(self.directory.path());
        let text = spec::workers_toml(self.members.iter().map(|member| &member.plan));
        let draft = path.with_extension("new");
        std::fs::write(&draft, text)
            .and_then(|()| std::fs::rename(&draft, &path))
            .map_err(ClusterError::Directory)
    }
}

// What a caller can ask about the processes.
impl Cluster {
    /// Where OpenAI clients connect, without a trailing slash.
    pub fn http_url(&self) -> String {
        format!("http://{}", self.http)
    }

    /// Where gRPC clients connect.
    pub fn grpc_url(&self) -> String {
        format!("http://{}", self.grpc)
    }

    /// All names, in the order in which the processes were started.
    pub fn names(&self) -> Vec<&str> {
        self.members.iter().map(|member| member.plan.name.as_str()).collect()
    }

    /// The process of that name.
    pub fn process(&self, name: &str) -> Result<&Process, ClusterError> {
        self.member(name).map(|member| &member.process)
    }

    /// Base URL of a process's health and metrics: its admin address.
    pub fn admin_url(&self, name: &str) -> Result<String, ClusterError> {
        self.member(name).map(|member| format!("http://{}", member.plan.admin))
    }

    /// Where routers reach a worker over gRPC.
    pub fn worker_url(&self, name: &str) -> Result<String, ClusterError> {
        self.member(name).map(|member| format!("http://{}", member.plan.listen))
    }

    fn member(&self, name: &str) -> Result<&Member, ClusterError> {
        let found = self.members.iter().find(|member| member.plan.name == name);
        found.ok_or_else(|| ClusterError::NoSuchProcess { name: name.to_owned() })
    }

    fn member_mut(&mut self, name: &str) -> Result<&mut Member, ClusterError> {
        let found = self.members.iter_mut().find(|member| member.plan.name == name);
        found.ok_or_else(|| ClusterError::NoSuchProcess { name: name.to_owned() })
    }
}

// Ends, wanted and unwanted.
impl Cluster {
    /// Send a signal to one process.
    pub fn signal(&self, name: &str, signal: Signal) -> Result<(), ClusterError> {
        self.member(name)?.process.signal(signal);
        Ok(())
    }

    /// Wait until one process has ended. The end counts as known: [`Self::next_exit`] does not return it again.
    pub async fn wait_exit(&mut self, name: &str) -> Result<ExitReport, ClusterError> {
        let member = self.member_mut(name)?;
        let report = member.process.wait().await;
        member.reported = true;
        Ok(report)
    }

    /// SIGKILL one process and wait until it is gone.
    pub async fn kill(&mut self, name: &str) -> Result<ExitReport, ClusterError> {
        self.signal(name, Signal::SIGKILL)?;
        self.wait_exit(name).await
    }

    /// Start a process again with the same arguments and ports, killing it first where it still runs. It is not ready yet.
    pub async fn restart(&mut self, name: &str) -> Result<(), ClusterError> {
        self.kill(name).await?;
        let (env, sink) = (self.spec.env.clone(), Arc::clone(&self.sink));
        let member = self.member_mut(name)?;
        member.process = Process::spawn(member.plan.process_spec(&env), sink)?;
        member.reported = false;
        Ok(())
    }

    /// Wait until one process answers that it is ready, for instance after a restart.
    pub async fn wait_process_ready(&mut self, name: &str, timeout: Duration) -> Result<(), ClusterError> {
        let member = self.member_mut(name)?;
        let mut prober = ready::Prober::new(vec![(name.to_owned(), member.plan.ready_url.clone())]);
        tokio::select! {
            biased;
            report = member.process.wait() => {
                member.reported = true;
                Err(ClusterError::Died(report))
            }
            outcome = tokio::time::timeout(timeout, prober.next()) => match outcome {
                Ok(_) => Ok(()),
                Err(_) => Err(ClusterError::NotReady { waited: timeout, missing: prober.missing() }),
            },
        }
    }

    /// Wait for the next process that ends without its end being known yet. Never returns while all of them run.
    ///
    /// Cancel safety: an end is marked as known only when it is returned.
    pub async fn next_exit(&mut self) -> ExitReport {
        let unreported = self.members.iter_mut().filter(|member| !member.reported);
        let ends = unreported
            .map(|member| {
                async move {
                    let report = member.process.wait().await;
                    member.reported = true;
                    report
                }
                .boxed()
            })
            .collect::<Vec<_>>();
        if ends.is_empty() {
            return futures::future::pending().await;
        }
        select_all(ends).await.0
    }

    /// End everything: the router first, so that its streams finish while the workers still run, then the workers,
    /// which nothing uses any more. What outlives its time is killed. Returns how each process ended.
    pub async fn stop(mut self) -> Vec<ExitReport> {
        let router_grace = self.spec.grace + STOP_MARGIN;
        let mut reports = self.stop_members(|plan| plan.role.is_none(), router_grace).await;
        reports.extend(self.stop_members(|plan| plan.role.is_some(), STOP_MARGIN).await);
        reports
    }

    async fn stop_members(&mut self, which: fn(&ProcessPlan) -> bool, grace: Duration) -> Vec<ExitReport> {
        let chosen = self.members.iter_mut().filter(|member| which(&member.plan));
        futures::future::join_all(chosen.map(|member| member.process.stop(grace))).await
    }
}

fn workers_file(directory: &Path) -> PathBuf {
    directory.join("workers.toml")
}
