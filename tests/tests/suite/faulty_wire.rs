//! Frames that are dropped, duplicated, delayed or overtaken, on the way to both workers and back, change no
//! token and block no request forever.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tests::case::covering_set;
use tests::client::check_all_same;
use tests::cluster::{Cluster, WorkerKind, plain_answers};
use tests::faulty_wire::{FrameCounts, WireFaults};
use tests::pair::PairText;

/// Concurrent requests.
const WIDTH: usize = 12;

fn faults(seed: u64) -> WireFaults {
    WireFaults {
        seed,
        dropped: 0.04,
        duplicated: 0.08,
        delayed: 0.12,
        max_delay: Duration::from_millis(25),
        latency: Duration::ZERO,
    }
}

fn check_tally(frame_counts: &FrameCounts) -> anyhow::Result<()> {
    let FrameCounts { delivered, dropped, duplicated, delayed, reordered } = frame_counts;
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let all = [delivered, dropped, duplicated, delayed, reordered].map(read);
    ensure!(
        all.iter().all(|&count| count > 0),
        "delivered, dropped, duplicated, delayed, reordered: {all:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_duplicated_and_reordered_frames_change_no_token() -> anyhow::Result<()> {
    let cases = covering_set(&PairText::load()?)?;
    let expected = plain_answers(&cases, WIDTH).await?;
    for seed in 1..=3 {
        // A dropped step should cost a fraction of a second, not a minute.
        let cluster =
            Cluster::start(|config| config.scheduler.target_deadline = Duration::from_millis(250)).await?;
        let (_target, to_target) = cluster.add_behind(WorkerKind::Target, faults(seed)).await?;
        let (_draft, to_draft) = cluster.add_behind(WorkerKind::Draft, faults(seed + 100)).await?;
        let answers =
            cluster.client().await?.ask_all(&cases, WIDTH).await.with_context(|| format!("seed {seed}"))?;
        check_all_same(&cases, (&expected, &answers), &format!("wire seed {seed}"))?;
        check_tally(&to_target).with_context(|| format!("seed {seed}, the target's wire"))?;
        check_tally(&to_draft).with_context(|| format!("seed {seed}, the draft's wire"))?;
        let resent =
            cluster.metrics().await?.sum_where("outrider_rounds_ignored_total", "reason=\"target_resend\"");
        ensure!(resent > 0, "seed {seed}: no step was sent again");
        let accepted: u64 = answers.iter().map(|answer| answer.speculation().accepted_tokens).sum();
        ensure!(accepted > 0, "seed {seed}: nothing was drafted through the wire");
        cluster.stop().await?;
    }
    Ok(())
}
