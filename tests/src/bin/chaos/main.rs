//! `chaos`: plays faults of every kind to a cluster of real processes, by a seed, and prints what they did to streams.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "printing is the job")]

mod overload;
mod soak;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use service::shutdown::termination_signal;
use tests::chaos::fault::FaultKind;
use tests::chaos::fleet::{Engine, FleetSize};
use tests::chaos::logs::FileLogs;
use tests::chaos::plan::PlanSize;
use tests::chaos::streams::LoadSize;
use tests::chaos::{Outcome, Settings, run, table};

/// How long processes may take to let go: more than the ten seconds for which workers keep what a vanished router held.
const IDLE_WITHIN: Duration = Duration::from_secs(20);

const EXAMPLES: &str = "\
Examples:
  chaos --seed 7                         every kind of fault once
  chaos --faults 200 --streams 2000      a long run
  chaos --only stop-target --faults 10   one kind, ten times
  chaos --only nan-target --logs DIR     with what every process logged
  chaos --engine synthetic --targets 16 --drafts 64 --width 48 --only churn --faults 20
                                         many workers that join, leave and crash
  chaos overload                         five times what can be served
  chaos soak --seconds 1200              conversations that grow, with drafts and without";

/// Plays faults to a cluster of real processes under load, and says what they did to streams.
///
/// It starts an etcd, targets and draft workers of the bundled pair, each behind a TCP proxy, and routers. Clients ask for texts, one
/// after the other, with drafts; every answer's token ids are compared with those that a target wrote before, undisturbed and
/// without drafts. Faults come one at a time: the next one once every process is back, every stream goes on and some hundred more
/// tokens came. A table says how long streams were silent, how many were lost and how many got other ids; another one what
/// processes hold at the end.
///
/// Texts and faults are a function of the seed: the same flags play the same faults again. A stream is lost where it ends with an
/// error or is silent for --patience-seconds although a healthy target lives; streams that end with their own router are counted apart.
/// The exit status is 1 where a stream was lost or differs or a process did not come back even with help, and 0 otherwise.
#[derive(Debug, Parser)]
#[command(name = "chaos", after_long_help = EXAMPLES, args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    /// What texts and faults are drawn from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Streams at least; more where the faults take longer
    #[arg(long, value_name = "N", default_value_t = 200)]
    streams: u64,
    /// Faults [default: each kind once]
    #[arg(long, value_name = "N")]
    faults: Option<usize>,
    /// Only faults of this kind; may be given more than once
    #[arg(long, value_name = "FAULT", value_enum)]
    only: Vec<FaultKind>,
    /// No faults of this kind; may be given more than once
    #[arg(long, value_name = "FAULT", value_enum, conflicts_with = "only")]
    without: Vec<FaultKind>,
    /// Streams at once
    #[arg(long, value_name = "N", default_value_t = 12)]
    width: usize,
    /// Texts that differ
    #[arg(long, value_name = "N", default_value_t = 48)]
    texts: usize,
    /// Output tokens of a text at most
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(16..=1500))]
    max_tokens: u32,
    /// The longest that a fault lasts, seconds; the shortest is 0.3
    #[arg(long, value_name = "S", default_value_t = 12.0)]
    max_hold_seconds: f64,
    /// A stream that is silent for so long is lost
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
    /// Members of etcd
    #[arg(long, value_name = "N", default_value_t = 3)]
    etcd_members: usize,
    /// What workers compute with: pair, or synthetic, which only keeps time, for fleets larger than the machine can compute
    #[arg(long, value_name = "pair|synthetic", default_value = "pair", value_parser = ["pair", "synthetic"])]
    engine: String,
    /// With synthetic workers: the factor that the step times of the pair's profile are multiplied by
    #[arg(long, value_name = "X", default_value_t = 4.0)]
    time_scale: f64,
    /// Where the processes' log lines are left [default: only where a stream was lost or differs]
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
                patience: Duration::from_secs(self.patience_seconds),
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
    let logs = Arc::new(FileLogs::new(args.logs.as_deref())?);
    eprintln!("seed {}, {} faults, at least {} streams", settings.seed, settings.plan.faults, args.streams);
    let played = tokio::select! {
        biased;
        // Told to stop: what was started ends with this, etcd too.
        _ = termination_signal() => anyhow::bail!("stopped by a signal"),
        played = run(&settings, &logs, |line| eprintln!("{line}")) => played,
    };
    let outcome = played.inspect_err(|_| eprintln!("logs: {}", logs.keep().display()))?;
    print!("{}", table::page(&outcome));
    Ok(exit_code(&outcome, &logs))
}

fn exit_code(outcome: &Outcome, logs: &FileLogs) -> ExitCode {
    if outcome.failures().next().is_none() && outcome.broken_off.is_none() {
        return ExitCode::SUCCESS;
    }
    eprintln!("logs: {}", logs.keep().display());
    ExitCode::FAILURE
}
