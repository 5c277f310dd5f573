//! Page Pair: runs the operator's program that checks the pair of models, and shows its report. The program
//! is `outrider check-pair --json` (`outrider up` passes it to its router); the router itself reads no
//! checkpoint and measures nothing.
//!
//! One check runs at a time, and the latest report is kept. No input of a page reaches the program: its
//! command line is the router's `--pair-check`, which only the operator sets. Its standard input is a pipe
//! that closes with the router, however that ends.

use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::{IntoResponse as _, Json, Response};
use serde::Serialize;
use service::shutdown::Lifetime;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;

use super::Console;

/// Maximum size of a report.
const REPORT_BYTES_MAX: u64 = 4 << 20;
/// Timeout of a check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(3600);

/// Makes `outrider check-pair` stop when its standard input closes, so that it does not outlive a router that
/// is killed.
const EXIT_ON_STDIN_CLOSE: (&str, &str) = ("OUTRIDER_EXIT_ON_STDIN_CLOSE", "true");

/// The command and the state of the check. Clones share it.
#[derive(Debug, Clone)]
pub struct PairCheck {
    command: Arc<[String]>,
    state: Arc<Mutex<PairState>>,
    lifetime: Lifetime,
}

/// State of the check.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum PairState {
    /// No command is configured.
    NotConfigured,
    /// Not run yet.
    NotRun,
    /// Running.
    Running,
    /// Finished, with the output of `outrider check-pair --json`.
    Done { seconds: f64, reports: serde_json::Value },
    /// Failed, with the reason.
    Failed { message: String },
}

impl PairCheck {
    /// Creates a check with this program and its arguments; an empty command disables it.
    pub fn new(command: Vec<String>, lifetime: Lifetime) -> Self {
        let state = if command.is_empty() { PairState::NotConfigured } else { PairState::NotRun };
        Self { command: command.into(), state: Arc::new(Mutex::new(state)), lifetime }
    }

    fn state(&self) -> PairState {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, state: PairState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Starts a check, unless one is running.
    fn start(&self) {
        {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if matches!(*state, PairState::NotConfigured | PairState::Running) {
                return;
            }
            *state = PairState::Running;
        }
        let this = self.clone();
        self.lifetime.spawn("pair check", async move {
            let started_at = Instant::now();
            let checked = tokio::select! {
                biased;
                // Shutdown; dropping the check kills its program.
                () = this.lifetime.cancelled() => Err("the router is shutting down".to_owned()),
                checked = tokio::time::timeout(CHECK_TIMEOUT, run(&this.command)) => match checked {
                    Ok(checked) => checked,
                    Err(_) => Err(format!("timed out after {} s", CHECK_TIMEOUT.as_secs())),
                },
            };
            this.set(match checked {
                Ok(reports) => PairState::Done { seconds: started_at.elapsed().as_secs_f64(), reports },
                Err(message) => PairState::Failed { message },
            });
        });
    }
}

/// Runs the program to its end. A report that the pair does not fit is a result, whatever the exit code.
async fn run(command: &[String]) -> Result<serde_json::Value, String> {
    let [program, arguments @ ..] = command else { return Err("no command is configured".to_owned()) };
    let (variable, value) = EXIT_ON_STDIN_CLOSE;
    let mut child = Command::new(program)
        .args(arguments)
        .env(variable, value)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("cannot start {program}: {error}"))?;
    // Open until the program has ended. However this process ends, the operating system closes it then.
    let _stdin = child.stdin.take();
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let (out, err) = tokio::join!(read(out), read(err));
    let status = child.wait().await.map_err(|error| error.to_string())?;
    serde_json::from_slice(&out).map_err(|error| {
        let stderr = String::from_utf8_lossy(&err);
        match stderr.lines().last() {
            Some(line) => line.to_owned(),
            None => format!("{program} ended with {status} and printed no report: {error}"),
        }
    })
}

async fn read(pipe: Option<impl AsyncRead + Unpin>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // If the pipe breaks, use what was read.
        drop(pipe.take(REPORT_BYTES_MAX).read_to_end(&mut bytes).await);
    }
    bytes
}

/// `GET /console/pair`: the command and its state.
pub(super) async fn pair(State(console): State<Console>) -> Response {
    page(&console.pair)
}

/// `POST /console/pair`: starts a check, and answers as `GET` does.
pub(super) async fn check_pair(State(console): State<Console>) -> Response {
    console.pair.start();
    page(&console.pair)
}

fn page(check: &PairCheck) -> Response {
    #[derive(Serialize)]
    struct Page<'a> {
        command: &'a [String],
        #[serde(flatten)]
        state: PairState,
    }
    Json(Page { command: &check.command, state: check.state() }).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Vec<String> {
        ["sh", "-c", script].map(str::to_owned).to_vec()
    }

    #[tokio::test]
    async fn the_report_is_the_output_of_the_program() {
        assert_eq!(run(&shell("echo '[1]'")).await, Ok(serde_json::json!([1])));
        assert_eq!(
            run(&shell("echo '[]'; exit 1")).await,
            Ok(serde_json::json!([])),
            "no pair, but a report"
        );
        let failed = run(&shell("echo one >&2; echo 'outrider: no such model' >&2; exit 1")).await;
        assert_eq!(failed, Err("outrider: no such model".to_owned()));
        let silent = run(&shell("exit 3")).await.unwrap_err();
        assert!(silent.contains("exit status: 3") && silent.contains("printed no report"), "{silent}");
        let not_found = run(&["/no/such/program".to_owned()]).await.unwrap_err();
        assert!(not_found.starts_with("cannot start /no/such/program"), "{not_found}");
    }

    #[tokio::test]
    async fn the_program_can_tell_that_the_router_has_ended() {
        let has_open_pipe = "test -p /dev/stdin && printenv OUTRIDER_EXIT_ON_STDIN_CLOSE";
        assert_eq!(run(&shell(has_open_pipe)).await, Ok(serde_json::json!(true)));
    }

    #[tokio::test]
    async fn one_check_runs_at_a_time_and_stops_at_shutdown() {
        let lifetime = Lifetime::new();
        let check = PairCheck::new(shell("sleep 100"), lifetime.clone());
        assert!(matches!(check.state(), PairState::NotRun));
        check.start();
        check.start();
        assert!(matches!(check.state(), PairState::Running));
        let outcome = lifetime.shut_down(Duration::from_secs(10)).await;
        assert_eq!(outcome, service::shutdown::ShutdownOutcome::Clean);
        assert!(matches!(check.state(), PairState::Failed { .. }), "{:?}", check.state());

        let none = PairCheck::new(Vec::new(), Lifetime::new());
        none.start();
        assert!(matches!(none.state(), PairState::NotConfigured));
    }
}
