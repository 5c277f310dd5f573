//! Draft-ahead through a router and real workers: some proposals are ready when requested, and no token
//! changes.

use anyhow::ensure;
use tests::case::{Case, covering_set};
use tests::cluster::{Cluster, WorkerKind, plain_answers};
use tests::pair::PairText;
use tests::wait::until;

#[tokio::test(flavor = "multi_thread")]
async fn draft_ahead_changes_no_token() -> anyhow::Result<()> {
    let (cluster, _target, draft) = Cluster::of_pair(WorkerKind::DraftAhead).await?;
    let client = cluster.client().await?;
    let cases = covering_set(&PairText::load()?)?;
    let expected = client.ask_plain(&cases, 1).await?;
    let chains = cases.iter().map(|case| case.with_k(3));
    let trees = cases.iter().map(|case| case.with_tree(2, 6));
    let variants: Vec<Case> = chains.chain(trees).collect();
    // With one request the draft worker is idle while the target verifies; with two, less often; with more it
    // drafts nothing ahead.
    for width in [1, 2, 4] {
        let answers = client.ask_by_name(&variants, width).await?;
        for (variant, expected) in variants.iter().zip(expected.iter().cycle()) {
            answers[&variant.name].check_same(&variant.name, expected)?;
        }
    }
    let hits = draft.draft_ahead_hits().await?;
    let drafted_ahead = draft.metrics().await?.sum("outrider_worker_draft_ahead_guesses_total");
    ensure!(hits > 0 && drafted_ahead > 0, "{hits} hits, {drafted_ahead} tokens drafted ahead");
    until("what was drafted ahead is freed", async || {
        Ok(draft.metrics().await?.sum("outrider_worker_kv_blocks_used") == 0)
    })
    .await?;
    cluster.stop().await
}

/// The target is far, so the draft worker has time to draft to the end of its branches.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_drafted_ahead_waits_at_the_router_and_changes_no_token() -> anyhow::Result<()> {
    let cases = [Case::long_text(0.0, 100)?, Case::long_text(1.0, 100)?];
    let expected = plain_answers(&cases, 2).await?;
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add_far(WorkerKind::Target).await?;
    let draft = cluster.add(WorkerKind::DraftAhead).await?;
    let client = cluster.client().await?;
    for (case, expected) in cases.iter().zip(&expected) {
        for variant in [case.with_k(2), case.with_tree(2, 6)] {
            client.open(&variant).await?.rest().await?.check_same(&variant.name, expected)?;
        }
    }
    let used = cluster.metrics().await?.sum("outrider_proposals_ahead_used_total");
    let hits = draft.draft_ahead_hits().await?;
    println!("{used} rounds used a proposal that waited at the router, of {hits} hits");
    ensure!(used > 0 && used <= hits, "{used} of {hits}");
    cluster.stop().await
}

/// The text continues without its draft worker, then on another target with another draft worker.
#[tokio::test(flavor = "multi_thread")]
async fn losing_a_draft_worker_that_drafts_ahead_changes_no_token() -> anyhow::Result<()> {
    let cases = [Case::long_text(0.0, 400)?, Case::long_text(1.0, 400)?];
    let expected = plain_answers(&cases, 2).await?;
    for (case, expected) in cases.iter().zip(&expected) {
        let cluster = Cluster::start(|_| ()).await?;
        let target = cluster.add_far(WorkerKind::Target).await?;
        let draft = cluster.add(WorkerKind::DraftAhead).await?;
        let mut stream = cluster.client().await?.open(&case.with_k(2)).await?;
        stream.read_tokens(100).await?;
        draft.stop().await;
        stream.read_tokens(120).await?;
        // Before the other target is there, so that the text cannot end before.
        target.stop().await;
        let second = cluster.add(WorkerKind::Target).await?;
        let _draft = cluster.add(WorkerKind::DraftAhead).await?;
        let got = stream.rest().await?;
        got.check_same(&case.name, expected)?;
        ensure!(got.speculation().draft_tokens > 0, "nothing was drafted");
        ensure!(second.steps().await? > 0, "the text ended before its target did");
        cluster.stop().await?;
    }
    Ok(())
}
