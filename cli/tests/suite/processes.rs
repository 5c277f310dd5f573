//! The cluster's control of its child processes, tested with small shell scripts instead of servers.

#![expect(clippy::unwrap_used, reason = "a test file: its harness functions fail the test by panicking")]

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outrider_cli::cluster::{
    Binaries, ClusterError, ClusterSpec, DraftKind, LogSink, NoLogs, Process, ProcessCluster, ProcessSpec,
};
use speculation::Role;

/// Runs until its standard input closes, like the servers with `--exit-on-stdin-close`.
const PATIENT: &str = "exec cat >/dev/null";
const GRACE: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Collected(Mutex<Vec<String>>);

impl LogSink for Collected {
    fn line(&self, process: &str, line: &str) {
        self.0.lock().unwrap().push(format!("{process}: {line}"));
    }
}

fn shell(name: &str, script: &str) -> ProcessSpec {
    ProcessSpec {
        name: name.to_owned(),
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        env: vec![("GREETING".to_owned(), "hello".to_owned())],
    }
}

fn spawn(script: &str) -> Process {
    Process::spawn(shell("draft-0", script), Arc::new(NoLogs)).unwrap()
}

fn is_alive(pid: u32) -> bool {
    kill(Pid::from_raw(pid as i32), None).is_ok()
}

/// Whether a process still runs. One that has ended keeps its id until its parent has waited for it.
fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

