//! The bundled pair as real processes, for tests that need processes.
//!
//! Uses the binaries that cargo built next to the running program; nextest builds them before tests that use
//! them (the setup script in `.config/nextest.toml`). Without nextest run `cargo build --workspace --bins`
//! first.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use nix::sys::signal::Signal;
use outrider_cli::cluster::{Binaries, ClusterSpec, DraftKind, LogSink, NoLogs, ProcessCluster};

use crate::client::Client;
use crate::lanes_report;
use crate::metrics::Page;
use crate::pair::{self, MODEL};
use crate::wait::{WAIT_TIMEOUT, until};

/// Starts a router and the bundled pair, one thread per worker; `change` may modify the specification.
pub async fn start(change: impl FnOnce(&mut ClusterSpec)) -> anyhow::Result<ProcessCluster> {
    Ok(ProcessCluster::start(bundled_pair(change)?, Arc::new(NoLogs), WAIT_TIMEOUT).await?)
}

/// Like [`start`], with the logs of the processes.
pub async fn start_logged(
    change: impl FnOnce(&mut ClusterSpec),
) -> anyhow::Result<(ProcessCluster, Arc<Logs>)> {
    let logs = Arc::new(Logs::default());
    let spec = bundled_pair(|spec| {
        spec.log = Some("info".to_owned());
        change(spec);
    })?;
    let cluster = ProcessCluster::start(spec, Arc::clone(&logs) as _, WAIT_TIMEOUT).await?;
    Ok((cluster, logs))
}

pub(crate) fn bundled_pair(change: impl FnOnce(&mut ClusterSpec)) -> anyhow::Result<ClusterSpec> {
    let binaries = Binaries::beside_this_executable()?;
    let mut spec = ClusterSpec::new(binaries, pair::target_dir(), DraftKind::Model(pair::draft_dir()));
    spec.threads = Some(NonZeroUsize::MIN);
    spec.log = Some("warn".to_owned());
    spec.target_args = vec!["--served-model-name".to_owned(), MODEL.to_owned()];
    change(&mut spec);
    Ok(spec)
}

/// Leaves out the draft worker, and the times that the target would measure at its start for choosing k.
pub fn without_drafts(spec: &mut ClusterSpec) {
    spec.draft = DraftKind::None;
    spec.target_args.extend(["--profile-steps", "false"].map(str::to_owned));
}

/// Path of one of the programs, for tests that start it themselves.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    Ok(Binaries::beside_this_executable()?.router.with_file_name(name))
}

/// Connects a client to a ready cluster.
pub async fn client(cluster: &ProcessCluster) -> anyhow::Result<Client> {
    Client::connect(&cluster.grpc_url()).await
}

/// The metrics of one process.
pub async fn metrics(cluster: &ProcessCluster, name: &str) -> anyhow::Result<Page> {
    Page::scrape(&cluster.admin_url(name)?).await
}

/// Number of steps that a worker ran.
pub async fn steps(cluster: &ProcessCluster, name: &str) -> anyhow::Result<u64> {
    Ok(metrics(cluster, name).await?.steps_run())
}

/// Waits until the router can use all these workers, which is later than its connection to them.
pub async fn wait_known(cluster: &ProcessCluster, names: &[&str]) -> anyhow::Result<()> {
    let addresses = names.iter().map(|name| cluster.worker_url(name)).collect::<Result<Vec<_>, _>>()?;
    lanes_report::wait_known(&cluster.admin_url("router")?, &addresses).await
}

/// Stops a process (SIGSTOP) and waits until none of its threads runs. The signal alone returns earlier:
/// until one thread has received it, which takes long on a busy machine, the others continue.
pub async fn pause(cluster: &ProcessCluster, name: &str) -> anyhow::Result<()> {
    cluster.signal(name, Signal::SIGSTOP)?;
    let pid = cluster.process(name)?.pid();
    until(&format!("every thread of {name} has stopped"), async || {
        let mut threads = std::fs::read_dir(format!("/proc/{pid}/task"))?;
        threads.try_fold(true, |stopped, thread| Ok(stopped && is_stopped(&thread?.path())?))
    })
    .await
}

fn is_stopped(thread: &Path) -> anyhow::Result<bool> {
    let stat = std::fs::read_to_string(thread.join("stat"))?;
    // The name before the state may contain any characters, but nothing after it is in parentheses.
    let (_, after_name) = stat.rsplit_once(") ").context("no name in /proc/PID/task/ID/stat")?;
    Ok(after_name.starts_with('T'))
}

/// Every line of every process of a cluster. Also printed, for the report of a failing test.
#[derive(Debug, Default)]
pub struct Logs(Mutex<Vec<(String, String)>>);

impl Logs {
    /// The lines logged by one process so far.
    pub fn of(&self, process: &str) -> Vec<String> {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter(|(name, _)| name == process).map(|(_, line)| line.clone()).collect()
    }

    /// Waits for a line of a process that contains all these words, and returns it.
    pub async fn line_with(&self, process: &str, words: &[&str]) -> anyhow::Result<String> {
        let find = || self.of(process).into_iter().find(|line| words.iter().all(|word| line.contains(word)));
        until(&format!("{process} logs a line with {words:?}"), async || Ok(find().is_some())).await?;
        Ok(find().expect("lines are only appended"))
    }
}

impl LogSink for Logs {
    #[expect(clippy::print_stderr, reason = "the report of a failing test shows what the processes logged")]
    fn line(&self, process: &str, line: &str) {
        eprintln!("{process}: {line}");
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.push((process.to_owned(), line.to_owned()));
    }
}
