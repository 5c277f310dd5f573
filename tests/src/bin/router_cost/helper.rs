//! Processes of this program's own: the bare ends and the relay that a measurement needs beside the cluster. Each says in its first line where it
//! serves, if it does, and ends when its stdin is closed: with whoever started it, however that ended.

use std::ffi::OsStr;
use std::process::Stdio;

use anyhow::Context as _;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// A process of this program, and the URL that it serves at.
pub(crate) struct Helper {
    process: Child,
    pub(crate) url: String,
}

impl Helper {
    /// Starts this program with `arguments`; `by` other programs that then become it, if any.
    pub(crate) async fn start(by: &[&str], arguments: &[String]) -> anyhow::Result<Self> {
        let program = std::env::current_exe()?;
        let words = by.iter().map(OsStr::new).chain([program.as_os_str()]);
        let words: Vec<&OsStr> = words.chain(arguments.iter().map(OsStr::new)).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let process = command.kill_on_drop(true).spawn();
        let mut process = process.with_context(|| format!("starting {words:?}"))?;
        let stdout = process.stdout.take().context("a helper has no output")?;
        let url = BufReader::new(stdout).lines().next_line().await?;
        let url = url.with_context(|| format!("{arguments:?} ended without a word"))?;
        Ok(Self { process, url })
    }

    pub(crate) fn pid(&self) -> anyhow::Result<u32> {
        self.process.id().context("the helper has ended")
    }

    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        Ok(self.process.kill().await?)
    }
}

/// Ends when whoever started this process has ended.
pub(crate) async fn orphaned() {
    let stdin = tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
    // However reading ends, nobody is there any more.
    drop(stdin.await);
}
