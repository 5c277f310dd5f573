//! One child process: its start, its output, its end.
//!
//! Its standard input is a pipe that this process keeps open, so that a child that watches it exits with its
//! parent. A thread per output pipe reads lines into the log sink and a bounded buffer of recent lines. The
//! child has a separate process group: Ctrl-C at the terminal reaches only the parent, which then stops the
//! children in order. A child that is killed, by us or by somebody else, cannot end the processes that it has
//! started itself, so SIGKILL goes to its whole group.

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

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, ChildStdin, Command};

use super::error::ClusterError;

/// Recent lines kept per output pipe.
const LINES_KEPT: usize = 400;
/// Number of these lines that an exit report includes.
const REPORTED_LINES: usize = 12;
/// Longer lines are split.
const LINE_BYTES_MAX: u64 = 64 * 1024;
/// How long to wait for the remaining output of an ended process. Only needed if a grandchild keeps the pipe
/// open.
const OUTPUT_GRACE: Duration = Duration::from_millis(500);
/// How long dropping a process waits for it to end.
const KILL_WAIT: Duration = Duration::from_secs(2);

/// Prefix of the line in which our programs state why they exit.
const ERROR_PREFIX: &str = "error: ";

/// Receives every line that a process prints, on the reader threads.
pub trait LogSink: Send + Sync {
    /// Receives one line of one process, without its line feed.
    fn line(&self, process: &str, line: &str);
}

/// Discards lines. [`Process::lines`] still returns them.
#[derive(Debug, Clone, Copy)]
pub struct NoLogs;

impl LogSink for NoLogs {
    fn line(&self, _process: &str, _line: &str) {}
}

/// The program to run and its name.
#[derive(Debug, Clone)]
pub struct ProcessSpec {
    /// Its name in logs and reports.
    pub name: String,
    /// The executable.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Environment variables in addition to this process's own.
    pub env: Vec<(String, String)>,
}

/// How a process ended.
#[derive(Debug, Clone)]
pub struct ExitReport {
    /// The process's name.
    pub name: String,
    /// Its process id.
    pub pid: u32,
    /// Exit code or signal; `None` if the operating system did not report it.
    pub status: Option<ExitStatus>,
    /// The last lines of its standard error, or of its standard output if there are none.
    pub last_lines: Vec<String>,
}

/// A running or ended child process.
pub struct Process {
    spec: ProcessSpec,
    child: Child,
    pid: u32,
    /// Kept open while the child should run.
    _stdin: Option<ChildStdin>,
    output: Output,
    errors: Output,
}

impl Process {
    /// Starts the process.
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
        // The command holds the write ends; without this drop the readers would never see the end of the
        // output.
        drop(command);
        // Waiting for a child closes its standard input if it still holds it, which would make the child
        // exit.
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

    /// Its process id, also after its exit.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The buffered lines: standard output, then standard error.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = self.output.lines();
        lines.extend(self.errors.lines());
        lines
    }

    /// Sends a signal; SIGKILL also goes to all processes of its group. Does nothing if its exit status has
    /// been collected.
    pub fn signal(&self, signal: Signal) {
        // The id is available until the exit status is collected, so neither it nor the group, which has the
        // same id, can belong to another process yet.
        let Some(pid) = self.child.id().and_then(|pid| i32::try_from(pid).ok()) else { return };
        let pid = Pid::from_raw(pid);
        let sent = match signal {
            Signal::SIGKILL => killpg(pid, signal),
            _ => kill(pid, signal),
        };
        // The only possible error is that the process has just ended.
        sent.ok();
    }

    /// Waits until the process has ended and its output has been read.
    ///
    /// Cancel safety: can be called again, also after the exit.
    pub async fn wait(&mut self) -> ExitReport {
        let is_first_wait = self.child.id().is_some();
        let status = self.child.wait().await.ok();
        if is_first_wait && status.is_some_and(had_no_time_to_stop) {
            self.kill_group();
        }
        let output_read = async {
            while !(self.output.is_finished() && self.errors.is_finished()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        // The remaining output is held open by a grandchild; the report does not include it.
        tokio::time::timeout(OUTPUT_GRACE, output_read).await.ok();
        self.report(status)
    }

    /// Sends SIGKILL to what is left of the process's group. To be called as soon as its exit status has been
    /// collected: while the group has members, its id is not reused.
    fn kill_group(&self) {
        if let Ok(pid) = i32::try_from(self.pid) {
            // An error means that the group is empty.
            killpg(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }

    /// Sends SIGTERM, and SIGKILL to its group if the process has not ended within `grace`.
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
    /// Kills the process and its group, and waits for its end, so that its ports are free again.
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        let began = std::time::Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && began.elapsed() < KILL_WAIT {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Whether the process was killed or crashed. Before any other end it could end the processes that it had
/// started, in its own order.
fn had_no_time_to_stop(status: ExitStatus) -> bool {
    status.signal().is_some_and(|number| number != Signal::SIGTERM as i32)
}

impl ExitReport {
    /// Describes the exit code or signal.
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
    /// The error for a process that ended before it was ready.
    pub(super) fn before_ready(self) -> ClusterError {
        match self.stated_reason() {
            Some(reason) => ClusterError::CannotStart { name: self.name, reason },
            None => ClusterError::Died(self),
        }
    }

    /// The reason on one line: the text after the last `error: `, or the likely cause of a SIGKILL during
    /// loading.
    fn stated_reason(&self) -> Option<String> {
        if self.status.and_then(|status| status.signal()) == Some(Signal::SIGKILL as i32) {
            let reason = "it was killed by SIGKILL while loading, as the operating system does when memory runs out: \
                          use a smaller model, --weights int8, or less --ballast";
            return Some(reason.to_owned());
        }
        let first = self.last_lines.iter().rposition(|line| line.starts_with(ERROR_PREFIX))?;
        let lines = self.last_lines[first..].iter().map(|line| line.trim());
        let reason: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
        Some(reason.join(" ").trim_start_matches(ERROR_PREFIX).to_owned())
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

/// Reader of one output pipe of a process.
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
                if kept.len() == LINES_KEPT {
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

/// Returns `None` at the end of the output and after an error.
fn next_line(pipe: &mut BufReader<PipeReader>) -> Option<String> {
    let mut bytes = Vec::new();
    match pipe.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes) {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned()),
    }
}
