//! Sends more requests than can be served: throughput and latency of the served ones, and how the others are
//! rejected.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Parser;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use outrider_cli::cluster::usage::resident_mib;
use outrider_cli::cluster::{Binaries, ClusterSpec, DraftKind, NoLogs, ProcessCluster, ROUTER, TargetKind};
use outrider_cli::load::Schedule;
use reqwest::StatusCode;
use reqwest::header::RETRY_AFTER;
use serde_json::{Value, json};
use tests::chaos::impact::quantile;
use tests::http_client::{COMPLETIONS, streamed_text};
use tests::lanes_report::LanesReport;
use tests::pair::{MODEL, root};
use tests::wait::{WAIT_TIMEOUT, until};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Interval between two samples of the router's memory.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Timeout of an answer; counted as broken.
const ANSWER_WITHIN: Duration = Duration::from_secs(90);

/// Sends a multiple of what a small cluster can serve.
///
/// Synthetic workers first serve a closed loop with as many clients as the router admits: that is the
/// capacity. Then requests arrive at random times at `--times` the capacity, regardless of the answers. The
/// table shows throughput relative to capacity, the latency of admitted requests, how the others were
/// rejected, and the router's memory.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Load as a multiple of the capacity
    #[arg(long, default_value_t = 5.0)]
    times: f64,
    /// Duration in seconds; the capacity is measured for the same time
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Seed of the arrival times
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Factor on the step times of the bundled pair's profile
    #[arg(long, default_value_t = 10.0)]
    time_scale: f64,
    /// Output tokens per answer
    #[arg(long, default_value_t = 32)]
    max_tokens: u32,
    /// The router's --max-sequences
    #[arg(long, default_value_t = 32)]
    max_sequences: usize,
    /// The router's --max-waiting-requests
    #[arg(long, default_value_t = 32)]
    max_waiting_requests: usize,
}

/// Result of one request. Times are measured from its intended sending time.
#[derive(Debug, Clone, Copy)]
enum Answer {
    /// Received completely.
    Served { first_byte: Duration, latency: Duration, ended: Instant },
    /// Rejected with 429 before the first byte of an answer.
    Rejected { has_retry_after: bool, latency: Duration },
    /// Any other result.
    Broken,
}

/// Runs the overload and prints the results.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let cluster = start(args).await?;
    let router = cluster.process(ROUTER)?.pid();
    let url = format!("{}{COMPLETIONS}", cluster.http_url());
    let client = reqwest::Client::builder().no_proxy().build()?;
    let load = LoadClient { client, url, max_tokens: args.max_tokens };
    let window = Duration::from_secs(args.seconds);
    let served = load.closed_loop(args.max_sequences, window).await?;
    let capacity = served as f64 / window.as_secs_f64();
    ensure!(served > 0, "nothing was served in {window:?}: raise --seconds or lower --time-scale");
    let before = resident_mib(router)?;
    let count = (capacity * args.times * window.as_secs_f64()) as usize;
    let schedule = Schedule::poisson(capacity * args.times, count, args.seed);
    let mut peak = before;
    let end = Instant::now() + window;
    let answers = tokio::select! {
        biased;
        // Every request has been answered or given up.
        answers = load.open_loop(&schedule) => answers,
        // The router has exited; the answers would only be counted as broken.
        error = watch(router, &mut peak) => return Err(error),
    };
    until("the router has released every sequence", async || {
        let report = LanesReport::of(&cluster.admin_url("router")?).await?;
        let workers = report.0["workers"].as_array().context("no workers in /debug/lanes")?;
        Ok(workers.iter().all(|worker| worker["reserved_blocks"] == 0))
    })
    .await?;
    let memory = [before, peak, resident_mib(router)?];
    cluster.stop().await;
    print(args, (capacity, end), (&answers, memory));
    let num_broken = answers.iter().filter(|answer| matches!(answer, Answer::Broken)).count();
    let is_served = |answer: &Answer| matches!(answer, Answer::Served { .. });
    ensure!(answers.iter().any(is_served), "no request was served under overload: raise --seconds");
    ensure!(num_broken == 0, "{num_broken} requests were neither served nor rejected");
    Ok(())
}

async fn start(args: &Args) -> anyhow::Result<ProcessCluster> {
    let profile = root().join("deploy/profiles/cpu-pair.toml");
    let target = TargetKind::Synthetic { profile, time_scale: args.time_scale };
    let mut spec = ClusterSpec::new(Binaries::beside_this_executable()?, target, DraftKind::Synthetic);
    spec.log = Some("error".to_owned());
    spec.target_args = ["--served-model-name", MODEL].map(str::to_owned).to_vec();
    let (sequences, waiting) = (args.max_sequences.to_string(), args.max_waiting_requests.to_string());
    let limits = ["--max-sequences", &sequences, "--max-waiting-requests", &waiting];
    spec.router_args = limits.map(str::to_owned).to_vec();
    Ok(ProcessCluster::start(spec, Arc::new(NoLogs), WAIT_TIMEOUT).await?)
}

