//! `outrider up` as a user runs it: the bundled pair, the printed command pasted into a shell, and every way
//! in which it ends.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};

use anyhow::{Context as _, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tests::checkpoint_copy::CheckpointCopy;
use tests::wait::{WAIT_TIMEOUT, until};
use tests::{pair, processes};

/// A running `outrider up` on free ports.
struct Up {
    child: Child,
    stdout: Receiver<String>,
    /// Lines of standard output read so far.
    printed: Vec<String>,
    children: Vec<Pid>,
}

impl Up {
    /// Starts it, waits until it is ready, and returns the command that it prints for pasting.
    async fn start(arguments: &[&str]) -> anyhow::Result<(Self, String)> {
        Self::start_command(command(arguments)?)
    }

    fn start_command(mut command: Command) -> anyhow::Result<(Self, String)> {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (lines, stdout) = channel();
        let pipe = child.stdout.take().context("stdout is a pipe")?;
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                if lines.send(line).is_err() {
                    return;
                }
            }
        });
        let mut up = Self { child, stdout, printed: Vec::new(), children: Vec::new() };
        let ready = up.line_with("outrider is ready at http://127.0.0.1:")?;
        ensure!(ready.contains("gRPC at http://127.0.0.1:"), "{ready}");
        let curl = up.line_with("curl ")?;
        up.children = children_of(up.child.id())?;
        ensure!(up.children.len() >= 2, "router, target and mostly a draft, not {:?}", up.children);
        Ok((up, curl))
    }

    fn line_with(&mut self, start: &str) -> anyhow::Result<String> {
        loop {
            let line = self
                .stdout
                .recv_timeout(WAIT_TIMEOUT)
                .with_context(|| format!("no line `{start}..` came"))?;
            self.printed.push(line.clone());
            if line.starts_with(start) {
                return Ok(line);
            }
        }
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill(Pid::from_raw(self.child.id().try_into()?), signal)?)
    }

    /// Waits for its end; returns its exit status and its standard error.
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
        // A remaining child would keep the pipe open, so first wait until all are gone.
        let children = std::mem::take(&mut self.children);
        until("its children are gone", async || Ok(children.iter().all(|child| is_gone(*child)))).await?;
        let stderr = reader.join().map_err(|_| anyhow::anyhow!("the reader of stderr panicked"))??;
        Ok((ended.context("it ended")?, stderr))
    }
}

