//! A draft worker that stalls: it is connected but does not answer. It costs each sequence at most one missed
//! deadline, later requests none, and it is used again once it answers. Waits are counted, not timed: the
//! router reports the number of deadlines that each draft worker missed.

use anyhow::{Context as _, ensure};
use futures::TryStreamExt as _;
use futures::stream::{self, StreamExt as _};
use nix::sys::signal::Signal;
use outrider_cli::cluster::ProcessCluster;
use tests::case::{Case, covering_set};
use tests::client::Answer;
use tests::cluster::plain_answers;
use tests::lanes_report::LanesReport;
use tests::pair::PairText;
use tests::processes;

/// Number of active requests when the worker stalls.
const CONCURRENCY: usize = 6;

/// Number of deadlines that a draft worker missed, while the router is connected to it.
async fn missed(cluster: &ProcessCluster, name: &str) -> anyhow::Result<u64> {
    let report = LanesReport::of(&cluster.admin_url("router")?).await?;
    let worker = report.worker(&cluster.worker_url(name)?)?;
    worker["health"]["missed_deadlines"].as_u64().with_context(|| format!("no count in {worker}"))
}

/// Whether the draft worker is silent to the router, so that no round waits for it.
async fn is_silent(cluster: &ProcessCluster, name: &str) -> anyhow::Result<bool> {
    let report = LanesReport::of(&cluster.admin_url("router")?).await?;
    Ok(report.worker(&cluster.worker_url(name)?)?["health"]["is_silent"] == true)
}

fn cases() -> anyhow::Result<Vec<Case>> {
    Ok(covering_set(&PairText::load()?)?.into_iter().step_by(3).take(CONCURRENCY).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_draft_costs_one_deadline_and_is_used_again_once_it_answers() -> anyhow::Result<()> {
    let cases = cases()?;
    let expected = plain_answers(&cases, CONCURRENCY).await?;
    let cluster = processes::start(|_| ()).await?;
    let client = processes::client(&cluster).await?;
    client.wait_for_drafts(&cases[0]).await?;
    let before = missed(&cluster, "draft-0").await?;
    processes::pause(&cluster, "draft-0").await?;
    // Sequentially: each would have noticed the stall by itself.
    for (case, expected) in cases.iter().zip(&expected) {
        let answer = client.ask(case).await?;
        answer.check_same(&case.name, expected)?;
        ensure!(answer.speculation().draft_tokens == 0, "{}: a stopped process drafted", case.name);
    }
    let waited = missed(&cluster, "draft-0").await? - before;
    ensure!(waited == 1, "{waited} deadlines were waited for, by {CONCURRENCY} requests");
    ensure!(is_silent(&cluster, "draft-0").await?, "a worker that says nothing is waited for");
    cluster.signal("draft-0", Signal::SIGCONT)?;
    client.wait_for_drafts(&cases[0]).await?;
    for (case, expected) in cases.iter().zip(&expected) {
        client.ask(case).await?.check_same(&case.name, expected)?;
    }
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_of_a_stalled_draft_continue_to_draft_at_a_healthy_one() -> anyhow::Result<()> {
    let long = |case: Case| Case { max_tokens: 150, ignore_eos: true, ..case };
    let cases: Vec<Case> = cases()?.into_iter().map(long).collect();
    let expected = plain_answers(&cases, CONCURRENCY).await?;
    let cluster = processes::start(|spec| spec.draft_workers = 2).await?;
    let client = processes::client(&cluster).await?;
    processes::wait_known(&cluster, &["target-0", "draft-0", "draft-1"]).await?;
    let mut streams: Vec<_> =
        stream::iter(&cases).map(|case| client.open(case)).buffered(CONCURRENCY).try_collect().await?;
    for stream in &mut streams {
        stream.read_tokens(10).await?;
    }
    let before = missed(&cluster, "draft-0").await?;
    processes::pause(&cluster, "draft-0").await?;
    let drafted = |answer: &Answer| answer.speculation().draft_tokens;
    for ((case, expected), stream) in cases.iter().zip(&expected).zip(streams) {
        let answer = stream.rest().await?;
        answer.check_same(&case.name, expected)?;
        ensure!(drafted(&answer) > 40, "{}: only {} tokens drafted", case.name, drafted(&answer));
    }
    let waited = missed(&cluster, "draft-0").await? - before;
    ensure!(
        (1..=CONCURRENCY as u64).contains(&waited),
        "{waited} deadlines, with {CONCURRENCY} requests under way"
    );
    // New requests do not wait at all, and are drafted for.
    for (case, expected) in cases.iter().zip(&expected) {
        let answer = client.ask(case).await?;
        answer.check_same(&case.name, expected)?;
        ensure!(drafted(&answer) > 0, "{}: nothing was drafted", case.name);
    }
    let afterwards = missed(&cluster, "draft-0").await.map_or(waited, |missed| missed - before);
    ensure!(afterwards == waited, "{} deadlines were waited for afterwards", afterwards - waited);
    cluster.stop().await;
    Ok(())
}
