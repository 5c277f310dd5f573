//! One child process: how it is started, what it prints, how it ends.
//!
//! Its standard input is a pipe that this process holds open, so that a child which watches it ends with its parent. Each
//! output is read by a thread of its own, line by line, into the log sink and a short memory of last lines. The child gets
//! its own process group: Ctrl-C at the terminal reaches the parent alone, which then ends the children in order.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead, BufReader, PipeReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::process::{Child, ChildStdin, Command};

use super::error::ClusterError;

/// Lines kept per process.
const KEPT_LINES: usize = 400;
/// Lines of these shown when a process has died.
const REPORTED_LINES: usize = 12;
/// A longer line is cut into several.
const LINE_BYTES_MAX: u64 = 64 * 1024;
/// How long the last output of an ended process is waited for. Only a grandchild that keeps the pipe open needs it.
const OUTPUT_GRACE: Duration = Duration::from_millis(500);
/// How long dropping a process waits for the kernel to finish it.
const KILL_WAIT: Duration = Duration::from_secs(2);

/// How our programs begin the line that says why they end.
const STATED: &str = "error: ";

/// Hears every line that a process prints, from the reading threads.
pub trait LogSink: Send + Sync {
    /// One line of one process, without its line feed.
    fn line(&self, process: &str, line: &str);
}

/// Keeps quiet. Lines are still remembered by [`Process::lines`].
#[derive(Debug, Clone, Copy)]
pub struct NoLogs;

impl LogSink for NoLogs {
    fn line(&self, _process: &str, _line: &str) {}
}

/// What to run and under which name.
#[derive(Debug, Clone)]
pub struct ProcessSpec {
    /// Its name in logs and reports.
    pub name: String,
    /// The executable.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Environment variables on top of this process's own.
    pub env: Vec<(String, String)>,
}

/// How a process ended.
#[derive(Debug, Clone)]
pub struct ExitReport {
    /// Which one.
    pub name: String,
    /// Its id while it ran.
    pub pid: u32,
    /// Exit code or signal; nothing where the operating system would not say.
    pub status: Option<ExitStatus>,
    /// The last lines it wrote to standard error, else to standard output.
    pub last_lines: Vec<String>,
}

/// A running or ended child process.
pub struct Process {
    spec: ProcessSpec,
    child: Child,
    pid: u32,
    /// Held open as long as this process wants the child to live.
    _stdin: Option<ChildStdin>,
    output: Output,
    errors: Output,
}

impl Process {
    /// Start it.
    pub fn spawn(spec: ProcessSpec, sink: Arc<dyn LogSink>) -> Result<Self, ClusterError> {
        Self::try_spawn(&spec, &sink).map_err(|source| ClusterError::Spawn {
            name: spec.name.clone(),
            program: spec.program.clone(),
            source,
        })
    }

    fn try_spawn(spec: &ProcessSpec, sink: &Arc<dyn LogSink>) -> std::io::Result<Self> {
        let (output, stdout) = std::io::pipe()?;
        let (errors, stderr) = std::io::pipe()?;
        let mut command = Command::new(&spec.program);
        command.args(&spec.args).envs(spec.env.iter().map(|(key, value)| (key, value)));
        command.stdin(std::process::Stdio::piped()).stdout(stdout).stderr(stderr);
        command.process_group(0).kill_on_drop(true);
        let mut child = command.spawn()?;
        // The command holds the writing ends: without this, the readers would never see the end of the output.
        drop(command);
        // Waiting for a child closes a standard input that it still holds, which would tell the child to end.
        let stdin = child.stdin.take();
        let pid = child.id().ok_or_else(|| std::io::Error::other("the process ended while it started"))?;
        let output = Output::read(&spec.name, output, Arc::clone(sink))?;
        let errors = Output::read(&spec.name, errors, Arc::clone(sink))?;
        Ok(Self { spec: spec.clone(), child, pid, _stdin: stdin, output, errors })
    }

