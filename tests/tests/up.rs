//! `outrider up` as a person runs it: the bundled pair, the printed command pasted into a shell, and every way in which it
//! ends.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};

use anyhow::{Context as _, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tests::checkpoint_copy::CheckpointCopy;
use tests::wait::{PATIENCE, until};
use tests::{pair, processes};

/// A running `outrider up` on free ports.
struct Up {
    child: Child,
    stdout: Receiver<String>,
    children: Vec<Pid>,
}

impl Up {
    /// Starts it, waits until it is ready, and returns the command that it prints for pasting.
    async fn start() -> anyhow::Result<(Self, String)> {
        let mut child = command(&[])?.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (lines, stdout) = channel();
        let pipe = child.stdout.take().context("stdout is a pipe")?;
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                if lines.send(line).is_err() {
                    return;
                }
            }
        });
        let mut up = Self { child, stdout, children: Vec::new() };
        let ready = up.line_with("outrider is ready at http://127.0.0.1:")?;
        ensure!(ready.contains("gRPC at http://127.0.0.1:"), "{ready}");
        let curl = up.line_with("curl ")?;
        up.children = children_of(up.child.id())?;
        ensure!(up.children.len() == 3, "router, draft and target, not {:?}", up.children);
        Ok((up, curl))
    }

    fn line_with(&mut self, start: &str) -> anyhow::Result<String> {
        loop {
            let line =
                self.stdout.recv_timeout(PATIENCE).with_context(|| format!("no line `{start}..` came"))?;
            if line.starts_with(start) {
                return Ok(line);
            }
        }
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill(Pid::from_raw(self.child.id().try_into()?), signal)?)
    }

    /// Waits for its end; returns how it ended and what it wrote to standard error.
    async fn end(mut self) -> anyhow::Result<(ExitStatus, String)> {
        let mut stderr = self.child.stderr.take().context("stderr is a pipe")?;
        let reader = std::thread::spawn(move || {
            let mut text = Vec::new();
            stderr.read_to_end(&mut text).map(|_| String::from_utf8_lossy(&text).into_owned())
        });
        let mut ended = None;
        until("`outrider up` ends", async || {
            ended = self.child.try_wait()?;
            Ok(ended.is_some())
        })
        .await?;
        // A child that is left holds the pipe open: that they are gone comes first.
        let children = std::mem::take(&mut self.children);
        until("its children are gone", async || Ok(children.iter().all(|child| is_gone(*child)))).await?;
        let stderr = reader.join().map_err(|_| anyhow::anyhow!("the reader of stderr panicked"))??;
        Ok((ended.context("it ended")?, stderr))
    }
}

impl Drop for Up {
    /// Children end with it, for their standard input closes.
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// `outrider up` in a process group of its own, as a shell starts it.
fn command(arguments: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(processes::program("outrider")?);
    command.args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"]).args(arguments);
    command.current_dir(pair::root()).stdin(Stdio::null()).process_group(0);
    Ok(command)
}

fn children_of(pid: u32) -> anyhow::Result<Vec<Pid>> {
    let mut children = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let list = std::fs::read_to_string(task?.path().join("children"))?;
        children.extend(list.split_whitespace().map(|pid| pid.parse().map(Pid::from_raw)));
    }
    Ok(children.into_iter().collect::<Result<_, _>>()?)
}

fn is_gone(pid: Pid) -> bool {
    // A child of a killed parent may stay in the table until whoever inherited it collects it.
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    state.map_or(true, |state| state.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}

#[tokio::test]
async fn the_printed_command_gets_a_completion_and_ctrl_c_ends_everything() -> anyhow::Result<()> {
    let (up, curl) = Up::start().await?;
    let output = Command::new("sh").arg("-c").arg(&curl).output()?;
    let answer = String::from_utf8(output.stdout)?;
    ensure!(output.status.success(), "{curl}\nended with {}: {answer}", output.status);
    ensure!(answer.trim_end().ends_with("data: [DONE]"), "{answer}");
    let chunks =
        answer.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let chunks: Vec<Value> = chunks.map(serde_json::from_str).collect::<Result<_, _>>()?;
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    ensure!(text.len() > 20, "{text:?}");

    up.signal(Signal::SIGINT)?;
    let (status, stderr) = up.end().await?;
    ensure!(status.code() == Some(0), "{status}\n{stderr}");
    ensure!(stderr.ends_with("outrider: stopped by SIGINT\n"), "{stderr}");
    for (name, doing) in
        [("target-0", "loading models/demo/target"), ("router", "waiting for a target worker")]
    {
        ensure!(stderr.contains(&format!("{name}: {doing}")), "{stderr}");
        ensure!(stderr.contains(&format!("{name}: ready after ")), "{stderr}");
    }
    Ok(())
}

#[tokio::test]
async fn a_process_that_dies_ends_everything_and_is_named() -> anyhow::Result<()> {
    let (up, _) = Up::start().await?;
    let draft = up.children.iter().find(|pid| {
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command.contains("outrider-draft-worker")
    });
    let draft = *draft.context("one child is the draft worker")?;
    kill(draft, Signal::SIGKILL)?;
    let (status, stderr) = up.end().await?;
    ensure!(status.code() == Some(1), "{status}\n{stderr}");
    let expected = format!("error: stopped everything: draft-0 (pid {draft}) was killed by SIGKILL");
    ensure!(stderr.contains(&expected), "`{expected}` is not in:\n{stderr}");
    Ok(())
}

#[tokio::test]
async fn nothing_is_left_when_up_itself_is_killed() -> anyhow::Result<()> {
    let (up, _) = Up::start().await?;
    up.signal(Signal::SIGKILL)?;
    let (status, _) = up.end().await?;
    ensure!(status.signal() == Some(Signal::SIGKILL as i32), "{status}");
    Ok(())
}

#[tokio::test]
async fn a_draft_that_numbers_one_token_otherwise_is_refused_by_its_name() -> anyhow::Result<()> {
    let draft = CheckpointCopy::of(&pair::draft_dir())?;
    let old = draft.respell_token(2_000, "Unheard-of")?;
    let directory = draft.directory().to_str().context("a temporary path is text")?;
    let output = command(&["--target", "models/demo/target", "--draft", directory])?.output()?;
    let stderr = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(64) && output.stdout.is_empty(), "{}: {stderr}", output.status);
    ensure!(stderr.lines().count() == 1, "one line, not:\n{stderr}");
    for words in
        ["error: draft ", directory, "models/demo/target", "2000", &format!("{old:?}"), "\"Unheard-of\""]
    {
        ensure!(stderr.contains(words), "`{words}` is not in: {stderr}");
    }
    Ok(())
}

#[tokio::test]
async fn a_checkpoint_that_cannot_be_loaded_ends_everything_with_its_reason() -> anyhow::Result<()> {
    let target = CheckpointCopy::of(&pair::target_dir())?;
    target.edit("model.safetensors", |bytes| bytes.truncate(bytes.len() / 2))?;
    let directory = target.directory().to_str().context("a temporary path is text")?;
    let output = command(&["--target", directory, "--draft", "ngram"])?.output()?;
    let stderr = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1) && output.stdout.is_empty(), "{}: {stderr}", output.status);
    let (_, reason) =
        stderr.split_once("error: stopped everything: target-0 (pid ").context(stderr.clone())?;
    for words in ["exited with status 1", "error: ", "model.safetensors", "truncated"] {
        ensure!(reason.contains(words), "`{words}` is not in: {reason}");
    }
    Ok(())
}
