//! Compares the rounds that `plan` computes with a running cluster: the bundled pair as real processes on
//! this machine, one thread per worker.
//!
//! `cargo build --workspace --bins && cargo run -p outrider --example plan_against_cluster`
//!
//! Step times are measured in this process, as `check-pair` does, before and after every point, because the
//! speed of a shared machine varies; acceptance is measured on the cluster. All points are measured in
//! several passes, and the median pass counts, point by point. Client, router and both workers share this
//! machine's cores. The CPU time that they use per sequence and round beyond the forwards therefore delays
//! the others; it is divided by the number of cores. It is measured at 16 sequences, which is not one of the
//! points (CPU time of all processes over rounds; a router that serves one sequence wakes for each event,
//! which costs more). The time between processes is taken from the first line of each pass, which therefore
//! agrees by construction; the other lines are predictions. The last line of the output is the largest factor
//! between a prediction and its measurement. `others` is the share of the machine used by other processes:
//! above a few percent the run is unreliable.

#![forbid(unsafe_code)]

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use engine::{Engine, LoadOptions, WeightFormat};
use outrider_cli::check_pair::cost::{self, Costs};
use outrider_cli::check_pair::local::LocalModel;
use outrider_cli::cluster::usage::{CpuSnapshot, process_cpu};
use outrider_cli::cluster::{Binaries, ClusterSpec, DraftKind, NoLogs, ProcessCluster, ROUTER};
use outrider_cli::load::{Client, Endpoint, FigureOptions, Figures, Prompt, Schedule, Settings};
use outrider_cli::plan::round::{Drafting, RoundModel};
use scheduling::cost::{ForwardShape, StepTimePoint, StepTimes};

/// Concurrent sequences and k. The first point gives the time between processes.
const POINTS: [(usize, u32); 10] =
    [(1, 0), (1, 2), (1, 4), (2, 0), (2, 2), (2, 4), (4, 0), (4, 2), (4, 4), (8, 0)];
/// Points at which the CPU overhead of all processes is measured, without drafts and with.
const CALIBRATION: [(usize, u32); 2] = [(16, 0), (16, 4)];
/// The median of this many passes counts, point by point.
const PASSES: usize = 3;
/// All processes whose CPU time delays the others, except this one.
const PROCESSES: [&str; 3] = [ROUTER, "target-0", "draft-0"];
const MAX_TOKENS: u32 = 64;
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Measurements at one point.
struct Found {
    tpot_us: f64,
    acceptance: Vec<f64>,
    context: f64,
    /// CPU time of all processes per sequence and round.
    cpu_us: f64,
    /// Share of the machine's time used by other processes.
    others: f64,
    /// Step times during the measurement.
    target: StepTimes,
    draft: StepTimes,
}

/// A line of the table.
struct Line {
    planned_ms: f64,
    measured_ms: f64,
    rates: Vec<f64>,
    others: f64,
}

/// Both models loaded in this process, and their latest measured costs.
struct Local {
    models: [LocalModel; 2],
    last: Costs,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    let mut local = Local::new([load(models.join("target"))?, load(models.join("draft"))?])?;
    let own = std::env::current_exe()?;
    let directory = own.parent().and_then(Path::parent).ok_or("the program has no directory")?;
    let draft = DraftKind::Model(models.join("draft"));
    let mut spec = ClusterSpec::new(Binaries::in_directory(directory)?, models.join("target"), draft);
    spec.threads = Some(NonZeroUsize::MIN);
    let cluster = ProcessCluster::start(spec, Arc::new(NoLogs), WAIT_TIMEOUT).await?;
    let client = Client::new(Endpoint::connect(&cluster.http_url(), Default::default()).await?);
    let mut passes = Vec::new();
    for _ in 0..PASSES {
        let (mut taken, mut lines) = (Vec::new(), Vec::new());
        for at in CALIBRATION {
            // These runs also warm up connections and caches.
            let found = measure(&cluster, &client, &mut local, at).await?;
            taken.push(beyond_forwards_us(&found, at)?);
        }
        let mut wire_us = None;
        for at in POINTS {
            let found = measure(&cluster, &client, &mut local, at).await?;
            let alone_us = found.target.micros(ForwardShape::plain(1.0, found.context));
            let wire_us = *wire_us.get_or_insert((found.tpot_us - alone_us).max(0.0));
            lines.push(Line::of(&found, at, (wire_us, taken[usize::from(at.1 > 0)])));
        }
        print_pass(&local.last, (wire_us.unwrap_or_default(), taken[0], taken[1]));
        passes.push(lines);
    }
    cluster.stop().await;
    print(&passes);
    Ok(())
}

