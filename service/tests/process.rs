//! The life of a process, tested from outside: what ends it, what it logs, and its exit code.
//!
//! A process cannot run inside a test, so each test runs itself again; the second process plays a role.

#![forbid(unsafe_code)]
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "all of this crate is a test, its second process included"
)]

use std::process::{ExitCode, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use service::config::{EXIT_BAD_CONFIG, Faults, env_var};
use service::health::Health;
use service::process::{ProcessConfig, RawProcess, run};
use service::shutdown::Lifetime;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdin, Command};

/// Set in the second process.
const RUN_AGAIN: &str = "OUTRIDER_TEST_RUN_AGAIN";

/// Timeout of expected events; only a failing test waits this long.
const AMPLE: Duration = Duration::from_secs(20);

/// A second process, with the lines it writes to stderr.
struct Role {
    child: Child,
    told: Lines<BufReader<ChildStderr>>,
    stdin: Option<ChildStdin>,
}

impl Role {
    fn start(test: &str) -> Self {
        // The tests themselves may run under `nohup`.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP").arg(std::env::current_exe().unwrap());
        Self::start_by(command, test)
    }

    /// `command` ends with the name of this test program.
    fn start_by(mut command: Command, test: &str) -> Self {
        let mut child = command
            .args(["--exact", test, "--nocapture"])
            .env(RUN_AGAIN, "yes")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let told = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { stdin: child.stdin.take(), child, told }
    }

    /// Reads until a line contains this text.
    async fn tells(&mut self, expected: &str) {
        let mut before = Vec::new();
        let line = async {
            while let Some(line) = self.told.next_line().await.unwrap() {
                if line.contains(expected) {
                    return;
                }
                before.push(line);
            }
            panic!("it ended without telling `{expected}`: {before:#?}");
        };
        tokio::time::timeout(AMPLE, line).await.expect(expected);
    }

    fn signal(&self, signal: Signal) {
        let id = self.child.id().expect("a running process");
        kill(Pid::from_raw(id.try_into().unwrap()), signal).unwrap();
    }
}

fn config(exit_on_stdin_close: bool) -> ProcessConfig {
    let mut config = RawProcess::default().validate(&mut Faults::new()).unwrap();
    config.exit_on_stdin_close = exit_on_stdin_close;
    config
}

/// Plays a role in the second process and writes how it ended.
fn play<F>(exit_on_stdin_close: bool, start: impl FnOnce(Lifetime, Health) -> F)
where
    F: Future<Output = anyhow::Result<()>>,
{
    let code = run(0, "outrider-test", &config(exit_on_stdin_close), start);
    let word = if code == ExitCode::SUCCESS { "success" } else { "failure" };
    eprintln!("ended with {word}");
}

/// A role that serves one request, which ends only after the drain has begun.
async fn serve_one_request(lifetime: Lifetime, health: Health) -> anyhow::Result<()> {
    health.set_ready();
    let (draining, request) = (lifetime.draining(), lifetime.work("request"));
    lifetime.spawn("server", async move {
        draining.await;
        assert!(!health.is_ready());
        eprintln!("the request ends");
        drop(request);
    });
    eprintln!("ready");
    Ok(())
}

#[tokio::test]
async fn a_signal_drains_and_ends_well() {
    if env_var(RUN_AGAIN).is_some() {
        return off_the_runtime(|| play(false, serve_one_request)).await;
    }
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut role = Role::start("a_signal_drains_and_ends_well");
        role.tells("ready").await;
        role.signal(signal);
        role.tells("the request ends").await;
        role.tells("ended with success").await;
    }
}

/// The terminal of a process that `nohup` started may be closed.
#[tokio::test]
async fn nohup_keeps_its_meaning() {
    if env_var(RUN_AGAIN).is_some() {
        return off_the_runtime(|| play(false, serve_one_request)).await;
    }
    let mut command = Command::new("nohup");
    command.arg(std::env::current_exe().unwrap());
    let mut role = Role::start_by(command, "nohup_keeps_its_meaning");
    role.tells("ready").await;
    role.signal(Signal::SIGHUP);
    role.signal(Signal::SIGTERM);
    // A line of the log: "the request ends" may come before or after it.
    role.tells("cause=\"SIGTERM\"").await;
    role.tells("ended with success").await;
}

/// A role whose request ends only when it is cancelled.
async fn serve_a_request_that_hangs(lifetime: Lifetime, health: Health) -> anyhow::Result<()> {
    health.set_ready();
    let (draining, cancelled, request) =
        (lifetime.draining(), lifetime.cancelled(), lifetime.work("request"));
    lifetime.spawn("server", async move {
        draining.await;
        eprintln!("the drain waits");
        cancelled.await;
        drop(request);
    });
    eprintln!("ready");
    Ok(())
}

/// The grace period may be up to an hour.
#[tokio::test]
async fn a_second_signal_ends_the_drain() {
    if env_var(RUN_AGAIN).is_some() {
        return off_the_runtime(|| play(false, serve_a_request_that_hangs)).await;
    }
    for (first, second) in [(Signal::SIGTERM, Signal::SIGTERM), (Signal::SIGTERM, Signal::SIGINT)] {
        let mut role = Role::start("a_second_signal_ends_the_drain");
        role.tells("ready").await;
        role.signal(first);
        role.tells("the drain waits").await;
        role.signal(second);
        role.tells("stopping at once").await;
        role.tells("ended with success").await;
    }
}

