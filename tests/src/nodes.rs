//! The bundled pair with a target whose model is spread over several processes of this host.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use outrider_cli::cluster::{
    Binaries, ClusterSpec, ExitReport, Process, ProcessCluster, ProcessSpec, free_address,
};

use crate::client::Client;
use crate::pair;
use crate::processes::{self, Logs};
use crate::wait::WAIT_TIMEOUT;

/// Name of node 0 among the processes of the cluster.
pub const LEADER: &str = "target-0";

/// A running cluster whose target is several nodes.
pub struct NodesCluster {
    cluster: ProcessCluster,
    logs: Arc<Logs>,
    binaries: Binaries,
    count: usize,
    leader: SocketAddr,
    /// Flags that all nodes have.
    flags: Vec<String>,
    /// Nodes from 1 on.
    followers: Vec<Process>,
}

impl NodesCluster {
    /// Starts all processes, `count` nodes with `ranks` ranks in all among them. Nodes have `flags` in
    /// addition.
    pub async fn start(
        (count, ranks): (usize, usize),
        flags: &[&str],
        change: impl FnOnce(&mut ClusterSpec),
    ) -> anyhow::Result<Self> {
        let mut nodes = Self::launch((count, ranks), flags, change)?;
        nodes.start_followers()?;
        nodes.ready().await?;
        Ok(nodes)
    }

    /// Starts all processes except for nodes from 1 on.
    pub fn launch(
        (count, ranks): (usize, usize),
        flags: &[&str],
        change: impl FnOnce(&mut ClusterSpec),
    ) -> anyhow::Result<Self> {
        let (logs, leader) = (Arc::new(Logs::default()), free_address()?);
        let texts = [("--nnodes", count.to_string()), ("--tensor-parallel", ranks.to_string())];
        let texts = texts.into_iter().chain([("--dist-init-addr", leader.to_string())]);
        let mut all: Vec<String> = texts.flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
        all.extend(flags.iter().map(|&flag| flag.to_owned()));
        let spec = processes::bundled_pair(|spec| {
            spec.log = Some("info".to_owned());
            spec.target_args.extend(all.clone());
            spec.target_args.extend(["--node-rank", "0"].map(str::to_owned));
            change(spec);
        })?;
        let binaries = spec.binaries.clone();
        let cluster = ProcessCluster::launch(spec, Arc::clone(&logs) as _)?;
        Ok(Self { cluster, logs, binaries, count, leader, flags: all, followers: Vec::new() })
    }

    /// Waits until requests can be served.
    pub async fn ready(&mut self) -> anyhow::Result<()> {
        Ok(self.cluster.wait_ready(WAIT_TIMEOUT, &mut |_, _| ()).await?)
    }

    /// Connects a client.
    pub async fn client(&self) -> anyhow::Result<Client> {
        processes::client(&self.cluster).await
    }

    /// Where node 0 listens for the others.
    pub fn leader_address(&self) -> SocketAddr {
        self.leader
    }

    /// The processes other than nodes from 1 on.
    pub fn cluster(&mut self) -> &mut ProcessCluster {
        &mut self.cluster
    }

    /// Every line that was logged.
    pub fn logs(&self) -> &Logs {
        &self.logs
    }

    /// Starts nodes from 1 on.
    pub fn start_followers(&mut self) -> anyhow::Result<()> {
        let start = |node| self.start_node(node, &[]);
        self.followers = (1..self.count).map(start).collect::<anyhow::Result<_>>()?;
        Ok(())
    }

    /// Starts a process as node `node`, with more flags.
    pub fn start_node(&self, node: usize, flags: &[&str]) -> anyhow::Result<Process> {
        let model = pair::target_dir();
        let model = model.to_str().context("the path of the bundled model is text")?;
        let (node_rank, listen, admin) =
            (node.to_string(), free_address()?.to_string(), free_address()?.to_string());
        let own = ["--model", model, "--threads", "1", "--listen", &listen, "--admin", &admin];
        let own =
            own.into_iter().chain(["--node-rank", &node_rank, "--exit-on-stdin-close", "--log", "info"]);
        let args = own.chain(self.flags.iter().map(String::as_str)).chain(flags.iter().copied());
        let spec = ProcessSpec {
            name: format!("node-{node}"),
            program: self.binaries.target_worker.clone(),
            args: args.map(Into::into).collect(),
            env: Vec::new(),
        };
        Ok(Process::spawn(spec, Arc::clone(&self.logs) as _)?)
    }

    /// Sends a signal to a node other than 0.
    pub fn signal(&self, node: usize, signal: Signal) {
        self.followers[node - 1].signal(signal);
    }

    /// Waits until a node, 0 included, has ended, and checks its exit code.
    pub async fn ends_with(&mut self, node: usize, code: i32) -> anyhow::Result<ExitReport> {
        let ending = async {
            match node {
                0 => self.cluster.wait_exit(LEADER).await,
                node => Ok(self.followers[node - 1].wait().await),
            }
        };
        let ended = tokio::time::timeout(WAIT_TIMEOUT, ending).await;
        let report = ended.with_context(|| format!("node {node} still runs"))??;
        let found = report.status.and_then(|status| status.code());
        ensure!(found == Some(code), "node {node} was expected to end with {code}: {report}");
        Ok(report)
    }

    /// Starts all nodes again, all of which have ended.
    pub async fn restart(&mut self) -> anyhow::Result<()> {
        self.start_followers()?;
        self.cluster.restart(LEADER).await?;
        self.cluster.wait_process_ready(LEADER, WAIT_TIMEOUT).await?;
        Ok(())
    }
}
