//! `plan`'s rounds held against a running cluster: the bundled pair as real processes on this machine, one thread a worker.
//!
//! `cargo build --workspace --bins && cargo run -p outrider --example plan_against_cluster`
//!
//! Step times are measured in this process, as `check-pair` does it; acceptance is the cluster's own. Client, router and both workers share this
//! machine's cores, so what router and client take of a CPU for each sequence's round stands in the way of the others. It is measured at
//! 16 sequences, which are no point (CPU time of both processes over rounds; a router that serves one wakes for each event, which costs
//! more). The way between processes is read off the first line, which agrees by construction; the others are predictions. Ends with
//! the largest factor between any of them and what was measured.

#![forbid(unsafe_code)]

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use engine::{Engine, LoadOptions, WeightFormat};
use outrider_cli::check_pair::cost::{self, Costs};
use outrider_cli::check_pair::local::LocalModel;
use outrider_cli::cluster::usage::process_cpu;
use outrider_cli::cluster::{Binaries, Cluster, ClusterSpec, DraftKind, NoLogs, ROUTER};
use outrider_cli::load::cpu::CpuMeter;
use outrider_cli::load::{Client, Endpoint, FigureOptions, Figures, Prompt, Schedule, Settings};
use outrider_cli::plan::round::{Drafting, Rounds};
use speculation::cost::{Forward, StepTimes};

/// Sequences at once, and k. The first is what the way between processes is read off.
const POINTS: [(usize, u32); 10] =
    [(1, 0), (1, 2), (1, 4), (2, 0), (2, 2), (2, 4), (4, 0), (4, 2), (4, 4), (8, 0)];
/// What router and client take is measured here, without drafts and with.
const CALIBRATION: [(usize, u32); 2] = [(16, 0), (16, 4)];
const MAX_TOKENS: u32 = 64;
const PATIENCE: Duration = Duration::from_secs(60);

/// What a point showed.
struct Found {
    tpot_us: f64,
    acceptance: Vec<f64>,
    context: f64,
    /// CPU time of the router and of this process, over rounds.
    cpu_us: f64,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    let costs = cost::measure(&mut load(models.join("target"))?, &mut load(models.join("draft"))?)?;
    let own = std::env::current_exe()?;
    let directory = own.parent().and_then(Path::parent).ok_or("the program has no directory")?;
    let draft = DraftKind::Model(models.join("draft"));
    let mut spec = ClusterSpec::new(Binaries::in_directory(directory)?, models.join("target"), draft);
    spec.threads = Some(NonZeroUsize::MIN);
    let cluster = Cluster::start(spec, Arc::new(NoLogs), PATIENCE).await?;
    let client = Client::new(Endpoint::reach(&cluster.http_url(), Default::default()).await?);
    let mut cpu_us = Vec::new();
    for at in CALIBRATION {
        // Connections and caches settle here, too.
        cpu_us.push(measure(&cluster, &client, at).await?.cpu_us);
    }
    let mut all = Vec::new();
    for at in POINTS {
        all.push((at, measure(&cluster, &client, at).await?));
    }
    cluster.stop().await;
    print(&costs, (cpu_us[0], cpu_us[1]), &all);
    Ok(())
}

fn load(directory: PathBuf) -> Result<LocalModel, Box<dyn Error>> {
    let engine = Engine::load(&LoadOptions {
        model_dir: directory,
        weights: WeightFormat::AsStored,
        threads: 1,
        tensor_parallel: 1,
        kv_memory_bytes: 1 << 30,
        max_model_len: None,
    })?;
    Ok(LocalModel::new(engine, u32::MAX))
}

async fn measure(
    cluster: &Cluster,
    client: &Client,
    (concurrency, k): (usize, u32),
) -> Result<Found, Box<dyn Error>> {
    let fields = [("ignore_eos".to_owned(), true.into())].into_iter().collect();
    let num_draft_tokens = Some(k);
    let settings =
        Settings { max_tokens: MAX_TOKENS, num_draft_tokens, chat: true, fields, ..Settings::default() };
    let prompts = Prompt::built_in();
    let requests: Vec<_> = prompts.iter().map(|prompt| settings.request(client.endpoint(), prompt)).collect();
    let router = cluster.process(ROUTER)?.pid();
    let (meter, before) = (CpuMeter::start(), process_cpu(router)?);
    let run = client.drive(&requests, &Schedule::Closed { concurrency }, |_| ()).await;
    let cpu_seconds = meter.read().1.as_secs_f64() + process_cpu(router)? - before;
    let samples = run.samples(&requests);
    let figures = Figures::of(&samples, run.duration(), &FigureOptions::default());
    let tpot = figures.tpot.ok_or("no request was answered")?;
    let prompt_tokens = figures.total_input_tokens as f64 / figures.completed as f64;
    let rounds: usize = samples.iter().map(|sample| sample.gaps.len() + 1).sum();
    let shares = figures.acceptance.and_then(|acceptance| acceptance.per_position);
    // Shares are of all rounds; rates are given that all positions before were accepted.
    let mut before = 1.0;
    let rate = |share: f64| share / std::mem::replace(&mut before, share);
    Ok(Found {
        tpot_us: tpot.p50.value * 1e3,
        acceptance: shares.unwrap_or_default().into_iter().map(rate).collect(),
        context: prompt_tokens + f64::from(MAX_TOKENS) / 2.0,
        cpu_us: cpu_seconds * 1e6 / rounds as f64,
    })
}

#[expect(clippy::print_stdout, reason = "the table is this program's output")]
fn print(costs: &Costs, (plain_us, drafted_us): (f64, f64), all: &[((usize, u32), Found)]) {
    let (target, draft) = (StepTimes::new(&costs.target), StepTimes::new(&costs.draft));
    let Some((_, first)) = all.first() else { return };
    let wire_us = (first.tpot_us - target.micros(Forward::plain(1.0, first.context))).max(0.0);
    println!(
        "step of one row: target {:.0} us, draft {:.0} us",
        target.micros(Forward::plain(1.0, 64.0)),
        draft.micros(Forward::plain(1.0, 64.0))
    );
    println!("between router and worker, there and back, read off the first line: {wire_us:.0} us");
    println!(
        "router and client, CPU for each sequence's round at 16 sequences: {plain_us:.0} us, with drafts {drafted_us:.0} us\n"
    );
    println!("sequences  k  acceptance by position       TPOT planned ms  measured ms  planned/measured");
    let mut worst: f64 = 1.0;
    for ((sequences, k), found) in all {
        let rounds = Rounds {
            target: &target,
            target_wire_us: wire_us,
            router_us: if *k == 0 { plain_us } else { drafted_us },
            target_rows_max: 512.0,
            drafting: Drafting::Apart { draft: &draft, workers: 1.0, wire_us },
            acceptance: &found.acceptance,
            context: found.context,
            prompt_us_per_token: 0.0,
        };
        let planned = rounds.at(*sequences as f64, *k).tpot_ms;
        let measured = found.tpot_us / 1e3;
        let rates: Vec<String> = found.acceptance.iter().map(|rate| format!("{rate:.2}")).collect();
        println!(
            "{sequences:>9} {k:>2}  {:<27} {planned:>16.3} {measured:>12.3} {:>17.3}",
            rates.join(" "),
            planned / measured
        );
        worst = worst.max(planned / measured).max(measured / planned);
    }
    println!("\nlargest factor: {worst:.2}");
}
