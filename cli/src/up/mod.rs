//! `outrider up`: a cluster on this machine, from the checks to the shutdown.
//!
//! Checks everything that can be known in advance ([`preflight`]), starts the processes, shows progress, and
//! prints one ready line and one line of [`evidence`]. Then it waits for a signal, which stops all processes
//! in order, or for the exit of any process, which stops all and is reported. A process that cannot start is
//! reported on one line.

mod args;
mod checkpoint;
mod console;
mod evidence;
mod preflight;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use service::shutdown::TerminationSignals;

use crate::EXIT_USAGE;
use crate::cluster::{ClusterError, ProcessCluster, ROUTER};

pub use args::{DraftArg, SyntheticArg, UpArgs};
pub use checkpoint::BUNDLED_PAIR;
pub use preflight::PreflightFault;

use console::{Console, served_model};
use evidence::EvidenceError;
use preflight::Checked;

/// Timeout of loading: long enough for a model of tens of gigabytes on a slow disk.
const READY_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Why the cluster stopped without a signal.
#[derive(Debug, thiserror::Error)]
enum UpError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("stopped everything: {0}")]
    DraftChangedText(EvidenceError),
}

/// Runs the subcommand. Prints errors.
pub async fn main(args: UpArgs) -> ExitCode {
    let console = Arc::new(Console::new());
    let checked = match preflight::check(args) {
        Ok(checked) => checked,
        Err(faults) => {
            faults.iter().for_each(|fault| console.error(&fault.to_string()));
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match run(checked, &console).await {
        Ok(signal) => {
            console.info(&format!("stopped by {signal}"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            match &error {
                // An exit while all processes were needed is explained on several lines.
                UpError::Cluster(ClusterError::Died(_)) => {
                    console.error(&format!("stopped everything: {error}"));
                }
                _ => console.error(&error.to_string()),
            }
            ExitCode::FAILURE
        }
    }
}

/// Runs the cluster from the first process's start to the last one's end. Returns the signal that stopped it.
async fn run(checked: Checked, console: &Arc<Console>) -> Result<&'static str, UpError> {
    // Signal handlers are installed before the first child exists, so that an early Ctrl-C leaves no child
    // behind.
    let mut signals = TerminationSignals::listen();
    if !checked.shows_loading_logs {
        console.buffer_logs();
    }
    let mut cluster = ProcessCluster::launch(checked.spec.clone(), Arc::clone(console) as _)?;
    console.begin_loading(&checked.loading_lines(&cluster.names()));
    let end = serve(&checked, &mut cluster, &mut signals, console).await;
    console.end_loading();
    if end.is_ok() {
        console.flush_logs();
        console.info("stopping");
    }
    stop(cluster, &mut signals, console).await;
    end
}

/// Serves until a signal arrives or the cluster fails.
async fn serve(
    checked: &Checked,
    cluster: &mut ProcessCluster,
    signals: &mut TerminationSignals,
    console: &Console,
) -> Result<&'static str, UpError> {
    let started = Instant::now();
    let mut on_ready = |name: &str, after| console.loaded(name, after);
    tokio::select! {
        biased;
        // A signal is handled even while models load.
        signal = signals.next() => return Ok(signal),
        ready = cluster.wait_ready(READY_TIMEOUT, &mut on_ready) => ready?,
    }
    let after = started.elapsed();
    console.end_loading();
    console.flush_logs();
    let (model, admin) =
        (served_model(&cluster.http_url(), &checked.spec.target).await, cluster.admin_url(ROUTER)?);
    console.ready(checked, cluster, (&model, after));
    if checked.evidence {
        tokio::select! {
            biased;
            // A signal ends the measurement early.
            signal = signals.next() => return Ok(signal),
            report = cluster.next_exit() => return Err(ClusterError::Died(report).into()),
            found = evidence::measure(&admin, &model) => match found {
                Ok(evidence) => console.evidence(&evidence.to_string()),
                Err(error @ EvidenceError::TextsDiffer { .. }) => return Err(UpError::DraftChangedText(error)),
                Err(error) => console.info(&error.to_string()),
            },
        }
    }
    console.open(checked, cluster, &admin);
    tokio::select! {
        biased;
        // A signal takes precedence if processes end at the same time.
        signal = signals.next() => Ok(signal),
        report = cluster.next_exit() => Err(ClusterError::Died(report).into()),
    }
}

/// Stops the cluster in order; a second signal aborts this, and dropping the cluster then kills the remaining
/// processes.
async fn stop(cluster: ProcessCluster, signals: &mut TerminationSignals, console: &Console) {
    tokio::select! {
        biased;
        _ = signals.next() => console.info("killing the remaining processes"),
        _ = cluster.stop() => (),
    }
}
