//! One router, many targets, more draft workers, a thousand sequences, for minutes: checks that its memory
//! stays flat and that every request gets its turn.
//!
//! The router is a separate process. All workers run in this process, each with a gRPC listener and a device
//! thread; they reproduce a profile's step times, stretched so that the machine keeps up. More clients than
//! the router admits each send one request after the other, in several lanes and priorities. Memory is
//! sampled throughout; waits are the router's measurements, first-token times are the clients'.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use futures::future::join_all;
use outrider_cli::cluster::{
    Binaries, ClusterSpec, Discovery, DraftKind, NoLogs, ProcessCluster, ROUTER, TargetKind,
};
use outrider_cli::load::prompts::Content;
use outrider_cli::load::{Access, Client, Endpoint, Prompt, Request, Schedule, Settings};
use scheduling::profile::Profile;
use service::shutdown::Lifetime;
use tests::cluster::{WorkerKind, start_synthetic};
use tests::lanes_report::LanesReport;
use tests::pair::root;
use tests::wait::{WAIT_TIMEOUT, until};
use tokio::time::Instant;
use worker::config::SyntheticConfig;

use outrider_cli::cluster::usage::{CpuSnapshot, resident_mib};

use crate::load::quiet;

/// Task types of the requests: two that the profiles know, and one that they do not.
const TASK_TYPES: [&str; 3] = ["easy", "hard", "other"];

/// Priorities of the requests.
const PRIORITIES: [u8; 4] = [0, 1, 2, 8];

/// Lengths of the answers, tokens.
const MAX_TOKENS: [u32; 5] = [24, 48, 64, 96, 160];

/// Interval between two samples of the router's memory.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);

/// Share of the run during which memory may grow.
const WARM_UP: f64 = 0.25;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Profile of the workers
    #[arg(long, default_value = "deploy/profiles/8b-h100.toml")]
    profile: PathBuf,
    /// Factor on the workers' times
    #[arg(long, default_value_t = 30.0)]
    time_scale: f64,
    /// Target workers
    #[arg(long, default_value_t = 16)]
    targets: usize,
    /// Draft workers
    #[arg(long, default_value_t = 64)]
    drafts: usize,
    /// Maximum concurrent sequences of the router
    #[arg(long, default_value_t = 1_024)]
    sequences: usize,
    /// Additional clients, which wait for admission
    #[arg(long, default_value_t = 128)]
    waiting: usize,
    /// Duration for which clients send requests, seconds
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// Use prompts too short for the router's prefix table, to show the table's share of its memory
    #[arg(long)]
    short_prompts: bool,
}

/// Results of the clients of one priority.
#[derive(Debug, Default, Clone, Copy)]
struct ClientStats {
    answers: u64,
    tokens: u64,
    worst_first_token: Duration,
}

pub(crate) async fn run(args: &Args, binaries: &Binaries) -> anyhow::Result<()> {
    let lifetime = Lifetime::new();
    let workers = start_workers(args, &lifetime).await?;
    let directory = tempfile::tempdir()?;
    let list = directory.path().join("workers.toml");
    std::fs::write(&list, workers)?;
    let cluster = start_router(args, binaries, &list).await?;
    until("the router knows all workers", async || {
        let report = LanesReport::of(&cluster.admin_url("router")?).await?;
        Ok(report.0["workers"].as_array().is_some_and(|all| all.len() == args.targets + args.drafts))
    })
    .await?;
    let router = cluster.process(ROUTER)?.pid();
    let before = CpuSnapshot::at(router)?;
    let endpoint = Endpoint::connect(&cluster.http_url(), Access::default()).await?;
    let client = Client::new(endpoint);
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let clients =
        (0..args.sequences + args.waiting).map(|i| request_repeatedly(&client, (i, args.short_prompts), end));
    let (stats, memory) = tokio::join!(join_all(clients), watch(router, end));
    let memory = memory?;
    let busy = before.usage_until(&CpuSnapshot::at(router)?).busy;
    let report = LanesReport::of(&cluster.admin_url("router")?).await?;
    cluster.stop().await;
    lifetime.shut_down(Duration::from_secs(5)).await;
    print(args, &merge(stats)?, &report, (&memory, busy))
}

/// Starts all workers in this process and returns the worker list for the router.
async fn start_workers(args: &Args, lifetime: &Lifetime) -> anyhow::Result<String> {
    let profile = root().join(&args.profile);
    let profile =
        Arc::new(Profile::parse(&std::fs::read_to_string(&profile)?).context("the profile is invalid")?);
    let mut list = String::new();
    for i in 0..args.targets + args.drafts {
        let (kind, role) = match i < args.targets {
            true => (WorkerKind::SyntheticTarget, "target"),
            false => (WorkerKind::SyntheticDraft, "draft"),
        };
        let synthetic = SyntheticConfig { profile: Arc::clone(&profile), time_scale: args.time_scale };
        let address = start_synthetic(kind, synthetic, lifetime.clone()).await?;
        list += &format!("[[worker]]\nrole = \"{role}\"\naddress = \"http://{address}\"\n");
    }
    Ok(list)
}

