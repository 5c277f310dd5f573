//! CPU time of the router's process per server-sent event, and per additional token in an event.
//!
//! Real processes: the router, a target and a draft worker that reproduce a profile's step times, and this
//! process as their client. All streams run from before the measured window until after it; the counts in the
//! window are the router's own. Workers' times are scaled so that events arrive at about `--rate`, because a
//! nearly idle router has cold caches each time it wakes. A window in which the machine was more than 60%
//! busy is marked invalid. Each window is followed by one of a [relay](crate::relay) with the same frames and
//! events at the same rate, which shows the share of libraries and kernel on this machine at this time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use outrider_cli::cluster::usage::{CpuSnapshot, CpuUsage};
use outrider_cli::cluster::{Binaries, ClusterSpec, DraftKind, NoLogs, ProcessCluster, ROUTER, TargetKind};
use tests::metrics::Page;
use tests::pair::root;
use tests::wait::{WAIT_TIMEOUT, until};

use crate::load::{Streams, quiet, until_under_way};
use crate::relay::Load;
use crate::worker_url;

/// Above this the run measures the operating system's scheduler.
const MAX_BUSY: f64 = 0.6;

/// Lower limit of the factor on workers' times: their timers have a resolution of some tens of microseconds.
const TIME_SCALE_MIN: f64 = 0.05;

/// Goals of the router's CPU time: per event with one token, and per additional token in an event,
/// microseconds.
const EVENT_US: f64 = 14.0;
const TOKEN_US: f64 = 1.5;

/// KV blocks of each worker: 1,024 streams of 30,000 tokens.
const AMPLE_KV_BLOCKS: i64 = 2_000_000;

/// A stream counts as under way after this many tokens.
const TOKENS_TO_START: u64 = 4;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Profile of the workers
    #[arg(long, default_value = "deploy/profiles/8b-h100.toml")]
    profile: PathBuf,
    /// Concurrent streams
    #[arg(long, value_delimiter = ',', default_value = "16,256,1024")]
    streams: Vec<usize>,
    /// Approximate number of verifications per second, set by scaling the workers' times
    #[arg(long, default_value_t = 24_000.0)]
    rate: f64,
    /// Duration of the measured window, seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
}

/// Counters of the router in one window.
struct Cost {
    events: f64,
    tokens: f64,
    /// Forwards of the target.
    forwards: f64,
    usage: CpuUsage,
}

/// CPU time per event of the router and of the relay, microseconds.
struct Compared {
    /// Tokens per event.
    tokens: f64,
    router: f64,
    relay: f64,
}

