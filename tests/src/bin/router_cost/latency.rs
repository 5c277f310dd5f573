//! Time of a round beyond its steps, compared with two bare gRPC round trips of the same frames
//! ([`crate::echo`]) in the same run.
//!
//! All sequences draft four tokens in lockstep, with workers whose forwards all take the same time and over
//! the real wire. Within a window each target forward is one round of all sequences. Its wall-clock time,
//! minus the time that both workers spent in forwards, is what router, wire, listeners, mailboxes and threads
//! add. If forwards did not contain all rows (the sequences lost lockstep), the window is marked invalid.

use std::sync::Arc;
use std::time::{Duration, Instant};

use outrider_cli::cluster::usage::CpuSnapshot;
use outrider_cli::cluster::{Binaries, ClusterSpec, DraftKind, NoLogs, ProcessCluster, ROUTER, TargetKind};
use tests::metrics::Page;
use tests::wait::WAIT_TIMEOUT;

use crate::echo::Echo;
use crate::load::{Streams, quiet, until_under_way};
use crate::worker_url;

const K: u32 = 4;

/// Duration of a forward of the draft and of the target, microseconds.
const STEP_US: [u64; 2] = [400, 1_500];

/// Number of bare round trips of each kind, before the window and again after it.
const ROUND_TRIPS: u32 = 1_500;

/// Maximum share of rows that may be missing in the mean forward.
const ROWS_MISSING_MAX: f64 = 0.15;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Concurrent sequences
    #[arg(long, value_delimiter = ',', default_value = "1,16")]
    sequences: Vec<u64>,
    /// Duration of the measured window, seconds
    #[arg(long, default_value_t = 8.0)]
    seconds: f64,
}

/// Mean values per round of a window.
struct Rounds {
    wall_us: f64,
    draft_us: f64,
    verify_us: f64,
    draft_forwards: f64,
    rows: f64,
    busy: f64,
}

pub(crate) async fn run(args: &Args, binaries: &Binaries) -> anyhow::Result<()> {
    println!(
        "| sequences | round, us | steps, us | overhead, us | two round trips back to back, us | ratio | two round trips after pauses, us | ratio | rows per target forward | draft forwards per round | CPU utilization |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for &sequences in &args.sequences {
        let mut echo = Echo::start(Duration::ZERO).await?;
        let pause = Duration::from_micros(STEP_US[1]);
        let mut back_to_back = [0.0; 2];
        let rounds = {
            for (sum, pause) in back_to_back.iter_mut().zip([Duration::ZERO, pause]) {
                *sum += echo.round_trips(sequences, (ROUND_TRIPS, pause)).await?.iter().sum::<f64>() / 2.0;
            }
            let rounds = measure(args, binaries, sequences).await?;
            for (sum, pause) in back_to_back.iter_mut().zip([Duration::ZERO, pause]) {
                *sum += echo.round_trips(sequences, (ROUND_TRIPS, pause)).await?.iter().sum::<f64>() / 2.0;
            }
            rounds
        };
        echo.stop().await?;
        rounds.print(sequences, back_to_back);
    }
    Ok(())
}

impl Rounds {
    fn print(&self, sequences: u64, [back_to_back, after_pauses]: [f64; 2]) {
        let steps = self.draft_us + self.verify_us;
        let overhead = self.wall_us - steps;
        let all_rows = (sequences * u64::from(K + 1)) as f64;
        let validity = if self.rows < (1.0 - ROWS_MISSING_MAX) * all_rows { ", INVALID" } else { "" };
        println!(
            "| {sequences} | {:.0} | {steps:.0} | {overhead:.0} | {back_to_back:.0} | {:.2} | {after_pauses:.0} | {:.2} | {:.1} of {all_rows:.0}{validity} | {:.2} | {:.2} |",
            self.wall_us,
            overhead / back_to_back,
            overhead / after_pauses,
            self.rows,
            self.draft_forwards,
            self.busy,
        );
    }
}

async fn measure(args: &Args, binaries: &Binaries, sequences: u64) -> anyhow::Result<Rounds> {
    let directory = tempfile::tempdir()?;
    let profile = directory.path().join("even.toml");
    std::fs::write(&profile, even_profile())?;
    let target = TargetKind::Synthetic { profile, time_scale: 1.0 };
    let spec = quiet(ClusterSpec::new(binaries.clone(), target, DraftKind::Synthetic));
    let cluster = ProcessCluster::start(spec, Arc::new(NoLogs), WAIT_TIMEOUT).await?;
    let clients = Streams::new(&cluster.http_url(), sequences as usize, (K, 100_000)).await?;
    let rounds = clients.run_during(window(&cluster, sequences, args.seconds)).await?;
    cluster.stop().await;
    Ok(rounds)
}

/// Counters of both workers at one time.
struct WorkerCounters {
    at: Instant,
    draft: Page,
    target: Page,
}

impl WorkerCounters {
    async fn read(cluster: &ProcessCluster) -> anyhow::Result<Self> {
        let (draft, target) = (worker_url(cluster, "draft")?, worker_url(cluster, "target")?);
        let draft = Page::scrape(&draft).await?;
        let at = Instant::now();
        Ok(Self { at, draft, target: Page::scrape(&target).await? })
    }
}

async fn window(cluster: &ProcessCluster, sequences: u64, seconds: f64) -> anyhow::Result<Rounds> {
    let (url, router) = (cluster.admin_url(ROUTER)?, cluster.process(ROUTER)?.pid());
    until_under_way(&url, sequences, 100).await?;
    let (first, before) = (WorkerCounters::read(cluster).await?, CpuSnapshot::at(router)?);
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    let (last, after) = (WorkerCounters::read(cluster).await?, CpuSnapshot::at(router)?);
    let draft = |name: &str| last.draft.increase(&first.draft, name);
    let target = |name: &str| last.target.increase(&first.target, name);
    let rounds = target("outrider_worker_forwards_total")?;
    let us_per_round = |seconds: f64| seconds * 1e6 / rounds;
    Ok(Rounds {
        wall_us: us_per_round((last.at - first.at).as_secs_f64()),
        draft_us: us_per_round(draft("outrider_worker_forward_seconds_sum")?),
        verify_us: us_per_round(target("outrider_worker_forward_seconds_sum")?),
        draft_forwards: draft("outrider_worker_forwards_total")? / rounds,
        rows: target("outrider_worker_rows_total")? / rounds,
        busy: before.usage_until(&after).busy,
    })
}

/// A profile whose forwards take the same time for any number of rows.
fn even_profile() -> String {
    let pool = |name: &str, micros: u64| {
        format!(
            "[{name}]\ndevice = \"even\"\nworkers = 1\nmax_batch_rows = 1024\nkv_blocks = 1000000\nkv_block_size = 16\n\
             [{name}.step]\nmicros_by_rows = [[1, {micros}], [1024, {micros}]]\nprefill_tokens_per_second = 1000000\n"
        )
    };
    let [draft, target] = STEP_US;
    format!(
        "name = \"even steps\"\nvocab_size = 4096\nmax_model_len = 200000\nwire_us = 0\nnoise = 0.0\n{}{}[[acceptance]]\nby_position = [0.82]\n",
        pool("target", target),
        pool("draft", draft)
    )
}
