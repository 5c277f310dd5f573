//! Lanes: for any mixture of requests, late drafts and several routers on one target, the ids are those of
//! the target alone; and the router explains its choices.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use draft_worker::config::DraftConfig;
use serde_json::Value;
use tests::case::{Case, covering_set};
use tests::client::{Answer, check_all_same};
use tests::cluster::{Cluster, WorkerKind, draft_config, plain_answers};
use tests::faulty_wire::WireFaults;
use tests::lanes_report::LanesReport;
use tests::pair::{self, PairText};

/// Concurrent requests per router.
const WIDTH: usize = 12;

/// One frame in seven is delayed, most of these for longer than the router waits for a draft.
const LATE: WireFaults = WireFaults {
    seed: 11,
    dropped: 0.0,
    duplicated: 0.0,
    delayed: 0.15,
    max_delay: Duration::from_secs(5),
    latency: Duration::ZERO,
};

/// The covering set mixed with every way to choose k and several priorities.
fn mixture() -> anyhow::Result<Vec<Case>> {
    let vary = |(i, case): (usize, Case)| Case {
        num_draft_tokens: [4, 0, 8, 2][i % 4],
        is_k_left_to_lane: i % 3 == 0,
        priority: [0, 5, 1][i % 3],
        ..case
    };
    Ok(covering_set(&PairText::load()?)?.into_iter().enumerate().map(vary).collect())
}

fn drafted(answers: &[Answer]) -> u64 {
    answers.iter().map(|answer| answer.speculation().draft_tokens).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_routers_on_one_target_with_late_drafts_change_no_token() -> anyhow::Result<()> {
    let cases = mixture()?;
    let expected = plain_answers(&cases, WIDTH).await?;
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add(WorkerKind::Target).await?;
    let _late = cluster.add_behind(WorkerKind::Draft, LATE).await?;
    let _ngram = cluster.add(WorkerKind::Ngram).await?;
    let (one, other) = (cluster.client().await?, cluster.add_router().await?);
    let reversed: Vec<Case> = cases.iter().rev().cloned().collect();
    let (from_one, from_other) =
        tokio::try_join!(one.ask_all(&cases, WIDTH), other.ask_all(&reversed, WIDTH))?;
    let from_other: Vec<Answer> = from_other.into_iter().rev().collect();
    check_all_same(&cases, (&expected, &from_one), "one router")?;
    check_all_same(&cases, (&expected, &from_other), "the other router")?;
    ensure!(drafted(&from_one) > 0 && drafted(&from_other) > 0, "nothing was drafted");
    let ignored = |reason: &str| format!("reason=\"{reason}\"");
    let late = cluster.metrics().await?.sum_where("outrider_rounds_ignored_total", &ignored("late_draft"));
    ensure!(late > 0, "no draft was late");
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_worker_for_a_task_type_is_used_only_for_it() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    let target = cluster.add(WorkerKind::Target).await?;
    let general = cluster.add(WorkerKind::Draft).await?;
    let for_code = DraftConfig { task_types: vec!["code".to_owned()], ..draft_config(&pair::draft_dir())? };
    let for_code = cluster.add_draft(for_code).await?;
    let client = cluster.client().await?;
    cluster.wait_known(&[&target, &general, &for_code]).await?;
    let cases = covering_set(&PairText::load()?)?;
    for (task_type, is_for_code) in [("chat", false), ("code", true)] {
        let case = cases.iter().find(|case| case.task_type == task_type).context("not covered")?;
        let before = [general.steps().await?, for_code.steps().await?];
        ensure!(client.ask(case).await?.speculation().draft_tokens > 0, "{task_type}: nothing was drafted");
        let used = [general.steps().await? > before[0], for_code.steps().await? > before[1]];
        ensure!(used == [!is_for_code, is_for_code], "{task_type}: general and for code: {used:?}");
    }
    cluster.stop().await
}

/// Checks that all inputs of the choice of k are present and plausible.
fn check_explained(lane: &Value) -> anyhow::Result<()> {
    let outlook = lane["outlook"].as_array().context("no outlook")?;
    let max_k = lane["max_k"].as_u64().context("no max_k")?;
    ensure!(outlook.len() as u64 == max_k + 1, "{} outlooks for k in 0..={max_k}", outlook.len());
    for (k, at) in outlook.iter().enumerate() {
        ensure!(at["k"] == k, "outlook {k} is for another k: {at}");
        for field in ["expected_tokens", "table_verify_us", "verify_us", "tokens_per_second"] {
            ensure!(at[field].as_f64().is_some_and(|value| value > 0.0), "k = {k}: {field} in {at}");
        }
    }
    let by_position = lane["acceptance_by_position"].as_array().context("no by_position")?;
    let falls = by_position.windows(2).all(|pair| pair[0].as_f64() >= pair[1].as_f64());
    ensure!(by_position.len() as u64 == max_k && falls, "by_position {by_position:?}");
    ensure!(lane["lane_rounds"].as_u64() > Some(0) && lane["why"].is_string(), "{lane}");
    ensure!(lane["measured_tokens_per_second"].as_f64().is_some(), "nothing measured: {lane}");
    for change in lane["changes"].as_array().context("no changes")? {
        ensure!(change["from"] != change["to"] && change["gain"].is_number(), "{change}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn debug_lanes_explains_every_lane_and_worker() -> anyhow::Result<()> {
    let (cluster, _target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    let mut cases = covering_set(&PairText::load()?)?;
    cases.retain(|case| ["code", "chat"].contains(&case.task_type.as_str()));
    cases.iter_mut().for_each(|case| case.is_k_left_to_lane = true);
    // One without a task type, which the router derives from its text.
    let mut unsaid = cases.iter().find(|case| case.task_type == "code").context("not covered")?.clone();
    unsaid.task_type = String::new();
    unsaid.sampling.temperature = 0.3;
    cases.push(unsaid);
    client.ask_all(&cases, 3).await?;
    let report = LanesReport::of(&cluster.admin_url()).await?;
    ensure!(
        report.lanes("code").len() == 4,
        "greedy, medium and high as asked, and low as guessed: {}",
        report.0
    );
    ensure!(report.lanes("chat").len() == 3 && report.lanes("").is_empty(), "{}", report.0);
    for lane in report.lanes("code").into_iter().chain(report.lanes("chat")) {
        check_explained(lane).with_context(|| lane.to_string())?;
    }
    let workers = report.0["workers"].as_array().context("no workers")?;
    ensure!(workers.len() == 2, "{workers:?}");
    for worker in workers {
        let is_draft = worker["role"] == "draft";
        ensure!(worker["health"].is_object() == is_draft && worker["sequences"] == 0, "{worker}");
        ensure!(is_draft || worker["credit_blocks"].as_u64() > Some(0), "{worker}");
    }
    ensure!(report.0["waiting_for_target"] == 0, "{}", report.0);
    cluster.stop().await
}
