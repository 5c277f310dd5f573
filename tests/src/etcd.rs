//! A real etcd on loopback with separate data: one member, or a cluster of several.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use etcd_client::{Client, DeleteOptions, GetOptions};
use outrider_cli::cluster::free_address;
use tempfile::TempDir;
use tokio::time::timeout;

use crate::wait::until;

/// Prefix of all keys of the tests' cluster.
const PREFIX: &str = "outrider-tests";

/// Timeout of one request.
const ANSWER: Duration = Duration::from_secs(2);

/// Running members. Dropping them kills all of them.
#[derive(Debug)]
pub struct Etcd {
    members: Vec<Member>,
    directory: TempDir,
}

/// One server process, or its address and data after it was killed.
#[derive(Debug)]
struct Member {
    name: String,
    address: String,
    peers: String,
    child: Option<Child>,
}

impl Etcd {
    /// Starts one member and waits until it answers.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_members(1).await
    }

    /// Starts a cluster of `num_members` and waits until all of them answer.
    pub async fn start_members(num_members: usize) -> anyhow::Result<Self> {
        let mut members = Vec::new();
        for idx in 0..num_members {
            let (address, peers) = (free_address()?.to_string(), format!("http://{}", free_address()?));
            members.push(Member { name: format!("member-{idx}"), address, peers, child: None });
        }
        let mut etcd = Self { members, directory: tempfile::tempdir()? };
        for idx in 0..num_members {
            etcd.spawn(idx)?;
        }
        etcd.wait_until_all_answer().await?;
        Ok(etcd)
    }

    /// Restarts every killed member, at its address and with its data.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        for idx in 0..self.members.len() {
            if self.members[idx].child.is_none() {
                self.spawn(idx)?;
            }
        }
        self.wait_until_all_answer().await
    }

    /// The value of `--discovery` for other processes.
    pub fn uri(&self) -> String {
        let addresses: Vec<&str> = self.members.iter().map(|member| member.address.as_str()).collect();
        format!("etcd://{}/{PREFIX}", addresses.join(","))
    }

    /// The JSON of every registered worker.
    pub async fn workers(&self) -> anyhow::Result<Vec<serde_json::Value>> {
        let ask = async {
            let mut client = self.client().await?;
            anyhow::Ok(client.get(keys(), Some(GetOptions::new().with_prefix())).await?)
        };
        let answer = timeout(ANSWER, ask).await??;
        answer.kvs().iter().map(|kv| Ok(serde_json::from_slice(kv.value())?)).collect()
    }

    /// Deletes every worker's key, as `etcdctl del --prefix` does; returns their number.
    pub async fn delete_workers(&self) -> anyhow::Result<i64> {
        let mut client = self.client().await?;
        Ok(client.delete(keys(), Some(DeleteOptions::new().with_prefix())).await?.deleted())
    }

    /// Kills all members.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.members.iter_mut().try_for_each(Member::kill)
    }

    /// Kills the smallest majority, starting with member `first`; returns their number. The remaining members
    /// have no leader.
    pub fn kill_majority(&mut self, first: usize) -> anyhow::Result<usize> {
        let all = self.members.len();
        let majority = all / 2 + 1;
        (first..first + majority).try_for_each(|idx| self.members[idx % all].kill())?;
        Ok(majority)
    }

    /// Kills one member.
    pub fn kill_member(&mut self, idx: usize) -> anyhow::Result<()> {
        self.members[idx].kill()
    }

    /// Restarts a killed member with its data.
    pub fn start_member_again(&mut self, idx: usize) -> anyhow::Result<()> {
        self.spawn(idx)
    }

    /// Kills all members, deletes their data, and restarts them at the same addresses.
    pub async fn restart_without_data(&mut self) -> anyhow::Result<()> {
        self.kill()?;
        for idx in 0..self.members.len() {
            std::fs::remove_dir_all(self.data_of(idx))?;
            self.spawn(idx)?;
        }
        self.wait_until_all_answer().await
    }

    fn data_of(&self, idx: usize) -> PathBuf {
        self.directory.path().join(&self.members[idx].name)
    }

    fn spawn(&mut self, idx: usize) -> anyhow::Result<()> {
        let cluster: Vec<String> =
            self.members.iter().map(|member| format!("{}={}", member.name, member.peers)).collect();
        let Member { name, address, peers, .. } = &self.members[idx];
        let clients = format!("http://{address}");
        let log = File::options().create(true).append(true).open(self.directory.path().join("log"))?;
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(self.data_of(idx))
            .args(["--name", name, "--logger", "zap", "--log-level", "warn"])
            // A single member elects itself at once; three on a busy machine must not hold elections all the
            // time.
            .args(if cluster.len() == 1 {
                ["--heartbeat-interval", "20", "--election-timeout", "200"]
            } else {
                ["--heartbeat-interval", "100", "--election-timeout", "1000"]
            })
            .args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients])
            .args(["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers])
            .args(["--initial-cluster", &cluster.join(",")])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot run etcd: install Debian's package etcd-server, or run `make deps`")?;
        self.members[idx].child = Some(child);
        Ok(())
    }

    /// A client of a running member.
    async fn client(&self) -> anyhow::Result<Client> {
        let running = self.members.iter().find(|member| member.child.is_some());
        running.context("every member was killed")?.client().await
    }

    async fn wait_until_all_answer(&mut self) -> anyhow::Result<()> {
        for idx in 0..self.members.len() {
            until("etcd answers", async || self.answers(idx).await).await?;
        }
        Ok(())
    }

    async fn answers(&mut self, idx: usize) -> anyhow::Result<bool> {
        let child = self.members[idx].child.as_mut().context("this member was killed")?;
        if let Some(status) = child.try_wait()? {
            let log = std::fs::read_to_string(self.directory.path().join("log"))?;
            bail!("etcd ended with {status}:\n{log}");
        }
        // A linearizable read: only a cluster with a leader answers it.
        let ask = async { anyhow::Ok(self.members[idx].client().await?.get(keys(), None).await?) };
        Ok(timeout(ANSWER, ask).await.is_ok_and(|answer| answer.is_ok()))
    }
}

impl Member {
    async fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::connect([self.address.as_str()], None).await?)
    }

    fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // They may have been killed already.
        self.kill().ok();
    }
}

fn keys() -> String {
    format!("{PREFIX}/workers/")
}
