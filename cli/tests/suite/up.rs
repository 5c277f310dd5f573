//! `outrider up` as a user runs it: the real command, with small fake servers in place of the real ones.

#![expect(clippy::unwrap_used, reason = "a test file: its harness functions fail the test by panicking")]

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Answers every GET, at each of its addresses, with a list of one model, and every POST with tokens in the
/// format of the console's endpoint. Exits when its standard input closes. It reports 20 ms per token without
/// drafts and $FAKE_MS with them; if $FAKE_DIFFERS is set, drafts change one token. It finds no GPU.
const FAKE_SERVER: &str = r#"#!/usr/bin/env python3
import http.server, json, os, sys, threading
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
device = flags.get("--device", "cpu")
if device != "cpu":
    sys.exit(f"error: --device {device}: libcuda.so was not found: install the nvidia driver, or run with --device cpu")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "fake-model"}]}')
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        drafts = body["speculation"].get("enabled", True)
        ids = list(range(body["max_tokens"]))
        if drafts and "FAKE_DIFFERS" in os.environ:
            ids[5] = 999
        ms = len(ids) * float(os.environ.get("FAKE_MS", "10") if drafts else "20")
        end = {"ms": ms, "rounds": 9, "draft_tokens": 30 * drafts, "accepted_tokens": 9, "disabled_reason": None}
        start = {"request_id": "r", "model": "fake-model", "system_fingerprint": "f", "seed": body["seed"]}
        span = {"ms": ms, "tokens": [{"id": i, "text": "x", "drafted": False} for i in ids], "finish": "length"}
        self.send_response(200)
        self.end_headers()
        for line in ({"start": start}, {"span": span}, {"end": end}):
            self.wfile.write(json.dumps(line).encode() + b"\n")
    def log_message(self, *_):
        pass

