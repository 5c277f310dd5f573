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
        report.0["target_waits"][0]["worst_ms"].as_u64().context("nobody had a turn")
    };
    // While the lane has no statistics, each text is expected to be as long as allowed: two fit at a time.
    let answers = client.ask_all(&long, 10).await?;
    // From running sequences, which is reported as preemption; from sequences between two steps, by silent
    // eviction.
    let taken = async || -> anyhow::Result<u64> {
        let page = target.metrics().await?;
        let steps = |outcome: &str| page.sum_where("outrider_worker_steps_total", outcome);
        Ok(steps("outcome=\"preempted\"") + steps("outcome=\"evicted\""))
    };
    ensure!(waited().await? > 0, "nobody waited for room");
    ensure!(taken().await? == 0, "KV was taken from one that was let in within the credits");
    // Then the lane's texts are short, more of them are admitted, and they outgrow their reservations.
    client.ask_all(&[short.as_slice(); 12].concat(), 12).await?;
    let outgrown = client.ask_all(&long, 10).await?;
    ensure!(taken().await? > 0, "KV was taken from nobody");
    for (case, ((expected, first), then)) in long.iter().zip(expected.iter().zip(&answers).zip(&outgrown)) {
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
    let in_step: Vec<Case> = texts(3, 150)?.iter().map(|case| case.with_k(0)).collect();
    ensure!(
        in_step.iter().all(|case| case.prompt_ids.len() == in_step[0].prompt_ids.len()),
        "of unequal lengths"
    );
    let expected = plain_answers(&in_step, 3).await?;
    let cluster = Cluster::start(|_| ()).await?;
    let target = cluster.add_with(WorkerKind::Target, |config| config.kv_memory = SMALL_KV).await?;
    let client = cluster.client().await?;
    let preempted = async || anyhow::Ok(target.metrics().await?.sum("outrider_worker_preemptions_total"));
    for _ in 0..ATTEMPTS {
        // Short texts make the lane admit more sequences than fit at their full lengths.
        client.ask_all(&[short.as_slice(); 12].concat(), 12).await?;
        let answers = client.ask_all(&in_step, 3).await?;
        for (case, (expected, answer)) in in_step.iter().zip(expected.iter().zip(&answers)) {
            ensure!(answer.token_ids == expected.token_ids, "{}: other ids", case.name);
        }
        // Sequences that have lost lockstep find idle ones, which are evicted silently.
        if preempted().await? > 0 {
            return cluster.stop().await;
        }
    }
    anyhow::bail!("in {ATTEMPTS} attempts nobody was stopped")
}

/// A router that runs one sequence at a time, and a client of it.
async fn one_at_a_time() -> anyhow::Result<(Cluster, Client)> {
    let cluster = Cluster::start(|config| config.admission.max_sequences = 1).await?;
    cluster.add(WorkerKind::SyntheticTarget).await?;
    let client = cluster.client().await?;
    Ok((cluster, client))
}

fn urgency(priority: u32, max_tokens: u32) -> anyhow::Result<Case> {
    let case = texts(1, max_tokens)?.swap_remove(0).with_k(0);
    Ok(Case { name: format!("priority {priority}"), priority, ..case })
}

#[tokio::test(flavor = "multi_thread")]
async fn urgent_requests_overtake_earlier_ones() -> anyhow::Result<()> {
    let (cluster, client) = one_at_a_time().await?;
    // It ends when its client disconnects, once all the others wait.
    let mut first = client.open(&urgency(0, 2_000)?).await?;
    first.read_tokens(1).await?;
    let cases = [(200, 0), (200, 1), (100, 2), (0, 3)].map(|(priority, i)| (i, urgency(priority, 4)));
    let mut waiting = FuturesUnordered::new();
    for (i, case) in cases {
        let (case, client) = (case?, client.clone());
        waiting.push(async move { client.ask(&case).await.map(|_| i) });
        // Each is in the queue before the next one arrives.
        let queued = async || Ok(cluster.metrics().await?.sum("vllm:num_requests_waiting") == i + 1);
        tokio::select! {
            done = waiting.next() => anyhow::bail!("{done:?} was answered beside another one"),
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
    let (cluster, client) = one_at_a_time().await?;
    let (urgent, patient) = (urgency(0, 32)?, urgency(2, 4)?);
    let answered = std::sync::atomic::AtomicU64::new(0);
    let urgent_ones = async || -> anyhow::Result<()> {
        loop {
            client.ask(&urgent).await?;
            answered.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    };
    let patient_one = async {
        let load = async || Ok(answered.load(std::sync::atomic::Ordering::Relaxed) >= 3);
        until("there is a load", load).await?;
        client.ask(&patient).await
    };
    tokio::select! {
        ended = futures::future::try_join(urgent_ones(), urgent_ones()) => ended.map(drop)?,
        patient = patient_one => drop(patient?),
    }
    let report = LanesReport::of(&cluster.admin_url()).await?;
    let waits = report.0["admission_waits"].as_array().context("no waits")?;
    let patient =
        waits.iter().find(|wait| wait["priority"] == 2).context("the patient one is not counted")?;
    ensure!(patient["served"] == 1 && patient["worst_ms"].as_u64() > Some(0), "{patient}");
    cluster.stop().await
}