async fn ends(pid: u32) -> bool {
    let ended = async {
        while is_running(pid) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(GRACE, ended).await.is_ok()
}

/// A process and the id of a process that it has started.
async fn spawn_with_child() -> (Process, u32) {
    let process = spawn("sleep 60 >/dev/null 2>&1 & echo $!; wait");
    while process.lines().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let child = process.lines()[0].parse().unwrap();
    (process, child)
}

/// A directory with three "servers" that run these scripts.
fn binaries(directory: &Path, scripts: [(&str, &str); 3]) -> Binaries {
    for (name, script) in scripts {
        let path: PathBuf = directory.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    Binaries::in_directory(directory).unwrap()
}

fn cluster(directory: &Path, target_script: &str) -> ProcessCluster {
    let binaries = binaries(
        directory,
        [
            ("outrider-router", PATIENT),
            ("outrider-draft-worker", PATIENT),
            ("outrider-target-worker", target_script),
        ],
    );
    let spec = ClusterSpec::new(binaries, PathBuf::from("/models/target"), DraftKind::Ngram);
    ProcessCluster::launch(spec, Arc::new(NoLogs)).unwrap()
}

#[tokio::test]
async fn an_exit_code_is_reported_with_the_last_lines_of_standard_error() {
    let mut process = spawn("echo loading; echo model.safetensors is truncated >&2; exit 3");
    let report = process.wait().await;
    assert_eq!(report.cause(), "exited with status 3");
    assert_eq!(report.last_lines, ["model.safetensors is truncated"]);
    let text = report.to_string();
    assert!(text.starts_with(&format!("draft-0 (pid {}) exited with status 3", process.pid())), "{text}");
    assert!(text.ends_with("\n    model.safetensors is truncated"), "{text}");
}

#[tokio::test]
async fn a_signal_is_reported_by_name_and_standard_output_stands_in() {
    let mut process = spawn("echo only this; exec sleep 60");
    while process.lines().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    process.signal(Signal::SIGKILL);
    let report = process.wait().await;
    assert_eq!(report.cause(), "was killed by SIGKILL");
    assert_eq!(report.last_lines, ["only this"]);
    // A second wait reports the same, and a late signal reaches no process.
    process.signal(Signal::SIGKILL);
    assert_eq!(process.wait().await.cause(), "was killed by SIGKILL");
}

#[tokio::test]
async fn only_the_newest_lines_are_reported() {
    let report = spawn("seq 1 2000 >&2").wait().await;
    assert_eq!(report.last_lines.len(), 12);
    assert_eq!(report.last_lines.last().map(String::as_str), Some("2000"));
}

#[tokio::test]
async fn every_line_reaches_the_sink_under_the_process_name() {
    let sink = Arc::new(Collected::default());
    let script = "echo $GREETING; printf 'bad \\377 byte\\n' >&2; printf unfinished";
    Process::spawn(shell("target-1", script), Arc::clone(&sink) as _).unwrap().wait().await;
    let mut lines = sink.0.lock().unwrap().clone();
    lines.sort();
    assert_eq!(lines, ["target-1: bad \u{fffd} byte", "target-1: hello", "target-1: unfinished"]);
}

#[tokio::test]
async fn a_process_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let mut stubborn = spawn("trap '' TERM; echo ready; while true; do sleep 1; done");
    while stubborn.lines().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let report = stubborn.stop(Duration::from_millis(200)).await;
    assert_eq!(report.status.and_then(|status| status.signal()), Some(Signal::SIGKILL as i32));
    let mut polite = spawn("exec sleep 60");
    assert_eq!(polite.stop(GRACE).await.cause(), "was killed by SIGTERM");
}

#[tokio::test]
async fn dropping_a_process_ends_it() {
    let process = spawn("exec sleep 60");
    let pid = process.pid();
    assert!(is_alive(pid));
    drop(process);
    assert!(!is_alive(pid));
}

#[tokio::test]
async fn a_killed_process_leaves_none_that_it_started() {
    let (mut killed, child) = spawn_with_child().await;
    assert!(is_running(child));
    killed.signal(Signal::SIGKILL);
    killed.wait().await;
    assert!(ends(child).await, "it outlived a killed process");

    let (mut killed, child) = spawn_with_child().await;
    kill(Pid::from_raw(killed.pid() as i32), Signal::SIGKILL).unwrap();
    assert_eq!(killed.wait().await.cause(), "was killed by SIGKILL");
    assert!(ends(child).await, "it outlived a process that somebody else killed");

    let (dropped, child) = spawn_with_child().await;
    drop(dropped);
    assert!(ends(child).await, "it outlived a dropped process");

    // A process that can still act ends its own children, in its own order.
    let (mut terminated, child) = spawn_with_child().await;
    assert_eq!(terminated.stop(GRACE).await.cause(), "was killed by SIGTERM");
    assert!(is_running(child), "SIGTERM reached more than the process");
    kill(Pid::from_raw(child as i32), Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn waiting_does_not_close_the_standard_input() {
    let mut process = spawn(PATIENT);
    let waited = tokio::time::timeout(Duration::from_millis(200), process.wait()).await;
    assert!(waited.is_err(), "it ended: {}", waited.unwrap());
}

#[tokio::test]
async fn a_program_that_is_not_there_is_named() {
    let spec = ProcessSpec { program: "/nowhere/outrider-router".into(), ..shell("router", "") };
    let message = Process::spawn(spec, Arc::new(NoLogs)).err().unwrap().to_string();
    assert!(message.contains("router") && message.contains("/nowhere/outrider-router"), "{message}");
}

#[tokio::test]
async fn a_worker_that_dies_while_loading_fails_the_start_and_nothing_stays() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = cluster(directory.path(), "echo tensor lm_head.weight is missing >&2; exit 1");
    let pids = cluster.names().iter().map(|name| cluster.process(name).unwrap().pid()).collect::<Vec<_>>();
    assert_eq!(cluster.names(), ["target-0", "draft-0", "router"]);
    let error = cluster.wait_ready(Duration::from_secs(20), &mut |_, _| ()).await.unwrap_err();
    assert!(matches!(&error, ClusterError::Died(report) if report.name == "target-0"), "{error}");
    assert!(error.to_string().contains("lm_head.weight is missing"), "{error}");
    drop(cluster);
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
}

#[tokio::test]
async fn a_cluster_that_never_answers_says_who_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = cluster(directory.path(), PATIENT);
    let error = cluster.wait_ready(Duration::from_millis(300), &mut |_, _| ()).await.unwrap_err();
    let text = error.to_string();
    for name in ["router: nothing listens", "draft-0: nothing listens", "target-0: nothing listens"] {
        assert!(text.contains(name), "{text}");
    }
}

#[tokio::test]
async fn one_process_can_be_killed_and_started_again_while_the_others_run() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = cluster(directory.path(), PATIENT);
    let (before, router) =
        (cluster.process("draft-0").unwrap().pid(), cluster.process("router").unwrap().pid());
    cluster.signal("draft-0", Signal::SIGKILL).unwrap();
    let report = cluster.next_exit().await;
    assert_eq!((report.name.as_str(), report.cause().as_str()), ("draft-0", "was killed by SIGKILL"));
    // The exit is known now and is not reported again.
    assert!(tokio::time::timeout(Duration::from_millis(100), cluster.next_exit()).await.is_err());
    let url = cluster.worker_url("draft-0").unwrap();
    cluster.restart("draft-0").await.unwrap();
    assert_ne!(cluster.process("draft-0").unwrap().pid(), before);
    assert_eq!(cluster.worker_url("draft-0").unwrap(), url);
    assert_eq!(cluster.process("router").unwrap().pid(), router);
    assert_eq!(cluster.add_worker(Role::Draft).unwrap(), "draft-1");
    assert!(matches!(cluster.signal("draft-9", Signal::SIGTERM), Err(ClusterError::NoSuchProcess { .. })));
}

#[tokio::test]
async fn stopping_ends_the_router_before_the_workers() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("ends");
    let script = |name: &str| {
        format!(
            "trap 'echo {name} >>{}; exit 0' TERM; echo up; while true; do sleep 0.02; done",
            log.display()
        )
    };
    let (router, draft, target) = (script("router"), script("worker"), script("worker"));
    let binaries = binaries(
        directory.path(),
        [
            ("outrider-router", &router),
            ("outrider-draft-worker", &draft),
            ("outrider-target-worker", &target),
        ],
    );
    let cluster = ProcessCluster::launch(
        ClusterSpec::new(binaries, PathBuf::from("/t"), DraftKind::Ngram),
        Arc::new(NoLogs),
    )
    .unwrap();
    while cluster.names().iter().any(|name| cluster.process(name).unwrap().lines().is_empty()) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let started = Instant::now();
    let reports = cluster.stop().await;
    assert!(started.elapsed() < GRACE);
    assert!(reports.iter().all(|report| report.cause() == "exited with status 0"), "{reports:?}");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "router\nworker\nworker\n");
}