impl Local {
    fn new(mut models: [LocalModel; 2]) -> Result<Self, Box<dyn Error>> {
        let [target, draft] = &mut models;
        let last = cost::measure(target, draft)?;
        Ok(Self { models, last })
    }

    /// Step times between the last measurement and now: the mean of both.
    fn steps(&mut self) -> Result<(StepTimes, StepTimes), Box<dyn Error>> {
        let [target, draft] = &mut self.models;
        let now = cost::measure(target, draft)?;
        let before = std::mem::replace(&mut self.last, now);
        let mean = |before: &[StepTimePoint], now: &[StepTimePoint]| {
            let both = before.iter().zip(now);
            let points = both.map(|(a, b)| StepTimePoint { micros: u64::midpoint(a.micros, b.micros), ..*a });
            StepTimes::new(&points.collect::<Vec<_>>())
        };
        Ok((mean(&before.target, &self.last.target), mean(&before.draft, &self.last.draft)))
    }
}

fn load(directory: PathBuf) -> Result<LocalModel, Box<dyn Error>> {
    let engine = Engine::load(&LoadOptions::new(directory, WeightFormat::AsStored, 1 << 30))?;
    Ok(LocalModel::new(engine, u32::MAX))
}

async fn measure(
    cluster: &ProcessCluster,
    client: &Client,
    local: &mut Local,
    (concurrency, k): (usize, u32),
) -> Result<Found, Box<dyn Error>> {
    let fields = [("ignore_eos".to_owned(), true.into())].into_iter().collect();
    let num_draft_tokens = Some(k);
    let settings =
        Settings { max_tokens: MAX_TOKENS, num_draft_tokens, chat: true, fields, ..Settings::default() };
    let prompts = Prompt::built_in();
    let requests: Vec<_> = prompts.iter().map(|prompt| settings.request(client.endpoint(), prompt)).collect();
    let (before, snapshot) = (cpu_seconds(cluster)?, CpuSnapshot::at(std::process::id())?);
    let run = client.drive(&requests, &Schedule::Closed { concurrency }, |_| ()).await;
    let (cpu, span) =
        (cpu_seconds(cluster)? - before, snapshot.usage_until(&CpuSnapshot::at(std::process::id())?));
    let (target, draft) = local.steps()?;
    let samples = run.samples(&requests);
    let figures = Figures::of(&samples, run.duration(), &FigureOptions::default());
    let tpot = figures.tpot.ok_or("no request was answered")?;
    let prompt_tokens = figures.total_input_tokens as f64 / figures.completed as f64;
    let rounds: usize = samples.iter().map(|sample| sample.gaps.len() + 1).sum();
    let shares = figures.acceptance.and_then(|acceptance| acceptance.per_position);
    // Shares are of all rounds; rates are conditional on all earlier positions being accepted.
    let mut before = 1.0;
    let rate = |share: f64| share / std::mem::replace(&mut before, share);
    Ok(Found {
        tpot_us: tpot.p50.value * 1e3,
        acceptance: shares.unwrap_or_default().into_iter().map(rate).collect(),
        context: prompt_tokens + f64::from(MAX_TOKENS) / 2.0,
        cpu_us: cpu * 1e6 / rounds as f64,
        others: (span.busy - cpu / (cores()? * span.wall.as_secs_f64())).max(0.0),
        target,
        draft,
    })
}