/// A router that discovers workers from `list`; no workers are started.
async fn start_router(args: &Args, binaries: &Binaries, list: &Path) -> anyhow::Result<ProcessCluster> {
    let no_target = TargetKind::Synthetic { profile: args.profile.clone(), time_scale: args.time_scale };
    let mut spec = quiet(ClusterSpec::new(binaries.clone(), no_target, DraftKind::None));
    spec.target_workers = 0;
    spec.discovery = Discovery::Uri(format!("static:{}", list.display()));
    let sequences = args.sequences.to_string();
    spec.router_args =
        ["--max-sequences", &sequences, "--max-waiting-requests", "4096"].map(str::to_owned).to_vec();
    Ok(ProcessCluster::start(spec, Arc::new(NoLogs), WAIT_TIMEOUT).await?)
}

/// One client: sends one request after the other until `end`, always with the same lane and priority.
async fn request_repeatedly(
    client: &Client,
    (number, is_short): (usize, bool),
    end: Instant,
) -> anyhow::Result<(u8, ClientStats)> {
    let priority = PRIORITIES[number % PRIORITIES.len()];
    let task = TASK_TYPES[number / PRIORITIES.len() % TASK_TYPES.len()];
    let mut fields = serde_json::Map::new();
    fields.insert("ignore_eos".to_owned(), true.into());
    fields.insert("priority".to_owned(), priority.into());
    let mut stats = ClientStats::default();
    for round in 0.. {
        if Instant::now() >= end {
            break;
        }
        let max_tokens = MAX_TOKENS[(number + round) % MAX_TOKENS.len()];
        let settings = Settings { max_tokens, fields: fields.clone(), ..Settings::default() };
        let content = Content::Prompt(match is_short {
            true => format!("{number}: {round}"),
            false => format!("client number {number} asks for the {round}. time"),
        });
        let request = settings.request(client.endpoint(), &Prompt { task: task.to_owned(), content });
        let requests: &[Request] = std::slice::from_ref(&request);
        let run = client.drive(requests, &Schedule::Closed { concurrency: 1 }, |_| ()).await;
        let sample = run.samples(requests).swap_remove(0);
        ensure!(sample.is_completed(), "client {number} was not answered: {}", sample.outcome.explain());
        stats.answers += 1;
        stats.tokens += sample.output_tokens;
        stats.worst_first_token = stats.worst_first_token.max(sample.ttft.unwrap_or_default());
    }
    Ok((priority, stats))
}

/// Samples the router's memory over time, MiB.
async fn watch(router: u32, end: Instant) -> anyhow::Result<Vec<f64>> {
    let mut memory = Vec::new();
    while Instant::now() < end {
        memory.push(resident_mib(router)?);
        tokio::time::sleep(SAMPLE_EVERY).await;
    }
    Ok(memory)
}

fn merge(stats: Vec<anyhow::Result<(u8, ClientStats)>>) -> anyhow::Result<BTreeMap<u8, ClientStats>> {
    ensure!(!stats.is_empty(), "no client sent requests: raise --sequences");
    let mut by_priority: BTreeMap<u8, ClientStats> = BTreeMap::new();
    for result in stats {
        let (priority, stats) = result?;
        let all = by_priority.entry(priority).or_default();
        all.answers += stats.answers;
        all.tokens += stats.tokens;
        all.worst_first_token = all.worst_first_token.max(stats.worst_first_token);
    }
    for (priority, stats) in &by_priority {
        ensure!(stats.answers > 0, "no request of priority {priority} was answered: raise --seconds");
    }
    Ok(by_priority)
}

fn print(
    args: &Args,
    stats: &BTreeMap<u8, ClientStats>,
    report: &LanesReport,
    (memory, busy): (&[f64], f64),
) -> anyhow::Result<()> {
    let Args { targets, drafts, sequences, waiting, seconds, .. } = args;
    println!(
        "1 router, {targets} targets, {drafts} draft workers, {} clients, at most {sequences} concurrent sequences, {seconds} s, time scale {}, CPU utilization {busy:.2}\n",
        sequences + waiting,
        args.time_scale
    );
    println!(
        "| priority | answers | tokens | longest wait for admission, ms | longest wait for a target, ms | longest time to first token, ms |"
    );
    println!("|---|---|---|---|---|---|");
    let longest_ms = |waits: &str, priority: u8| {
        let all = report.0[waits].as_array().map(Vec::as_slice).unwrap_or_default();
        let wait = all.iter().find(|wait| wait["priority"] == priority);
        wait.and_then(|wait| wait["worst_ms"].as_u64())
            .with_context(|| format!("the router reports no {waits} of priority {priority}"))
    };
    for (priority, ClientStats { answers, tokens, worst_first_token }) in stats {
        println!(
            "| {priority} | {answers} | {tokens} | {} | {} | {} |",
            longest_ms("admission_waits", *priority)?,
            longest_ms("target_waits", *priority)?,
            worst_first_token.as_millis()
        );
    }
    let num_warm_up = (memory.len() as f64 * WARM_UP) as usize;
    let (first, last) = (
        memory.get(num_warm_up).context("the run is too short: raise --seconds")?,
        memory.last().context("no sample")?,
    );
    let peak = memory.iter().copied().fold(0.0, f64::max);
    println!(
        "\nrouter memory: {first:.1} MiB after {} s, {last:.1} MiB at the end ({:+.1}), peak {peak:.1} MiB",
        num_warm_up as u64 * SAMPLE_EVERY.as_secs(),
        last - first
    );
    let samples: Vec<String> = memory.iter().map(|mib| format!("{mib:.0}")).collect();
    println!("memory every {} s, MiB: {}", SAMPLE_EVERY.as_secs(), samples.join(" "));
    Ok(())
}
