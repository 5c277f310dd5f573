//! A complete cluster as child processes of this one: a router and workers that communicate over loopback.
//!
//! [`ProcessCluster::launch`] starts the processes and [`ProcessCluster::wait_ready`] waits until the router
//! serves. Then processes can be looked up by name, signalled, waited for and restarted.
//! [`ProcessCluster::stop`] stops them in order; dropping a cluster kills the remaining ones. If this process
//! is killed, the children notice: each has the read end of a pipe as its standard input and exits when that
//! closes. The cluster spawns no tasks: its futures run in the caller's task.

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
use speculation::Role;
use tempfile::TempDir;

pub use error::ClusterError;
pub use ports::free_address;
pub(crate) use ports::try_bind;
pub use process::{ExitReport, LogSink, NoLogs, Process, ProcessSpec};
pub use spec::{Binaries, ClusterSpec, Discovery, DraftKind, TargetKind};

use spec::ProcessPlan;

/// The name of the router among a cluster's processes.
pub const ROUTER: &str = "router";

/// Time that a process may take after SIGTERM, in addition to its streams' grace period. After that it is
/// killed.
const STOP_MARGIN: Duration = Duration::from_secs(6);

/// Running processes that serve one model pair.
pub struct ProcessCluster {
    spec: ClusterSpec,
    sink: Arc<dyn LogSink>,
    members: Vec<Member>,
    http: SocketAddr,
    grpc: SocketAddr,
    discovery_uri: String,
    /// Holds the static discovery file; removed with the cluster.
    directory: TempDir,
}

/// A process and the information needed to reach and restart it.
struct Member {
    plan: ProcessPlan,
    process: Process,
    /// Whether its exit was already returned to the caller.
    reported: bool,
}

impl ProcessCluster {
    /// Starts every process without waiting until they are ready. If one fails to start, the others are
    /// killed.
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
        // Every process, including the first worker, opens the discovery file at start.
        cluster.write_workers_file()?;
        for _ in 0..cluster.spec.target_workers {
            cluster.add_worker(Role::Target)?;
        }
        for _ in 0..cluster.spec.draft_count() {
            cluster.add_worker(Role::Draft)?;
        }
        let plan = spec::router_plan(&cluster.spec, (cluster.http, cluster.grpc), &cluster.discovery_uri)?;
        cluster.start_member(plan)?;
        Ok(cluster)
    }

    /// Starts every process and waits until requests can be served.
    pub async fn start(
        spec: ClusterSpec,
        sink: Arc<dyn LogSink>,
        timeout: Duration,
    ) -> Result<Self, ClusterError> {
        let mut cluster = Self::launch(spec, sink)?;
        cluster.wait_ready(timeout, &mut |_, _| ()).await?;
        Ok(cluster)
    }

    /// Waits until all processes are ready; calls `on_ready` with each name and the time since the call.
    /// Fails if a process ends first, with the reason that the process gave, if any.
    pub async fn wait_ready(
        &mut self,
        timeout: Duration,
        on_ready: &mut (dyn FnMut(&str, Duration) + Send),
    ) -> Result<(), ClusterError> {
        let started = Instant::now();
        let waiting = self
            .members
            .iter()
            .map(|member| (member.plan.process.name.clone(), member.plan.ready_url.clone()))
            .collect::<Vec<_>>();
        let mut prober = ready::Prober::new(waiting);
        loop {
            tokio::select! {
                biased;
                // An exit explains the failure better than the missing answers that follow it.
                exit = self.next_exit() => return Err(exit.before_ready()),
                outcome = tokio::time::timeout(timeout.saturating_sub(started.elapsed()), prober.next()) => match outcome {
                    Ok(Some(name)) => on_ready(&name, started.elapsed()),
                    Ok(None) => return Ok(()),
                    Err(_) => return Err(ClusterError::NotReady { waited: timeout, missing: prober.missing() }),
                },
            }
        }
    }

    /// Adds a worker to the running cluster and returns its name. It is not ready yet.
    pub fn add_worker(&mut self, role: Role) -> Result<String, ClusterError> {
        let index = self.members.iter().filter(|member| member.plan.role == Some(role)).count();
        let plan = spec::worker_plan(&self.spec, role, index, &self.discovery_uri)?;
        let name = plan.process.name.clone();
        self.start_member(plan)?;
        self.write_workers_file()?;
        Ok(name)
    }

    fn start_member(&mut self, plan: ProcessPlan) -> Result<(), ClusterError> {
        let process = Process::spawn(plan.process.clone(), Arc::clone(&self.sink))?;
        self.members.push(Member { plan, process, reported: false });
        Ok(())
    }

    /// Replaces the static discovery file atomically, so that a watcher never reads a partial file.
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