/// CPU time of all processes that share this machine's cores, including this one.
fn cpu_seconds(cluster: &ProcessCluster) -> Result<f64, Box<dyn Error>> {
    let mut seconds = process_cpu(std::process::id())?;
    for name in PROCESSES {
        seconds += process_cpu(cluster.process(name)?.pid())?;
    }
    Ok(seconds)
}

fn cores() -> Result<f64, Box<dyn Error>> {
    Ok(std::thread::available_parallelism()?.get() as f64)
}

/// CPU time per sequence and round beyond the forwards, divided by the number of cores, microseconds.
fn beyond_forwards_us(found: &Found, (sequences, k): (usize, u32)) -> Result<f64, Box<dyn Error>> {
    let (sequences, rows) = (sequences as f64, (sequences as f64) * f64::from(k + 1));
    let forward = |rows| ForwardShape { rows, sequences, context: found.context };
    let forwards = found.target.micros(forward(rows)) + f64::from(k) * found.draft.micros(forward(sequences));
    Ok((found.cpu_us - forwards / sequences).max(0.0) / cores()?)
}

impl Line {
    fn of(found: &Found, (sequences, k): (usize, u32), (wire_us, taken_us): (f64, f64)) -> Self {
        let rounds = RoundModel {
            target: &found.target,
            known: &found.target,
            target_wire_us: wire_us,
            router_us: taken_us,
            target_rows_max: 512.0,
            drafting: Drafting::Apart { draft: &found.draft, workers: 1.0, wire_us },
            acceptance: &found.acceptance,
            context: found.context,
            prompt_us_per_token: 0.0,
        };
        Self {
            planned_ms: rounds.at(sequences as f64, k).tpot_ms,
            measured_ms: found.tpot_us / 1e3,
            rates: found.acceptance.clone(),
            others: found.others,
        }
    }

    fn ratio(&self) -> f64 {
        self.planned_ms / self.measured_ms
    }
}

#[expect(clippy::print_stdout, reason = "the table is this program's output")]
fn print_pass(costs: &Costs, (wire_us, plain_us, drafted_us): (f64, f64, f64)) {
    let of_one = |points: &[StepTimePoint]| StepTimes::new(points).micros(ForwardShape::plain(1.0, 64.0));
    println!(
        "step of one row: target {:.0} us, draft {:.0} us; between router and worker, there and back: {wire_us:.0} us; beyond forwards, a \
         sequence's round: {plain_us:.0} us, with drafts {drafted_us:.0} us",
        of_one(&costs.target),
        of_one(&costs.draft)
    );
}

#[expect(clippy::print_stdout, reason = "the table is this program's output")]
fn print(passes: &[Vec<Line>]) {
    println!(
        "\nsequences  k  acceptance by position       TPOT planned ms  measured ms  planned/measured  others  all passes"
    );
    let mut worst: f64 = 1.0;
    for (i, (sequences, k)) in POINTS.into_iter().enumerate() {
        let mut lines: Vec<&Line> = passes.iter().map(|lines| &lines[i]).collect();
        let all: Vec<String> = lines.iter().map(|line| format!("{:.2}", line.ratio())).collect();
        lines.sort_by(|a, b| a.ratio().total_cmp(&b.ratio()));
        let line = lines[lines.len() / 2];
        let rates: Vec<String> = line.rates.iter().map(|rate| format!("{rate:.2}")).collect();
        println!(
            "{sequences:>9} {k:>2}  {:<27} {:>16.3} {:>12.3} {:>17.3} {:>7.2}  {}",
            rates.join(" "),
            line.planned_ms,
            line.measured_ms,
            line.ratio(),
            line.others,
            all.join(" ")
        );
        worst = worst.max(line.ratio()).max(1.0 / line.ratio());
    }
    println!("\nlargest factor: {worst:.2}");
}
