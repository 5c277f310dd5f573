//! KV capacity and priorities: a target whose KV memory is nearly full makes sequences wait and preempts
//! some, but loses none; urgent requests go first, and the others are not starved. The ids are always those
//! of the target alone.

use anyhow::{Context as _, ensure};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use tests::case::Case;
use tests::client::Client;
use tests::cluster::{Cluster, WorkerKind, plain_answers};
use tests::lanes_report::LanesReport;
use tests::pair::{PairText, TASK_TYPES};
use tests::wait::until;
use worker::memory::MemoryLimit;

/// KV memory of the bundled target for 24 blocks of 16 ids: 6 layers, keys and values of 4 heads of 32
/// numbers of 2 bytes.
const SMALL_KV: MemoryLimit = MemoryLimit::Bytes(24 * 16 * 6 * 2 * 4 * 32 * 2);

/// Greedy texts of one lane with `max_tokens` ids each, which continue past the model's own end.
fn texts(count: usize, max_tokens: u32) -> anyhow::Result<Vec<Case>> {
    let prompts = PairText::load()?.bundled(TASK_TYPES[1])?;
    let case = |(i, ids): (usize, &Vec<u32>)| Case {
        task_type: TASK_TYPES[1].to_owned(),
        max_tokens,
        ignore_eos: true,
        num_draft_tokens: [4, 0, 2][i % 3],
        ..Case::new(format!("text {i}"), ids[..ids.len().min(24)].to_vec(), 0.0)
    };
    Ok(prompts.iter().cycle().take(count).enumerate().map(case).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nearly_full_target_queues_and_preempts_and_changes_no_id() -> anyhow::Result<()> {
    let (short, long) = (texts(12, 4)?, texts(10, 150)?);
    let expected = plain_answers(&long, 10).await?;
    let cluster = Cluster::start(|_| ()).await?;
    let target = cluster.add_with(WorkerKind::Target, |config| config.kv_memory = SMALL_KV).await?;
    let _draft = cluster.add(WorkerKind::Ngram).await?;
    let client = cluster.client().await?;
    let waited = async || {
        let report = LanesReport::of(&cluster.admin_url()).await?;
        report.0["target_waits"][0]["worst_ms"].as_u64().context("no turn was recorded")
    };
    // While the lane has no statistics, each text is expected to be as long as allowed: two fit at a time.
    let answers = client.ask_all(&long, 10).await?;
    // From running sequences, which is reported as preemption; from sequences between two steps, by silent
    // eviction.
    let num_preempted = async || -> anyhow::Result<u64> {
        let page = target.metrics().await?;
        let steps = |outcome: &str| page.sum_where("outrider_worker_steps_total", outcome);
        Ok(steps("outcome=\"preempted\"") + steps("outcome=\"evicted\""))
    };
    ensure!(waited().await? > 0, "no sequence waited for KV blocks");
    ensure!(num_preempted().await? == 0, "a sequence admitted within the credits was preempted");
    // Then the lane's texts are short, more of them are admitted, and they outgrow their reservations.
    client.ask_all(&[short.as_slice(); 12].concat(), 12).await?;
    let answers_after_preemption = client.ask_all(&long, 10).await?;
    ensure!(num_preempted().await? > 0, "no sequence was preempted");
    for (case, ((expected, first), then)) in
        long.iter().zip(expected.iter().zip(&answers).zip(&answers_after_preemption))
    {
        ensure!(first.token_ids == expected.token_ids, "{}: other ids within the credits", case.name);
        ensure!(then.token_ids == expected.token_ids, "{}: other ids after preemption", case.name);
    }
    cluster.stop().await
}

/// Texts in lockstep fill the KV memory together: at its end each needs a block in the same forward, and none
/// of them is idle.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_whose_sequences_all_run_preempts_one_and_changes_no_id() -> anyhow::Result<()> {
    const ATTEMPTS: usize = 5;
    let short = texts(12, 4)?;
    let lockstep: Vec<Case> = texts(3, 150)?.iter().map(|case| case.with_k(0)).collect();
    ensure!(
        lockstep.iter().all(|case| case.prompt_ids.len() == lockstep[0].prompt_ids.len()),
        "of unequal lengths"
    );
    let expected = plain_answers(&lockstep, 3).await?;
    let cluster = Cluster::start(|_| ()).await?;
    let target = cluster.add_with(WorkerKind::Target, |config| config.kv_memory = SMALL_KV).await?;
    let client = cluster.client().await?;
    let preempted = async || anyhow::Ok(target.metrics().await?.sum("outrider_worker_preemptions_total"));
    for _ in 0..ATTEMPTS {
        // Short texts make the lane admit more sequences than fit at their full lengths.
        client.ask_all(&[short.as_slice(); 12].concat(), 12).await?;
        let answers = client.ask_all(&lockstep, 3).await?;
        for (case, (expected, answer)) in lockstep.iter().zip(expected.iter().zip(&answers)) {
            ensure!(answer.token_ids == expected.token_ids, "{}: other ids", case.name);
        }
        // Sequences that have lost lockstep find idle ones, which are evicted silently.
        if preempted().await? > 0 {
            return cluster.stop().await;
        }
    }
    anyhow::bail!("no sequence was preempted in {ATTEMPTS} attempts")
}

/// A router that runs one sequence at a time, and a client of it.
async fn start_sequential_router() -> anyhow::Result<(Cluster, Client)> {
    let cluster = Cluster::start(|config| config.admission.max_sequences = 1).await?;
    cluster.add(WorkerKind::SyntheticTarget).await?;
    let client = cluster.client().await?;
    Ok((cluster, client))
}

fn case_with_priority(priority: u32, max_tokens: u32) -> anyhow::Result<Case> {
    let case = texts(1, max_tokens)?.swap_remove(0).with_k(0);
    Ok(Case { name: format!("priority {priority}"), priority, ..case })
}

#[tokio::test(flavor = "multi_thread")]
async fn urgent_requests_overtake_earlier_ones() -> anyhow::Result<()> {
    let (cluster, client) = start_sequential_router().await?;
    // It ends when its client disconnects, once all the others wait.
    let mut first = client.open(&case_with_priority(0, 2_000)?).await?;
    first.read_tokens(1).await?;
    let cases =
        [(200, 0), (200, 1), (100, 2), (0, 3)].map(|(priority, i)| (i, case_with_priority(priority, 4)));
    let mut waiting = FuturesUnordered::new();
    for (i, case) in cases {
        let (case, client) = (case?, client.clone());
        waiting.push(async move { client.ask(&case).await.map(|_| i) });
        // Each is in the queue before the next one arrives.
        let queued = async || Ok(cluster.metrics().await?.sum("vllm:num_requests_waiting") == i + 1);
        tokio::select! {
            done = waiting.next() => anyhow::bail!("{done:?} was answered while another request ran"),
            queued = until("it waits", queued) => queued?,
        }
    }
    drop(first);
    let order: Vec<u64> = waiting.collect::<Vec<_>>().await.into_iter().collect::<anyhow::Result<_>>()?;
    ensure!(order == [3, 2, 0, 1], "answered in the order {order:?}");
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn urgent_requests_do_not_starve_less_urgent_ones() -> anyhow::Result<()> {
    let (cluster, client) = start_sequential_router().await?;
    let (urgent, low_priority) = (case_with_priority(0, 32)?, case_with_priority(2, 4)?);
    let answered = std::sync::atomic::AtomicU64::new(0);
    let urgent_load = async || -> anyhow::Result<()> {
        loop {
            client.ask(&urgent).await?;
            answered.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    };
    let low_priority_request = async {
        let load = async || Ok(answered.load(std::sync::atomic::Ordering::Relaxed) >= 3);
        until("there is a load", load).await?;
        client.ask(&low_priority).await
    };
    tokio::select! {
        ended = futures::future::try_join(urgent_load(), urgent_load()) => ended.map(drop)?,
        low_priority = low_priority_request => drop(low_priority?),
    }
    let report = LanesReport::of(&cluster.admin_url()).await?;
    let waits = report.0["admission_waits"].as_array().context("no waits")?;
    let low_priority =
        waits.iter().find(|wait| wait["priority"] == 2).context("the low-priority request is not counted")?;
    ensure!(low_priority["served"] == 1 && low_priority["worst_ms"].as_u64() > Some(0), "{low_priority}");
    cluster.stop().await
}
