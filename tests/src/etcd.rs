//! A real etcd on loopback with data of its own.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use etcd_client::{Client, DeleteOptions, GetOptions};
use outrider_cli::cluster::free_address;
use tempfile::TempDir;
use tokio::time::timeout;

use crate::wait::until;

/// What all keys of the tests' cluster start with.
const PREFIX: &str = "outrider-tests";

/// How long one question may take.
const ANSWER: Duration = Duration::from_secs(2);

/// A running server; dropping it is a crash.
#[derive(Debug)]
pub struct Etcd {
    address: String,
    peers: String,
    child: Child,
    directory: TempDir,
}

impl Etcd {
    /// Starts it and waits until it answers.
    pub async fn start() -> anyhow::Result<Self> {
        let (address, peers) = (free_address()?.to_string(), format!("http://{}", free_address()?));
        let directory = tempfile::tempdir()?;
        let child = spawn(&address, &peers, directory.path())?;
        let mut etcd = Self { address, peers, child, directory };
        until("etcd answers", async || etcd.answers().await).await?;
        Ok(etcd)
    }

    /// Starts it again after [`Self::kill`], at the same address and with the data that it had.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        self.child = spawn(&self.address, &self.peers, self.directory.path())?;
        until("etcd answers again", async || self.answers().await).await
    }

    /// What processes are told with `--discovery`.
    pub fn uri(&self) -> String {
        format!("etcd://{}/{PREFIX}", self.address)
    }

    /// The JSON of every worker that is registered.
    pub async fn workers(&self) -> anyhow::Result<Vec<serde_json::Value>> {
        let ask = async {
            let mut client = Client::connect([self.address.as_str()], None).await?;
            anyhow::Ok(client.get(workers_prefix(), Some(GetOptions::new().with_prefix())).await?)
        };
        let answer = timeout(ANSWER, ask).await??;
        answer.kvs().iter().map(|kv| Ok(serde_json::from_slice(kv.value())?)).collect()
    }

    /// Deletes the key of every worker, as an operator's slip does, and returns how many there were.
    pub async fn delete_workers(&self) -> anyhow::Result<i64> {
        let delete = async {
            let mut client = Client::connect([self.address.as_str()], None).await?;
            anyhow::Ok(client.delete(workers_prefix(), Some(DeleteOptions::new().with_prefix())).await?)
        };
        Ok(timeout(ANSWER, delete).await??.deleted())
    }

    /// Ends it as a crash does.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    async fn answers(&mut self) -> anyhow::Result<bool> {
        if let Some(status) = self.child.try_wait()? {
            let log = std::fs::read_to_string(self.directory.path().join("log"))?;
            bail!("etcd ended with {status}:\n{log}");
        }
        let ask = async { Client::connect([self.address.as_str()], None).await?.status().await };
        Ok(timeout(ANSWER, ask).await.is_ok_and(|answer| answer.is_ok()))
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // It may be gone already.
        self.kill().ok();
    }
}

/// Runs the server over the data in `directory`.
fn spawn(address: &str, peers: &str, directory: &Path) -> anyhow::Result<Child> {
    let clients = format!("http://{address}");
    let log = File::options().create(true).append(true).open(directory.join("log"))?;
    Command::new("etcd")
        .arg("--data-dir")
        .arg(directory.join("data"))
        .args(["--name", "tests", "--logger", "zap", "--log-level", "warn"])
        // A lone member elects itself at once.
        .args(["--heartbeat-interval", "20", "--election-timeout", "200"])
        .args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients])
        .args(["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers])
        .args(["--initial-cluster", &format!("tests={peers}")])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("cannot run etcd: install Debian's package etcd-server, or run `make deps`")
}

fn workers_prefix() -> String {
    format!("{PREFIX}/workers/")
}