// Access to the processes.
impl ProcessCluster {
    /// Base URL for OpenAI clients, without a trailing slash.
    pub fn http_url(&self) -> String {
        format!("http://{}", self.http)
    }

    /// URL for gRPC clients.
    pub fn grpc_url(&self) -> String {
        format!("http://{}", self.grpc)
    }

    /// All names, in the order of start.
    pub fn names(&self) -> Vec<&str> {
        self.members.iter().map(|member| member.plan.process.name.as_str()).collect()
    }

    /// Returns the process with that name.
    pub fn process(&self, name: &str) -> Result<&Process, ClusterError> {
        self.member(name).map(|member| &member.process)
    }

    /// Base URL of a process's health and metrics endpoints: its admin address.
    pub fn admin_url(&self, name: &str) -> Result<String, ClusterError> {
        self.member(name).map(|member| format!("http://{}", member.plan.admin))
    }

    /// gRPC URL of a worker.
    pub fn worker_url(&self, name: &str) -> Result<String, ClusterError> {
        self.member(name).map(|member| format!("http://{}", member.plan.listen))
    }

    fn member(&self, name: &str) -> Result<&Member, ClusterError> {
        let found = self.members.iter().find(|member| member.plan.process.name == name);
        found.ok_or_else(|| ClusterError::NoSuchProcess { name: name.to_owned() })
    }

    fn member_mut(&mut self, name: &str) -> Result<&mut Member, ClusterError> {
        let found = self.members.iter_mut().find(|member| member.plan.process.name == name);
        found.ok_or_else(|| ClusterError::NoSuchProcess { name: name.to_owned() })
    }
}

// Stopping, expected and unexpected.
impl ProcessCluster {
    /// Sends a signal to one process.
    pub fn signal(&self, name: &str, signal: Signal) -> Result<(), ClusterError> {
        self.member(name)?.process.signal(signal);
        Ok(())
    }

    /// Waits until one process has ended. [`Self::next_exit`] does not return this exit again.
    pub async fn wait_exit(&mut self, name: &str) -> Result<ExitReport, ClusterError> {
        let member = self.member_mut(name)?;
        let report = member.process.wait().await;
        member.reported = true;
        Ok(report)
    }

    /// Sends SIGKILL to one process and waits until it has ended.
    pub async fn kill(&mut self, name: &str) -> Result<ExitReport, ClusterError> {
        self.signal(name, Signal::SIGKILL)?;
        self.wait_exit(name).await
    }

    /// Restarts a process with the same arguments and ports; kills it first if it still runs. It is not ready
    /// yet.
    pub async fn restart(&mut self, name: &str) -> Result<(), ClusterError> {
        self.kill(name).await?;
        let sink = Arc::clone(&self.sink);
        let member = self.member_mut(name)?;
        member.process = Process::spawn(member.plan.process.clone(), sink)?;
        member.reported = false;
        Ok(())
    }

    /// Waits until one process is ready, for instance after a restart.
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

    /// Waits for the next exit that has not been reported yet. Never returns while all processes run.
    ///
    /// Cancel safety: an exit is marked as reported only when it is returned.
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

    /// Stops all processes: first the router, so that its streams finish while the workers still run, then
    /// the workers. Kills processes that exceed their grace period. Returns how each process ended.
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
