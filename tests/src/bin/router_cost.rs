//! What the router takes of a CPU for each server-sent event and for each further token in it: real processes, workers that only keep time, a client of
//! its own. Prints Markdown. `make measure-router`.
//!
//! CPU is that of the router's process (utime + stime of `/proc/PID/stat`) over a whole run, requests' beginnings included. Workers' times are stretched so that
//! events come at about `--rate`; a run in which the machine was more than 60% busy is void, and says so.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "printing is the job")]

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Parser;
use outrider_cli::cluster::{Binaries, Cluster, ClusterSpec, DraftKind, NoLogs, TargetKind};
use outrider_cli::load::prompts::Content;
use outrider_cli::load::{Access, Client, Endpoint, Prompt, Schedule, Settings};
use tests::pair::root;
use tests::wait::PATIENCE;

/// A machine that is busier than this measures its scheduler.
const MAX_BUSY: f64 = 0.6;

/// Clock ticks of a second in `/proc`, the same on every Linux that we build for.
const TICKS_PER_SECOND: f64 = 100.0;

/// Guesses of this task type are accepted with 0.82 each in the profiles: at k = 4, 3.5 tokens a verification.
const TASK_TYPE: &str = "easy";

/// Measures the CPU that the router takes.
#[derive(Parser)]
struct Args {
    /// What workers are like
    #[arg(long, default_value = "deploy/profiles/8b-h100.toml")]
    profile: PathBuf,
    /// Streams at once
    #[arg(long, value_delimiter = ',', default_value = "16,256,1024")]
    streams: Vec<usize>,
    /// Verifications a second that workers' times are stretched to, at most
    #[arg(long, default_value_t = 2_500.0)]
    rate: f64,
    /// About how long a run takes
    #[arg(long, default_value_t = 12.0)]
    seconds: f64,
}

/// One run.
struct Cost {
    k: u32,
    events: f64,
    tokens: f64,
    wall: f64,
    cpu: f64,
    busy: f64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    println!(
        "| streams | times stretched | k | events/s | tokens per event | router, of a core | us per event | machine busy |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let mut further = Vec::new();
    for &streams in &args.streams {
        let (plain, drafted) = (measure(&args, streams, 0).await?, measure(&args, streams, 4).await?);
        let more = drafted.tokens / drafted.events - plain.tokens / plain.events;
        further.push((streams, (drafted.us_per_event() - plain.us_per_event()) / more));
    }
    println!();
    for (streams, us) in further {
        println!("{streams} streams: {us:.2} us for each further token of an event");
    }
    Ok(())
}

impl Cost {
    fn us_per_event(&self) -> f64 {
        self.cpu * 1e6 / self.events
    }

    fn print(&self, streams: usize, time_scale: f64) {
        let Self { k, events, tokens, wall, cpu, busy } = self;
        let verdict = if *busy > MAX_BUSY { ", VOID" } else { "" };
        println!(
            "| {streams} | {time_scale:.1} | {k} | {:.0} | {:.2} | {:.2} | {:.1} | {busy:.2}{verdict} |",
            events / wall,
            tokens / events,
            cpu / wall,
            self.us_per_event(),
        );
    }
}

async fn measure(args: &Args, streams: usize, k: u32) -> anyhow::Result<Cost> {
    // A step of the profile takes some 10 ms, and more where all rows do not fit.
    let rounds_per_second = (args.rate / streams as f64).min(100.0);
    let time_scale = (100.0 / rounds_per_second).max(1.0);
    let cluster = start(args, time_scale).await?;
    let tokens_each = (args.seconds * rounds_per_second * if k > 0 { 3.5 } else { 1.0 }) as u32;
    let cost = drive(&cluster, (streams, k), tokens_each.clamp(16, 8_000)).await?;
    cluster.stop().await;
    cost.print(streams, time_scale);
    Ok(cost)
}

async fn start(args: &Args, time_scale: f64) -> anyhow::Result<Cluster> {
    let profile = root().join(&args.profile);
    let target = TargetKind::Synthetic { profile, time_scale };
    let mut spec = ClusterSpec::new(Binaries::beside_this_executable()?, target, DraftKind::Synthetic);
    spec.threads = Some(NonZeroUsize::MIN);
    spec.log = Some("error".to_owned());
    spec.router_args = vec!["--max-sequences".to_owned(), "4096".to_owned()];
    Ok(Cluster::start(spec, Arc::new(NoLogs), PATIENCE).await?)
}

async fn drive(cluster: &Cluster, (streams, k): (usize, u32), max_tokens: u32) -> anyhow::Result<Cost> {
    let endpoint = Endpoint::reach(&cluster.http_url(), Access::default()).await?;
    let mut fields = serde_json::Map::new();
    fields.insert("ignore_eos".to_owned(), true.into());
    let settings = Settings { max_tokens, num_draft_tokens: Some(k), fields, ..Settings::default() };
    let prompt = |i: usize| Prompt {
        task: TASK_TYPE.to_owned(),
        content: Content::Prompt(format!("stream number {i} of many")),
    };
    let requests: Vec<_> = (0..streams).map(|i| settings.request(&endpoint, &prompt(i))).collect();
    let client = Client::new(endpoint);
    let router = cluster.process("router")?.pid();
    let before = (process_cpu(router)?, machine()?);
    let run = client.drive(&requests, &Schedule::Closed { concurrency: streams }, |_| ()).await;
    let after = (process_cpu(router)?, machine()?);
    let (mut events, mut tokens) = (0, 0);
    for sample in run.samples(&requests) {
        ensure!(sample.is_completed(), "a request was not answered: {}", sample.outcome.explain());
        events += sample.gaps.len() + 1;
        tokens += sample.output_tokens;
    }
    let (busy, all) = (after.1.0 - before.1.0, after.1.1 - before.1.1);
    Ok(Cost {
        k,
        events: events as f64,
        tokens: tokens as f64,
        wall: run.duration().max(Duration::from_millis(1)).as_secs_f64(),
        cpu: after.0 - before.0,
        busy: busy / all,
    })
}

/// Seconds of CPU that a process took.
fn process_cpu(pid: u32) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_name = stat.rsplit_once(')').context("no name in /proc/PID/stat")?.1;
    let field = |at: usize| -> anyhow::Result<f64> {
        Ok(after_name.split_whitespace().nth(at).context("a short /proc/PID/stat")?.parse()?)
    };
    // Fields 14 and 15, counted from 1; the first after the name is field 3.
    Ok((field(11)? + field(12)?) / TICKS_PER_SECOND)
}

/// Ticks that the machine was busy, and all of them.
fn machine() -> anyhow::Result<(f64, f64)> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("an empty /proc/stat")?;
    let ticks: Vec<f64> = line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
    // Idle, and waiting for a disk; guests' time is part of the users' already.
    let all: f64 = ticks.iter().take(8).sum();
    let idle: f64 = ticks.iter().skip(3).take(2).sum();
    Ok((all - idle, all))
}