/// Records the router's peak memory, MiB; returns only if the router has exited.
async fn watch(router: u32, peak: &mut f64) -> anyhow::Error {
    loop {
        match resident_mib(router) {
            Ok(mib) => *peak = peak.max(mib),
            Err(error) => return anyhow::Error::new(error).context("the router has exited"),
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// A client of the router.
struct LoadClient {
    client: reqwest::Client,
    url: String,
    max_tokens: u32,
}

impl LoadClient {
    /// A fixed number of users, each of whom sends the next request after the last answer; returns the number
    /// of answers within the window.
    async fn closed_loop(&self, users: usize, window: Duration) -> anyhow::Result<usize> {
        let end = Instant::now() + window;
        let user = |user: usize| async move {
            let mut served = 0;
            while Instant::now() < end {
                let answer = self.ask(user, Instant::now()).await;
                ensure!(matches!(answer, Answer::Served { .. }), "below capacity an answer is {answer:?}");
                served += usize::from(Instant::now() < end);
            }
            Ok(served)
        };
        Ok(futures::future::try_join_all((0..users).map(user)).await?.into_iter().sum())
    }

    /// Sends each request at its time, regardless of the others.
    async fn open_loop(&self, schedule: &Schedule) -> Vec<Answer> {
        let Schedule::Open { send_after } = schedule else { return Vec::new() };
        let start = Instant::now();
        let request = |(number, after): (usize, &Duration)| {
            let intended = start + *after;
            async move {
                sleep_until(intended).await;
                self.ask(number, intended).await
            }
        };
        send_after.iter().enumerate().map(request).collect::<FuturesUnordered<_>>().collect().await
    }

    async fn ask(&self, number: usize, intended: Instant) -> Answer {
        let answer = timeout(ANSWER_WITHIN, self.exchange(number, intended)).await;
        answer.ok().and_then(Result::ok).unwrap_or(Answer::Broken)
    }

    async fn exchange(&self, number: usize, intended: Instant) -> reqwest::Result<Answer> {
        let body: Value = json!({
            "model": MODEL, "prompt": [5, 6, 7 + number % 1_000], "max_tokens": self.max_tokens, "seed": number,
            "ignore_eos": true, "stream": true, "speculation": { "num_draft_tokens": 4 },
        });
        let mut response = self.client.post(&self.url).json(&body).send().await?;
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            let has_retry_after = response.headers().contains_key(RETRY_AFTER);
            return Ok(Answer::Rejected { has_retry_after, latency: intended.elapsed() });
        }
        if !response.status().is_success() {
            return Ok(Answer::Broken);
        }
        let (mut first_byte, mut text) = (None, Vec::new());
        while let Some(bytes) = response.chunk().await? {
            first_byte.get_or_insert_with(|| intended.elapsed());
            text.extend_from_slice(&bytes);
        }
        let is_complete = streamed_text(&String::from_utf8_lossy(&text)).is_ok();
        let served = first_byte.map(|first_byte| Answer::Served {
            first_byte,
            latency: intended.elapsed(),
            ended: Instant::now(),
        });
        Ok(served.filter(|_| is_complete).unwrap_or(Answer::Broken))
    }
}

fn print(args: &Args, (capacity, end): (f64, Instant), (answers, memory): (&[Answer], [f64; 3])) {
    let (mut first_bytes, mut served, mut rejections) = (vec![], vec![], vec![]);
    let (mut in_time, mut without_retry_after, mut broken) = (0, 0, 0);
    for answer in answers {
        match *answer {
            Answer::Served { first_byte, latency, ended } => {
                in_time += usize::from(ended <= end);
                first_bytes.push(first_byte);
                served.push(latency);
            }
            Answer::Rejected { has_retry_after, latency } => {
                rejections.push(latency);
                without_retry_after += usize::from(!has_retry_after);
            }
            Answer::Broken => broken += 1,
        }
    }
    for times in [&mut first_bytes, &mut served, &mut rejections] {
        times.sort();
    }
    let p99 = |times: &[Duration]| {
        quantile(times, 0.99).map_or_else(|| "-".to_owned(), |time| time.as_millis().to_string())
    };
    let goodput = in_time as f64 / args.seconds as f64;
    println!("| | |\n|---|---|");
    println!("| capacity, requests/s ({} at once) | {capacity:.1} |", args.max_sequences);
    println!(
        "| offered, requests/s | {:.1} for {} s: {} requests |",
        capacity * args.times,
        args.seconds,
        answers.len()
    );
    println!("| served meanwhile, requests/s | {goodput:.1} ({:.2} of capacity) |", goodput / capacity);
    println!("| first byte of those, P99 ms | {} |", p99(&first_bytes));
    println!("| end of those, P99 ms | {} |", p99(&served));
    println!(
        "| rejected with 429 before the first byte | {} ({without_retry_after} without Retry-After) |",
        rejections.len()
    );
    println!("| their wait, P99 ms | {} |", p99(&rejections));
    println!("| failed otherwise | {broken} |");
    let [before, peak, after] = memory;
    println!("| router's memory before, peak, after, MiB | {before:.1}, {peak:.1}, {after:.1} |");
}
