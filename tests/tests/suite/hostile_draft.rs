//! A draft worker that breaks the contract in every way that we could think of must change no token and block
//! no request forever. Each kind of misbehaviour must be visible in the router's counters or in the usage.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tests::case::{Case, covering_set};
use tests::client::{Answer, check_all_same};
use tests::cluster::{Cluster, WorkerKind, plain_answers};
use tests::hostile::{DraftMisbehaviour, HostileDraft};
use tests::pair::PairText;

/// Concurrent requests per kind.
const REQUESTS: usize = 8;

/// Sends all requests with one hostile draft worker, and checks that it misbehaved without effect.
async fn ask_beside(
    misbehaviour: DraftMisbehaviour,
    cases: &[Case],
    expected: &[Answer],
) -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add(WorkerKind::Target).await?;
    let vocab_size = PairText::load()?.vocab_size() as u32;
    let num_misbehaviours = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&num_misbehaviours);
    cluster
        .add_draft_service(|lifetime| HostileDraft::new(misbehaviour, vocab_size, counted, lifetime))
        .await?;
    let answers = cluster.client().await?.ask_all(cases, REQUESTS).await?;
    check_all_same(cases, (expected, &answers), "a hostile draft worker")?;
    ensure!(num_misbehaviours.load(Ordering::Relaxed) > 0, "it received no request");
    let metrics = cluster.metrics().await?;
    if let Some(reason) = misbehaviour.counted_as() {
        let ignored = metrics.sum_where("outrider_rounds_ignored_total", &format!("reason=\"{reason}\""));
        ensure!(ignored > 0, "nothing was counted as {reason}");
    }
    let verified: u64 = answers.iter().map(|answer| answer.speculation().draft_tokens).sum();
    ensure!((verified > 0) == misbehaviour.is_verified(), "{verified} of its ids reached the target");
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_misbehaviour_of_a_draft_worker_changes_a_token() -> anyhow::Result<()> {
    let cases: Vec<Case> = covering_set(&PairText::load()?)?.into_iter().step_by(4).take(REQUESTS).collect();
    let expected = plain_answers(&cases, REQUESTS).await?;
    // Concurrently: most of them make the router wait, not work.
    stream::iter(DraftMisbehaviour::ALL)
        .map(|misbehaviour| {
            let (cases, expected) = (&cases, &expected);
            async move {
                ask_beside(misbehaviour, cases, expected).await.with_context(|| format!("{misbehaviour:?}"))
            }
        })
        .buffer_unordered(4)
        .try_collect()
        .await
}
