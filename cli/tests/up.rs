//! `outrider up` as a person runs it: the real command, with small fake servers where it looks for the real ones.

#![expect(clippy::unwrap_used, reason = "a test file: its harness functions fail the test by panicking")]

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Answers every GET, at each of its addresses, with a list of one model, and ends when its standard input closes.
const FAKE_SERVER: &str = r#"#!/usr/bin/env python3
import http.server, os, sys, threading
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "fake-model"}]}')
    def log_message(self, *_):
        pass

for address in filter(None, [flags.get("--admin"), flags.get("--http")]):
    host, port = address.split(":")
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
print("pid", os.getpid(), "level", flags["--log"], flush=True)
sys.stdin.read()
"#;
const PATIENCE: Duration = Duration::from_secs(20);

/// `outrider up` with fake servers beside it.
struct Up {
    child: Child,
    directory: tempfile::TempDir,
}

impl Up {
    fn start(arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for name in ["outrider-router", "outrider-draft-worker", "outrider-target-worker"] {
            write_executable(&directory.path().join(name), FAKE_SERVER.as_bytes());
        }
        let program = directory.path().join("outrider");
        std::fs::copy(env!("CARGO_BIN_EXE_outrider"), &program).unwrap();
        let file = |name: &str| std::fs::File::create(directory.path().join(name)).unwrap();
        let child = Command::new(&program)
            .args(["up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"))
            .spawn()
            .unwrap();
        Self { child, directory }
    }

    /// Started, and waited for until it says that it is ready.
    fn ready(arguments: &[&str]) -> Self {
        let up = Self::start(arguments);
        wait_for("the ready line", || up.stdout().contains("Ctrl-C stops it"));
        up
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
        let stderr = self.stderr();
        let line = stderr.lines().find(|line| line.starts_with(name) && line.contains("| pid ")).unwrap();
        let pid = line.split("| pid ").nth(1).unwrap().split(' ').next().unwrap();
        Pid::from_raw(pid.parse().unwrap())
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

fn write_executable(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "{what} did not come within {PATIENCE:?}");
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

#[test]
fn a_process_that_dies_ends_everything_and_is_named() {
    let mut up = Up::ready(&[]);
    let children = up.children();
    kill(up.pid_of("draft-0"), Signal::SIGKILL).unwrap();
    assert_eq!(up.wait().code(), Some(1));
    let stderr = up.stderr();
    assert!(stderr.contains("error: stopped everything: draft-0 (pid "), "{stderr}");
    assert!(stderr.contains("was killed by SIGKILL"), "{stderr}");
    assert!(all_gone(&children));
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
