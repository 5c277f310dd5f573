//! `chaos`: injects faults of every kind into a cluster of real processes, from a seed, and prints their
//! effect on streams.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "printing is the job")]

mod overload;
mod soak;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use clap::{Parser, Subcommand};
use service::shutdown::TerminationSignals;
use tests::chaos::fault::FaultKind;
use tests::chaos::fleet::{Engine, FleetSize};
use tests::chaos::logs::FileLogs;
use tests::chaos::plan::PlanSize;
use tests::chaos::streams::LoadSize;
use tests::chaos::{ChaosReport, Settings, run, table};

/// Time within which processes must release everything: more than the ten seconds for which workers keep the
/// sequences of a lost router.
const IDLE_WITHIN: Duration = Duration::from_secs(20);

const EXAMPLES: &str = "\
Examples:
  chaos --seed 7                         every kind of fault once
  chaos --faults 200 --streams 2000      a long run
  chaos --only stop-target --faults 10   one kind, ten times
  chaos --only nan-target --logs DIR     with the logs of every process
  chaos --engine synthetic --targets 16 --drafts 64 --width 48 --only churn --faults 20
                                         many workers that join, leave and crash
  chaos overload                         requests at five times the capacity
  chaos soak --seconds 1200              growing conversations, with and without drafts";

/// Injects faults into a cluster of real processes under load, and reports their effect on streams.
///
/// It starts an etcd, targets and draft workers of the bundled pair, each behind a TCP proxy, and routers.
/// Clients request texts with drafts, one after the other; the token ids of every answer are compared with
/// those that a target generated before, undisturbed and without drafts. Faults are injected one at a time:
/// the next one after every process is back, every stream has resumed and some hundred more tokens have
/// arrived. A table shows how long streams stalled, how many were lost and how many had other ids; a second
/// one what the processes hold at the end.
///
/// Texts and faults are a function of the seed: the same flags inject the same faults again. A stream is lost
/// if it ends with an error or stalls for --patience-seconds although a healthy target is running; streams
/// that end with their own router are counted separately. The exit status is 1 if a stream was lost or
/// differs, if a process did not come back even after a manual restart, or if the run compared nothing (no
/// complete stream, no verified draft, or no stream in flight during a kind of fault), and 0 otherwise.
#[derive(Debug, Parser)]
#[command(name = "chaos", after_long_help = EXAMPLES, args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    /// Seed of texts and faults
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Minimum number of streams; more if the faults take longer
    #[arg(long, value_name = "N", default_value_t = 200)]
    streams: u64,
    /// Number of faults [default: each kind once]
    #[arg(long, value_name = "N")]
    faults: Option<usize>,
    /// Only faults of this kind; may be given more than once
    #[arg(long, value_name = "FAULT", value_enum)]
    only: Vec<FaultKind>,
    /// No faults of this kind; may be given more than once
    #[arg(long, value_name = "FAULT", value_enum, conflicts_with = "only")]
    without: Vec<FaultKind>,
    /// Concurrent streams
    #[arg(long, value_name = "N", default_value_t = 12)]
    width: usize,
    /// Number of distinct texts
    #[arg(long, value_name = "N", default_value_t = 48)]
    texts: usize,
    /// Maximum output tokens per text
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(16..=1500))]
    max_tokens: u32,
    /// Longest duration of a fault, seconds; the shortest is 0.3
    #[arg(long, value_name = "S", default_value_t = 12.0)]
    max_hold_seconds: f64,
    /// A stream that is silent for this long is lost
    #[arg(long, value_name = "S", default_value_t = 60)]
    patience_seconds: u64,
    /// Target workers
    #[arg(long, value_name = "N", default_value_t = 3)]
    targets: usize,
    /// Draft workers
    #[arg(long, value_name = "N", default_value_t = 2)]
    drafts: usize,
    /// Routers
    #[arg(long, value_name = "N", default_value_t = 2)]
    routers: usize,
    /// etcd members
    #[arg(long, value_name = "N", default_value_t = 3)]
    etcd_members: usize,
    /// Engine of the workers: pair, or synthetic, which only reproduces step times, for fleets too large for
    /// the machine to compute
    #[arg(long, value_name = "pair|synthetic", default_value = "pair", value_parser = ["pair", "synthetic"])]
    engine: String,
    /// Factor on the step times of the pair's profile, for synthetic workers
    #[arg(long, value_name = "X", default_value_t = 4.0)]
    time_scale: f64,
    /// Directory for the processes' logs [default: kept only if a stream was lost or differs]
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Other {
    Overload(overload::Args),
    Soak(soak::Args),
}

impl Args {
    fn settings(&self) -> Settings {
        let engine = if self.engine == "pair" { Engine::Pair } else { Engine::Synthetic(self.time_scale) };
        let is_wanted = |kind: &FaultKind| {
            (engine == Engine::Pair || !kind.needs_models())
                && !self.without.contains(kind)
                && (self.only.is_empty() || self.only.contains(kind))
        };
        let kinds: Vec<FaultKind> = FaultKind::all().iter().copied().filter(is_wanted).collect();
        let shortest = Duration::from_millis(300);
        let longest = Duration::from_secs_f64(self.max_hold_seconds.clamp(0.3, 3_600.0));
        Settings {
            seed: self.seed,
            plan: PlanSize {
                texts: self.texts.max(1),
                tokens: (16, self.max_tokens),
                faults: self.faults.unwrap_or(kinds.len()),
                kinds,
                hold: (shortest, longest),
            },
            fleet: FleetSize {
                engine,
                targets: self.targets.max(1),
                drafts: self.drafts.max(1),
                routers: self.routers.max(1),
                etcd_members: self.etcd_members.max(1),
            },
            load: LoadSize {
                width: self.width.max(1),
                streams: self.streams,
                stream_timeout: Duration::from_secs(self.patience_seconds),
            },
            idle_within: IDLE_WITHIN,
        }
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    match &args.other {
        Some(Other::Overload(args)) => {
            overload::run(args).await?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(Other::Soak(args)) => {
            soak::run(args).await?;
            return Ok(ExitCode::SUCCESS);
        }
        None => {}
    }
    let settings = args.settings();
    ensure!(!settings.plan.kinds.is_empty(), "no kind of fault is left by --only, --without and --engine");
    let logs = Arc::new(FileLogs::new(args.logs.as_deref())?);
    eprintln!("seed {}, {} faults, at least {} streams", settings.seed, settings.plan.faults, args.streams);
    let mut signals = TerminationSignals::listen();
    let played = tokio::select! {
        biased;
        // On a signal everything that was started, including etcd, stops with this program.
        _ = signals.next() => anyhow::bail!("stopped by a signal"),
        played = run(&settings, &logs, |line| eprintln!("{line}")) => played,
    };
    let report = played.inspect_err(|_| eprintln!("logs: {}", logs.keep().display()))?;
    print!("{}", table::page(&report));
    Ok(exit_code(&report, &logs))
}

fn exit_code(report: &ChaosReport, logs: &FileLogs) -> ExitCode {
    let unmeasured = report.unmeasured();
    if report.failures().next().is_none() && report.aborted.is_none() && unmeasured.is_empty() {
        return ExitCode::SUCCESS;
    }
    for missing in unmeasured {
        eprintln!("NOT MEASURED: {missing}");
    }
    eprintln!("logs: {}", logs.keep().display());
    ExitCode::FAILURE
}