#[tokio::test]
async fn a_closed_stdin_ends_it_where_asked_for() {
    if env_var(RUN_AGAIN).is_some() {
        return off_the_runtime(|| play(true, serve_one_request)).await;
    }
    let mut role = Role::start("a_closed_stdin_ends_it_where_asked_for");
    role.tells("ready").await;
    drop(role.stdin.take());
    role.tells("the request ends").await;
    role.tells("ended with success").await;
}

#[tokio::test]
async fn a_start_that_fails_says_why() {
    if env_var(RUN_AGAIN).is_some() {
        let start =
            |_, _| async { Err(anyhow::anyhow!("no such file").context("cannot load model.safetensors")) };
        return off_the_runtime(move || play(false, start)).await;
    }
    let mut role = Role::start("a_start_that_fails_says_why");
    role.tells("error: cannot load model.safetensors: no such file").await;
    role.tells("ended with failure").await;
}

#[tokio::test]
async fn a_role_that_failed_for_good_ends() {
    if env_var(RUN_AGAIN).is_some() {
        let start = |_, health: Health| async move {
            health.set_failed("the device thread died");
            Ok(())
        };
        return off_the_runtime(move || play(false, start)).await;
    }
    let mut role = Role::start("a_role_that_failed_for_good_ends");
    role.tells("the device thread died").await;
    role.tells("ended with failure").await;
}

#[tokio::test]
async fn a_panic_of_an_essential_task_ends_it() {
    if env_var(RUN_AGAIN).is_some() {
        let start = |lifetime: Lifetime, health: Health| async move {
            health.set_ready();
            lifetime.spawn_essential("listener", async { panic!("on purpose, by a test") });
            Ok(())
        };
        return off_the_runtime(move || play(false, start)).await;
    }
    let mut role = Role::start("a_panic_of_an_essential_task_ends_it");
    role.tells("on purpose, by a test").await;
    role.tells("that the process cannot do without").await;
    role.tells("ended with failure").await;
}

/// A role that cannot finish its request: the task that serves it panics once the drain has begun.
async fn panic_in_the_drain(lifetime: Lifetime, health: Health) -> anyhow::Result<()> {
    health.set_ready();
    let (draining, request) = (lifetime.draining(), lifetime.work("request"));
    lifetime.spawn_essential("scheduler", async move {
        let _request = request;
        draining.await;
        panic!("on purpose, by a test")
    });
    eprintln!("ready");
    Ok(())
}

#[tokio::test]
async fn a_panic_of_an_essential_task_in_the_drain_is_a_failure() {
    if env_var(RUN_AGAIN).is_some() {
        return off_the_runtime(|| play(false, panic_in_the_drain)).await;
    }
    let mut role = Role::start("a_panic_of_an_essential_task_in_the_drain_is_a_failure");
    role.tells("ready").await;
    role.signal(Signal::SIGTERM);
    role.tells("on purpose, by a test").await;
    role.tells("that the process cannot do without").await;
    role.tells("ended with failure").await;
}

/// Exit code 64, as for every other setting, so that a supervisor does not restart the process.
#[tokio::test]
async fn a_bad_setting_of_traces_is_a_bad_configuration() {
    const NAME: &str = "a_bad_setting_of_traces_is_a_bad_configuration";
    if env_var(RUN_AGAIN).is_some() {
        return off_the_runtime(|| {
            let code = run(0, "outrider-test", &config(false), |_, _| async { Ok(()) });
            eprintln!("a bad configuration: {}", code == ExitCode::from(EXIT_BAD_CONFIG));
        })
        .await;
    }
    for (variable, value) in [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.crt"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/nowhere/tls.key"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "no address"),
    ] {
        let mut command = Command::new("env");
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1").env(variable, value);
        command.arg(std::env::current_exe().unwrap());
        let mut role = Role::start_by(command, NAME);
        role.tells("OTEL_EXPORTER_OTLP_").await;
        role.tells("a bad configuration: true").await;
    }
}

/// The default hook of panics waits for the reader of a full pipe.
#[tokio::test]
async fn a_process_whose_log_nobody_reads_ends_after_a_panic() {
    if env_var(RUN_AGAIN).is_some() {
        let start = |lifetime: Lifetime, _: Health| async move {
            lifetime.spawn_essential("listener", async {
                // More than a pipe holds.
                (0..4_000).for_each(|line| tracing::info!(line, "a line that nobody reads"));
                panic!("on purpose, by a test")
            });
            Ok(())
        };
        return off_the_runtime(move || {
            let _code = run(0, "outrider-test", &config(false), start);
        })
        .await;
    }
    let mut role = Role::start("a_process_whose_log_nobody_reads_ends_after_a_panic");
    let ended = tokio::time::timeout(AMPLE, role.child.wait()).await.expect("it ends");
    assert!(ended.unwrap().success());
}

/// `run` creates a runtime, which must not start inside another.
async fn off_the_runtime(play: impl FnOnce() + Send + 'static) {
    tokio::task::spawn_blocking(play).await.unwrap();
}