impl Drop for Up {
    /// Its children exit too, because their standard input closes.
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Variable of the workers' setting to measure step times at their start.
const PROFILE_STEPS: &str = "OUTRIDER_PROFILE_STEPS";

/// `outrider up` in a separate process group, as a shell starts it. Workers measure no step times: most of
/// these tests do not concern the choice of k.
fn command(arguments: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(processes::program("outrider")?);
    command
        .args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .args(["--threads", "1"])
        .args(arguments);
    command.env(PROFILE_STEPS, "false");
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
    // A child of a killed parent may stay in the process table until its new parent reaps it.
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    state.map_or(true, |state| state.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}

/// Without ballast and evidence, which these tests do not concern.
const LIGHT: [&str; 3] = ["--ballast", "0", "--no-evidence"];

#[tokio::test]
async fn the_printed_command_gets_a_completion_and_ctrl_c_stops_all_processes() -> anyhow::Result<()> {
    let (mut up, curl) = Up::start(&LIGHT).await?;
    let console = up.line_with("console: http://127.0.0.1:")?;
    let console = console.trim_start_matches("console: ").split(' ').next().unwrap_or_default();
    let page = reqwest::get(console).await?.text().await?;
    ensure!(page.contains("<title>"), "{console} is no page: {page}");
    let output = Command::new("sh").arg("-c").arg(&curl).output()?;
    let answer = String::from_utf8(output.stdout)?;
    ensure!(output.status.success(), "{curl}\nended with {}: {answer}", output.status);
    ensure!(answer.trim_end().ends_with("data: [DONE]"), "{answer}");
    let chunks =
        answer.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let chunks: Vec<Value> = chunks.map(serde_json::from_str).collect::<Result<_, _>>()?;
    // The command has no seed, so the length of the text is unknown.
    ensure!(chunks.iter().any(|chunk| chunk["choices"][0]["finish_reason"].is_string()), "{answer}");

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
async fn the_bundled_pair_gets_ballast_and_shows_that_drafting_changes_no_text() -> anyhow::Result<()> {
    // The amount is a default that the command line's tests check; here it would only take time.
    let mut command = command(&["--ballast", "8M"])?;
    command.env_remove(PROFILE_STEPS);
    let (mut up, _) = Up::start_command(command)?;
    let pair = up.printed.iter().find(|line| line.starts_with("target models/demo/target")).cloned();
    ensure!(pair.is_some_and(|line| line.contains("8M parameters of ballast")), "{:?}", up.printed);
    let evidence = up.line_with("drafting: ")?;
    ensure!(evidence.contains("tokens/s"), "{evidence}");
    ensure!(evidence.contains("identical text (64 tokens, seed 7)"), "{evidence}");
    up.line_with("console: http://127.0.0.1:")?;
    up.signal(Signal::SIGTERM)?;
    let (status, stderr) = up.end().await?;
    ensure!(status.code() == Some(0), "{status}\n{stderr}");
    ensure!(
        stderr.contains("target-0: loading models/demo/target with 8M parameters of ballast"),
        "{stderr}"
    );
    ensure!(stderr.contains("ballast_parameters="), "the log names it: {stderr}");
    Ok(())
}

/// The environment of many companies names a proxy, which no request between processes of this machine may
/// take. This one takes connections and never answers.
#[tokio::test]
async fn a_proxy_of_the_environment_is_not_asked() -> anyhow::Result<()> {
    let proxy = std::net::TcpListener::bind("127.0.0.1:0")?;
    let mut command = command(&LIGHT)?;
    command.env("http_proxy", format!("http://{}", proxy.local_addr()?)).env_remove("no_proxy");
    let (mut up, curl) = Up::start_command(command)?;
    ensure!(curl.contains("\"model\":\"target\""), "{curl}");
    up.line_with("console: http://127.0.0.1:")?;
    proxy.set_nonblocking(true)?;
    let asked = proxy.accept();
    ensure!(asked.is_err(), "the proxy was asked: {asked:?}");
    up.signal(Signal::SIGINT)?;
    let (status, stderr) = up.end().await?;
    ensure!(status.code() == Some(0), "{status}\n{stderr}");
    Ok(())
}

/// As with `outrider up 2>&1 | head`: the cluster serves on, and is stopped in order.
#[tokio::test]
async fn the_cluster_does_not_depend_on_a_reader_of_its_output() -> anyhow::Result<()> {
    let (mut up, curl) = Up::start(&LIGHT).await?;
    drop(up.child.stderr.take());
    let output = Command::new("sh").arg("-c").arg(&curl).output()?;
    ensure!(String::from_utf8(output.stdout)?.trim_end().ends_with("data: [DONE]"));
    up.signal(Signal::SIGINT)?;
    let mut ended = None;
    until("`outrider up` ends", async || {
        ended = up.child.try_wait()?;
        Ok(ended.is_some())
    })
    .await?;
    ensure!(ended.is_some_and(|status| status.code() == Some(0)), "{ended:?}");
    Ok(())
}

#[tokio::test]
async fn nothing_is_measured_without_a_draft() -> anyhow::Result<()> {
    let (mut up, _) = Up::start(&["--ballast", "0", "--draft", "none"]).await?;
    up.line_with("console: http://127.0.0.1:")?;
    ensure!(!up.printed.iter().any(|line| line.starts_with("drafting: ")), "{:?}", up.printed);
    up.signal(Signal::SIGTERM)?;
    let (status, stderr) = up.end().await?;
    ensure!(status.code() == Some(0) && !stderr.contains("drafting: "), "{status}\n{stderr}");
    Ok(())
}

#[tokio::test]
async fn a_process_that_fails_is_named_and_stops_all_others() -> anyhow::Result<()> {
    let (up, _) = Up::start(&LIGHT).await?;
    ensure!(up.children.len() == 3, "router, draft and target, not {:?}", up.children);
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
async fn no_process_survives_when_up_is_killed() -> anyhow::Result<()> {
    let (up, _) = Up::start(&LIGHT).await?;
    up.signal(Signal::SIGKILL)?;
    let (status, _) = up.end().await?;
    ensure!(status.signal() == Some(Signal::SIGKILL as i32), "{status}");
    Ok(())
}

#[tokio::test]
async fn a_draft_with_one_different_token_id_is_rejected_and_the_token_named() -> anyhow::Result<()> {
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

/// Returns the error line of an `outrider up` that cannot serve: a single line besides those about loading.
fn refusal(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output()?;
    let stderr = String::from_utf8(output.stderr)?;
    ensure!(output.status.code().is_some_and(|code| code != 0), "{}: {stderr}", output.status);
    ensure!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    let is_progress =
        |line: &&str| ["target-0: ", "draft-0: ", "router: "].iter().any(|name| line.starts_with(name));
    let lines: Vec<&str> = stderr.lines().filter(|line| !is_progress(line)).collect();
    let [line] = lines[..] else { anyhow::bail!("one line, not:\n{stderr}") };
    Ok(line.to_owned())
}

/// A way to damage a copy of the bundled target, and the words that the line must contain.
type Damage = (fn(&CheckpointCopy) -> anyhow::Result<()>, &'static [&'static str]);

const DAMAGES: [Damage; 7] = [
    (
        |copy| copy.edit("model.safetensors", |bytes| bytes.truncate(bytes.len() / 2)),
        &["target-0 cannot start", "model.safetensors", "truncated"],
    ),
    (
        |copy| set_config(copy, "architectures", serde_json::json!(["GemmaForCausalLM"])),
        &["target-0 cannot start", "config.json", "GemmaForCausalLM", "is not supported", "LlamaForCausalLM"],
    ),
    (|copy| copy.remove("model.safetensors"), &["--target", "has no model.safetensors", "checkpoint"]),
    (|copy| copy.remove("config.json"), &["--target", "has no config.json", "checkpoint"]),
    (
        |copy| copy.edit("tokenizer.json", |bytes| bytes.truncate(1_000)),
        &["target-0 cannot start", "tokenizer.json"],
    ),
    (
        // Its token list can be parsed, which is all that a worker needs of it, but it cannot encode text.
        |copy| copy.edit_json("tokenizer.json", |tokenizer| tokenizer["model"]["type"] = "Unheard-of".into()),
        &["target-0 cannot start", "tokenizer.json", "its text cannot be served", "save_pretrained"],
    ),
    (
        |copy| {
            copy.edit_json("tokenizer_config.json", |config| {
                config.insert("chat_template".to_owned(), "{% for %}".into());
            })?;
            Ok(std::fs::write(copy.path("chat_template.jinja"), "{% for %}")?)
        },
        &["target-0 cannot start", "chat template", "save_pretrained"],
    ),
];

fn set_config(copy: &CheckpointCopy, field: &str, value: Value) -> anyhow::Result<()> {
    copy.edit_json("config.json", |config| {
        config.insert(field.to_owned(), value);
    })
}

#[test]
fn a_checkpoint_that_cannot_be_served_is_explained_by_one_line() -> anyhow::Result<()> {
    for (damage, words) in DAMAGES {
        let target = CheckpointCopy::of(&pair::target_dir())?;
        damage(&target)?;
        let directory = target.directory().to_str().context("a temporary path is text")?;
        let line = refusal(&mut command(&["--target", directory, "--draft", "ngram"])?)?;
        for words in words.iter().chain(&["error: ", directory]) {
            ensure!(line.contains(words), "`{words}` is not in: {line}");
        }
    }
    Ok(())
}

#[test]
fn a_port_in_use_is_explained_by_one_line() -> anyhow::Result<()> {
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let mut command = Command::new(processes::program("outrider")?);
    command
        .args(["up", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--http", &address])
        .current_dir(pair::root());
    let line = refusal(command.stdin(Stdio::null()))?;
    for words in ["error: --http", &address, "is taken", "choose another"] {
        ensure!(line.contains(words), "`{words}` is not in: {line}");
    }
    Ok(())
}

#[test]
fn too_little_memory_is_explained_by_one_line() -> anyhow::Result<()> {
    // The shell limits the address space of each process: 18 GB of ballast do not fit, and may not fit in the
    // machine. With an arena of 64 MiB for each thread, glibc would leave no address space for threads.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -v 1000000; exec \"$@\"", "sh"]);
    let up = command(&["--ballast", "9B"])?;
    limited.env("MALLOC_ARENA_MAX", "1");
    limited.arg(up.get_program()).args(up.get_args()).current_dir(pair::root()).stdin(Stdio::null());
    let line = refusal(&mut limited)?;
    for words in ["error: target-0 cannot start", "memory", "use a smaller model"] {
        ensure!(line.contains(words), "`{words}` is not in: {line}");
    }
    Ok(())
}

/// With and without a driver: no machine has that many GPUs.
#[test]
fn a_missing_gpu_is_explained_by_one_line() -> anyhow::Result<()> {
    let line = refusal(&mut command(&["--ballast", "0", "--device", "cuda:63"])?)?;
    ensure!(line.starts_with("error: target-0 cannot start: --device cuda:63: "), "{line}");
    let reasons = ["libcuda.so was not found: install the nvidia driver", "there is no cuda:63"];
    ensure!(reasons.iter().any(|reason| line.contains(reason)), "{line}");
    Ok(())
}
