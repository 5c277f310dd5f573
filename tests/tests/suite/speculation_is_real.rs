//! Drafts are made, accepted, and save forward passes: according to the engine's counters, not the router's.

use anyhow::ensure;
use tests::case::{Case, covering_set};
use tests::client::Client;
use tests::cluster::{Cluster, RunningWorker, WorkerKind};
use tests::pair::PairText;
use tests::wait::until;

const FORWARDS: &str = "outrider_worker_forwards_total";

/// Rows per forward, by default.
const MAX_BATCH_ROWS: usize = 512;

/// Number of forwards so far, once no sequence is running.
async fn forwards_at_rest(worker: &RunningWorker) -> anyhow::Result<u64> {
    until("the worker has let go of every sequence", async || {
        Ok(worker.metrics().await?.sum("outrider_worker_sequences") == 0)
    })
    .await?;
    Ok(worker.metrics().await?.sum(FORWARDS))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_target_runs_one_forward_for_each_span() -> anyhow::Result<()> {
    let (cluster, target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    let cases = covering_set(&PairText::load()?)?;
    // By now the worker's own forwards at start are counted.
    client.ask(&cases[0]).await?;
    let (mut tokens, mut forwards) = (0, 0);
    for case in cases {
        let before = forwards_at_rest(&target).await?;
        let answer = client.ask(&case).await?;
        let ran = forwards_at_rest(&target).await? - before;
        // The last forward of a prompt also draws, so it counts as a span.
        let prefill_steps = case.prompt_ids.len().div_ceil(MAX_BATCH_ROWS) as u64 - 1;
        let spans = answer.speculation().rounds;
        ensure!(ran <= prefill_steps + spans, "{}: {ran} forwards for {prefill_steps} + {spans}", case.name);
        tokens += answer.token_ids.len() as u64;
        forwards += ran;
    }
    ensure!(
        forwards * 5 < tokens * 4,
        "{forwards} forwards for {tokens} tokens: drafting saved less than a fifth"
    );
    cluster.stop().await
}

/// Tokens per verification over the bundled prompts of one task type, greedy, k = 4.
async fn acceptance_length(client: &Client, text: &PairText, task_type: &str) -> anyhow::Result<f64> {
    let (mut rounds, mut accepted) = (0, 0);
    for (i, prompt) in text.bundled(task_type)?.into_iter().enumerate() {
        let mut case = Case::new(format!("{task_type}[{i}]"), prompt, 0.0);
        case.max_tokens = 48;
        let speculation = client.ask(&case).await?.speculation();
        rounds += speculation.rounds;
        accepted += speculation.accepted_tokens;
    }
    Ok(1.0 + accepted as f64 / rounds as f64)
}

#[tokio::test(flavor = "multi_thread")]
async fn code_and_sql_commit_more_than_1_3_tokens_per_span() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let (client, text) = (cluster.client().await?, PairText::load()?);
    for task_type in ["code", "sql"] {
        let length = acceptance_length(&client, &text, task_type).await?;
        ensure!(length > 1.3, "{task_type}: acceptance length {length:.2}");
    }
    cluster.stop().await
}