# The address that readiness is asked at comes last: whoever is ready serves.
for address in filter(None, [flags.get("--http"), flags.get("--admin")]):
    host, port = address.split(":")
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
print("pid", os.getpid(), "level", flags["--log"], flush=True)
sys.stdin.read()
"#;
/// The arguments of every run: free ports.
const UP: [&str; 7] = ["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// `outrider up` with fake servers next to it.
struct Up {
    child: Child,
    directory: tempfile::TempDir,
}

impl Up {
    fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    fn start_with(arguments: &[&str], env: &[(&str, &str)]) -> Self {
        let directory = installed();
        let mut command = Command::new(directory.path().join("outrider"));
        command.args(UP).args(arguments).envs(env.iter().copied());
        Self::spawn(directory, command)
    }

    /// Runs `command`, which starts the program in `directory`.
    fn spawn(directory: tempfile::TempDir, mut command: Command) -> Self {
        let file = |name: &str| std::fs::File::create(directory.path().join(name)).unwrap();
        command.stdin(Stdio::null()).stdout(file("stdout")).stderr(file("stderr"));
        let child = command.spawn().unwrap();
        Self { child, directory }
    }

    /// Starts it and waits until it reports that it is ready.
    fn ready(arguments: &[&str]) -> Self {
        let up = Self::start(arguments);
        up.wait_ready();
        up
    }

    fn wait_ready(&self) {
        wait_for("the ready line", || self.stdout().contains("Ctrl-C stops it"));
    }

    fn stdout(&self) -> String {
        self.read("stdout")
    }

    fn stderr(&self) -> String {
        self.read("stderr")
    }

    fn read(&self, name: &str) -> String {
        let mut text = String::new();
        std::fs::File::open(self.directory.path().join(name)).unwrap().read_to_string(&mut text).unwrap();
        text
    }

    /// The process id that a fake server logged.
    fn pid_of(&self, name: &str) -> Pid {
        let mut pid = None;
        wait_for("the line with the process id", || {
            let stderr = self.stderr();
            // A line that is still being written has no line feed yet.
            let mut lines = stderr.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            let line = lines.find(|line| line.starts_with(name) && line.contains("| pid "));
            pid = line.and_then(|line| line.split("| pid ").nth(1)?.split_whitespace().next()?.parse().ok());
            pid.is_some()
        });
        Pid::from_raw(pid.unwrap())
    }

    fn children(&self) -> Vec<Pid> {
        ["router", "draft-0", "target-0"].iter().map(|name| self.pid_of(name)).collect()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    fn wait(&mut self) -> std::process::ExitStatus {
        let mut status = None;
        wait_for("the end of `outrider up`", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// A directory with the program and the fake servers next to it.
fn installed() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in ["outrider-router", "outrider-draft-worker", "outrider-target-worker"] {
        write_executable(&directory.path().join(name), FAKE_SERVER.as_bytes());
    }
    std::fs::copy(env!("CARGO_BIN_EXE_outrider"), directory.path().join("outrider")).unwrap();
    directory
}

fn write_executable(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < WAIT_TIMEOUT, "{what} did not come within {WAIT_TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn all_gone(pids: &[Pid]) -> bool {
    pids.iter().all(|pid| kill(*pid, None).is_err())
}

#[test]
fn ready_names_the_url_and_a_command_and_sigterm_ends_everything_with_success() {
    let mut up = Up::ready(&["--log", "debug"]);
    let (stdout, stderr, children) = (up.stdout(), up.stderr(), up.children());
    assert!(stdout.contains("outrider is ready at http://127.0.0.1:"), "{stdout}");
    assert!(
        stdout.contains("/v1/chat/completions") && stdout.contains(r#""model":"fake-model""#),
        "{stdout}"
    );
    assert!(stderr.contains("target-0: loading ") && stderr.contains("draft-0: ready after "), "{stderr}");
    assert!(stderr.contains("level debug"), "{stderr}");
    up.signal(Signal::SIGTERM);
    assert_eq!(up.wait().code(), Some(0), "{}", up.stderr());
    assert!(up.stderr().ends_with("outrider: stopped by SIGTERM\n"), "{}", up.stderr());
    assert!(all_gone(&children));
}

/// The terminal of a cluster that `nohup` started may be closed.
#[test]
fn nohup_keeps_its_meaning() {
    let directory = installed();
    let mut command = Command::new("nohup");
    command.arg(directory.path().join("outrider")).args(UP);
    let mut up = Up::spawn(directory, command);
    up.wait_ready();
    // `nohup` replaces itself with the program, so both have the same process id.
    let status = std::fs::read_to_string(format!("/proc/{}/status", up.child.id())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    // The lowest bit stands for SIGHUP.
    assert_eq!(u64::from_str_radix(ignored.trim(), 16).unwrap() & 1, 1, "{status}");
    up.signal(Signal::SIGHUP);
    up.signal(Signal::SIGTERM);
    assert_eq!(up.wait().code(), Some(0), "{}", up.stderr());
    assert!(up.stderr().ends_with("outrider: stopped by SIGTERM\n"), "{}", up.stderr());
}

#[test]
fn what_drafting_gains_is_one_line_also_where_it_is_a_loss() {
    let rows = [
        (
            "10",
            "drafting: 100.0 tokens/s against 50.0 without, 2.00 times as fast, identical text (64 tokens, seed 7)\n",
        ),
        (
            "25",
            "0.80 times as fast, identical text (64 tokens, seed 7); it does not pay for this pair on this machine\n",
        ),
    ];
    for (ms, expected) in rows {
        let up = Up::start_with(&[], &[("FAKE_MS", ms)]);
        wait_for("the last line", || up.stdout().contains("Ctrl-C stops it"));
        let (stdout, console) = (up.stdout(), up.stdout().find("console: http://127.0.0.1:"));
        let evidence = stdout.find(expected).unwrap_or_else(|| panic!("{expected:?} is not in:\n{stdout}"));
        assert!(stdout.find("outrider is ready") < Some(evidence) && Some(evidence) < console, "{stdout}");
    }
}

#[test]
fn a_text_that_drafts_change_ends_everything() {
    let mut up = Up::start_with(&[], &[("FAKE_DIFFERS", "1")]);
    assert_eq!(up.wait().code(), Some(1));
    let stderr = up.stderr();
    let last = stderr.lines().last().unwrap();
    assert!(
        last.starts_with("error: stopped everything: drafting changed the text from token 5 on (seed 7)"),
        "{stderr}"
    );
    assert!(all_gone(&up.children()) && !up.stdout().contains("drafting: "), "{}", up.stdout());
}

#[test]
fn nothing_is_measured_where_that_is_not_wanted() {
    for arguments in [&["--no-evidence"][..], &["--draft", "none"]] {
        // If it were measured, everything would stop.
        let up = Up::start_with(arguments, &[("FAKE_DIFFERS", "1")]);
        wait_for("the last line", || up.stdout().contains("Ctrl-C stops it"));
        assert!(!up.stdout().contains("drafting: "), "{}", up.stdout());
    }
}

#[test]
fn a_process_that_fails_is_named_and_stops_all_others() {
    let mut up = Up::ready(&[]);
    let children = up.children();
    kill(up.pid_of("draft-0"), Signal::SIGKILL).unwrap();
    assert_eq!(up.wait().code(), Some(1));
    let stderr = up.stderr();
    assert!(stderr.contains("error: stopped everything: draft-0 (pid "), "{stderr}");
    assert!(stderr.contains("was killed by SIGKILL"), "{stderr}");
    assert!(all_gone(&children));
}

/// A worker that needs a GPU says what is missing, and `up` repeats it.
#[test]
fn a_gpu_that_is_missing_is_explained_by_one_line() {
    for (arguments, worker) in
        [(&["--device", "cuda:0"][..], "target-0"), (&["--draft-device", "cuda:0"], "draft-0")]
    {
        let mut up = Up::start(arguments);
        assert_eq!(up.wait().code(), Some(1));
        let stderr = up.stderr();
        let reason = "libcuda.so was not found: install the nvidia driver, or run with --device cpu";
        let expected = format!("error: {worker} cannot start: --device cuda:0: {reason}");
        assert_eq!(stderr.lines().next_back(), Some(expected.as_str()), "{stderr}");
        assert!(stderr.contains(&format!("{worker}: loading ")), "{stderr}");
        let on_gpu = stderr.lines().filter(|line| line.contains(" on cuda:0"));
        assert_eq!(on_gpu.count(), 1, "only {worker} uses a GPU: {stderr}");
        assert!(up.stdout().is_empty(), "{}", up.stdout());
    }
}

#[test]
fn nothing_is_left_behind_when_up_itself_is_killed() {
    let mut up = Up::ready(&[]);
    let children = up.children();
    up.signal(Signal::SIGKILL);
    assert_eq!(up.wait().signal(), Some(Signal::SIGKILL as i32));
    wait_for("the end of the children", || all_gone(&children));
}

#[test]
fn a_taken_port_is_found_before_anything_starts() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_outrider"))
        .current_dir(directory.path())
        .args(["up", "--http", &taken, "--admin", "127.0.0.1:0", "--target", "missing"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(64));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains(&format!("error: --http {taken} is taken")), "{stderr}");
    assert!(stderr.contains("error: --target missing is not a directory"), "{stderr}");
    assert!(output.stdout.is_empty());
}
