//! Child processes that run this program: the echo servers and the relay that a measurement needs besides the
//! cluster. Each prints its URL in the first line, and exits when its stdin closes, that is, when the process
//! that started it ends for any reason.

use std::process::Stdio;

use anyhow::Context as _;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// A child process of this program and its URL.
pub(crate) struct Helper {
    process: Child,
    pub(crate) url: String,
}

impl Helper {
    /// Starts this program with `arguments`.
    pub(crate) async fn start(arguments: &[String]) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.kill_on_drop(true).spawn()?;
        let stdout = process.stdout.take().context("a helper has no output")?;
        let url = BufReader::new(stdout).lines().next_line().await?;
        let url = url.with_context(|| format!("{arguments:?} ended without printing its address"))?;
        Ok(Self { process, url })
    }

    pub(crate) fn pid(&self) -> anyhow::Result<u32> {
        self.process.id().context("the helper has ended")
    }

    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        Ok(self.process.kill().await?)
    }
}