pub(crate) async fn run(args: &Args, binaries: &Binaries) -> anyhow::Result<()> {
    println!(
        "| streams | time scale | k | events/s | tokens per event | sequences per frame | router, CPU cores | router, us per event | goal, us per event | relay, us per event | router / relay | CPU utilization |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    let mut costs_per_token = Vec::new();
    for &streams in &args.streams {
        let plain = measure(args, binaries, (streams, 0)).await?;
        let drafted = measure(args, binaries, (streams, 4)).await?;
        let added_tokens = drafted.tokens - plain.tokens;
        ensure!(added_tokens > 0.0, "drafts added no tokens to the events of {streams} streams");
        costs_per_token.push((
            streams,
            (drafted.router - plain.router) / added_tokens,
            (drafted.relay - plain.relay) / added_tokens,
        ));
    }
    println!();
    for (streams, router, relay) in costs_per_token {
        println!(
            "{streams} streams: {router:.2} us per additional token in an event, from k = 0 to k = 4; relay: {relay:.2} us"
        );
    }
    Ok(())
}

impl Cost {
    /// Prints a table row with the relay's microseconds per event for comparison.
    fn compare_with_relay(&self, relay: f64, (streams, k): (usize, u32), time_scale: f64) -> Compared {
        let CpuUsage { wall, cpu, busy } = self.usage;
        let (wall, validity) = (wall.as_secs_f64(), if busy > MAX_BUSY { ", INVALID" } else { "" });
        let (tokens, router) = (self.tokens / self.events, cpu * 1e6 / self.events);
        println!(
            "| {streams} | x {time_scale:.2} | {k} | {:.0} | {tokens:.2} | {:.1} | {:.3} | {router:.1} | {:.1} | {relay:.1} | {:.2} | {busy:.2}{validity} |",
            self.events / wall,
            self.events / self.forwards,
            cpu / wall,
            EVENT_US + TOKEN_US * (tokens - 1.0),
            router / relay,
        );
        Compared { tokens, router, relay }
    }
}

async fn measure(args: &Args, binaries: &Binaries, (streams, k): (usize, u32)) -> anyhow::Result<Compared> {
    // A round of the profiles takes about 10 ms, with a draft 16 ms; more if not all rows fit into one
    // forward.
    let unscaled_rounds_per_second = if k > 0 { 62.5 } else { 100.0 };
    let rounds_per_second = args.rate / streams as f64;
    let time_scale = (unscaled_rounds_per_second / rounds_per_second).max(TIME_SCALE_MIN);
    let cluster = start(&args.profile, binaries, time_scale, Vec::new()).await?;
    // Enough tokens for three times the window, to cover the time before and after it.
    let tokens_each = 64 + (3.0 * args.seconds * rounds_per_second * if k > 0 { 4.0 } else { 1.0 }) as u32;
    let clients = Streams::new(&cluster.http_url(), streams, (k, tokens_each.min(30_000))).await?;
    let cost = clients.run_during(window(&cluster, streams as u64, args.seconds)).await?;
    cluster.stop().await;
    let relay = relay_cost_us(&cost, (streams, k), args.seconds).await?;
    Ok(cost.compare_with_relay(relay, (streams, k), time_scale))
}

/// The profile with KV space for all streams at any length, and step times that do not grow with context:
/// neither concerns the router.
fn with_ample_kv(profile: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(profile).with_context(|| format!("reading {}", profile.display()))?;
    let mut table: toml::Table = text.parse()?;
    for pool in ["target", "draft"] {
        let pool =
            table.get_mut(pool).and_then(toml::Value::as_table_mut).context("a profile has two pools")?;
        pool.insert("kv_blocks".to_owned(), AMPLE_KV_BLOCKS.into());
        let step = pool.get_mut("step").and_then(toml::Value::as_table_mut).context("a pool has steps")?;
        step.insert("kv_us_per_token".to_owned(), 0.0.into());
    }
    Ok(table.to_string())
}

/// A router with one target and one draft worker that reproduce a profile's step times; `env` applies to
/// every process.
pub(crate) async fn start(
    profile: &Path,
    binaries: &Binaries,
    time_scale: f64,
    env: Vec<(String, String)>,
) -> anyhow::Result<ProcessCluster> {
    let directory = tempfile::tempdir()?;
    let ample_kv_profile = directory.path().join("with_ample_kv.toml");
    std::fs::write(&ample_kv_profile, with_ample_kv(&root().join(profile))?)?;
    let target = TargetKind::Synthetic { profile: ample_kv_profile, time_scale };
    let mut spec = quiet(ClusterSpec::new(binaries.clone(), target, DraftKind::Synthetic));
    spec.env = env;
    spec.router_args = vec!["--max-sequences".to_owned(), "4096".to_owned()];
    Ok(ProcessCluster::start(spec, Arc::new(NoLogs), WAIT_TIMEOUT).await?)
}

/// CPU time of a relay per event, microseconds, with the clients, frames and rate of the window that `cost`
/// describes.
async fn relay_cost_us(cost: &Cost, (streams, k): (usize, u32), seconds: f64) -> anyhow::Result<f64> {
    // Rounded to whole groups: occasionally a sequence has a forward of its own.
    let groups = (streams as f64 * cost.forwards / cost.events).round().clamp(1.0, streams as f64);
    let frame = (streams as f64 / groups).ceil() as usize;
    let micros = cost.usage.wall.as_secs_f64() * 1e6 * streams as f64 / (cost.events * groups);
    // Frames in a single group spend half of the round at each worker.
    let share = if k > 0 && groups == 1.0 { 0.5 } else { 1.0 };
    let target_us = (micros * share) as u64;
    let draft_us = if k > 0 { target_us } else { 0 };
    let relay = Load { streams, frame, target_us, draft_us }.start().await?;
    let clients = Streams::new(&relay.url, streams, (k, 1)).await?;
    let window = async {
        let events_written = async || anyhow::Ok(Page::scrape(&relay.url).await?.total("events"));
        until("all streams are under way", async || {
            Ok(events_written().await? > (TOKENS_TO_START * streams as u64) as f64)
        })
        .await?;
        let (first, before) = (events_written().await?, CpuSnapshot::at(relay.pid()?)?);
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        let (after, last) = (CpuSnapshot::at(relay.pid()?)?, events_written().await?);
        ensure!(last > first, "the relay wrote no event within the window: raise --seconds");
        anyhow::Ok(before.usage_until(&after).cpu * 1e6 / (last - first))
    };
    let micros = clients.run_during(window).await?;
    relay.stop().await?;
    Ok(micros)
}

/// Measures the router while all streams run.
async fn window(cluster: &ProcessCluster, streams: u64, seconds: f64) -> anyhow::Result<Cost> {
    let (url, router) = (cluster.admin_url(ROUTER)?, cluster.process(ROUTER)?.pid());
    until_under_way(&url, streams, TOKENS_TO_START).await?;
    let target = worker_url(cluster, "target")?;
    let (target_before, before, first) =
        (Page::scrape(&target).await?, Page::scrape(&url).await?, CpuSnapshot::at(router)?);
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    let (last, after, target_after) =
        (CpuSnapshot::at(router)?, Page::scrape(&url).await?, Page::scrape(&target).await?);
    ensure!(after.sum("vllm:num_requests_running") == streams, "streams ended before the window did");
    Ok(Cost {
        events: after.increase(&before, "vllm:inter_token_latency_seconds_count")?,
        tokens: after.increase(&before, "vllm:generation_tokens_total")?,
        forwards: target_after.increase(&target_before, "outrider_worker_forwards_total")?,
        usage: first.usage_until(&last),
    })
}