    /// Its name in the cluster.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Its process id, also after its end.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The lines that are remembered: standard output, then standard error.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = self.output.lines();
        lines.extend(self.errors.lines());
        lines
    }

    /// Send it a signal. A process that has ended gets none.
    pub fn signal(&self, signal: Signal) {
        // The id is there until the end was collected, so that it cannot name another process by now.
        let Some(pid) = self.child.id().and_then(|pid| i32::try_from(pid).ok()) else { return };
        // An error can only mean that it ended a moment ago.
        nix::sys::signal::kill(Pid::from_raw(pid), signal).ok();
    }

    /// Wait until it has ended and its output was read.
    ///
    /// Cancel safety: can be called again, also after the end.
    pub async fn wait(&mut self) -> ExitReport {
        let status = self.child.wait().await.ok();
        let output_read = async {
            while !(self.output.is_finished() && self.errors.is_finished()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        // What has not come by now is held by a grandchild, and the report does without it.
        tokio::time::timeout(OUTPUT_GRACE, output_read).await.ok();
        self.report(status)
    }

    /// SIGTERM, and SIGKILL for what has not ended within `grace`.
    pub async fn stop(&mut self, grace: Duration) -> ExitReport {
        self.signal(Signal::SIGTERM);
        if let Ok(report) = tokio::time::timeout(grace, self.wait()).await {
            return report;
        }
        self.signal(Signal::SIGKILL);
        self.wait().await
    }

    fn report(&self, status: Option<ExitStatus>) -> ExitReport {
        let mut last_lines = self.errors.lines();
        if last_lines.is_empty() {
            last_lines = self.output.lines();
        }
        last_lines.drain(..last_lines.len().saturating_sub(REPORTED_LINES));
        ExitReport { name: self.spec.name.clone(), pid: self.pid, status, last_lines }
    }
}

impl Drop for Process {
    /// No process outlives its owner: it is killed, and waited for so long that its ports are free again.
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        let patience = std::time::Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && patience.elapsed() < KILL_WAIT {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl ExitReport {
    /// Exit code or signal in words.
    pub fn cause(&self) -> String {
        let Some(status) = self.status else { return "ended in an unknown way".to_owned() };
        match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with status {code}"),
            (None, Some(number)) => match Signal::try_from(number) {
                Ok(signal) => format!("was killed by {signal}"),
                Err(_) => format!("was killed by signal {number}"),
            },
            (None, None) => "ended in an unknown way".to_owned(),
        }
    }
}

impl ExitReport {
    /// What this end means for a process that was never ready.
    pub(super) fn before_ready(self) -> ClusterError {
        match self.stated_reason() {
            Some(reason) => ClusterError::CannotStart { name: self.name, reason },
            None => ClusterError::Died(self),
        }
    }

    /// Why it ended, on one line: what it wrote behind its last `error: `, or what a kill while it loaded most likely means.
    fn stated_reason(&self) -> Option<String> {
        if self.status.and_then(|status| status.signal()) == Some(Signal::SIGKILL as i32) {
            let reason = "it was killed by SIGKILL while it loaded, which is how the system ends a process where memory runs out: \
                          take a smaller model, or less --ballast";
            return Some(reason.to_owned());
        }
        let first = self.last_lines.iter().rposition(|line| line.starts_with(STATED))?;
        let lines = self.last_lines[first..].iter().map(|line| line.trim());
        let reason: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
        Some(reason.join(" ").trim_start_matches(STATED).to_owned())
    }
}

impl fmt::Display for ExitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {}) {}", self.name, self.pid, self.cause())?;
        if self.last_lines.is_empty() {
            return write!(f, " and printed nothing");
        }
        write!(f, "; its last lines:")?;
        self.last_lines.iter().try_for_each(|line| write!(f, "\n    {line}"))
    }
}

/// One output pipe of a process, being read.
struct Output {
    lines: Arc<Mutex<VecDeque<String>>>,
    reader: JoinHandle<()>,
}

impl Output {
    fn read(process: &str, pipe: PipeReader, sink: Arc<dyn LogSink>) -> std::io::Result<Self> {
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let (kept, name) = (Arc::clone(&lines), process.to_owned());
        let reader = std::thread::Builder::new().name(format!("log {process}")).spawn(move || {
            let mut pipe = BufReader::new(pipe);
            while let Some(line) = next_line(&mut pipe) {
                sink.line(&name, &line);
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                if kept.len() == KEPT_LINES {
                    kept.pop_front();
                }
                kept.push_back(line);
            }
        })?;
        Ok(Self { lines, reader })
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn is_finished(&self) -> bool {
        self.reader.is_finished()
    }
}

/// Nothing at the end of the output, and after an error, which ends a pipe as well.
fn next_line(pipe: &mut BufReader<PipeReader>) -> Option<String> {
    let mut bytes = Vec::new();
    match pipe.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes) {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned()),
    }
}
