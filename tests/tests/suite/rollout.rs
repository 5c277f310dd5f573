//! A new draft is scored as a shadow of the one that serves, takes over, and is rolled back, under load and
//! without a restart. The text stays the target's own.

use anyhow::{Context as _, ensure};
use reqwest::Method;
use serde_json::{Value, json};
use tests::case::{Case, covering_set};
use tests::client::{Answer, check_all_same};
use tests::cluster::{Cluster, RunningWorker, WorkerKind, plain_answers};
use tests::http_client::{HttpAnswer, HttpClient};
use tests::lanes_report::LanesReport;
use tests::pair::PairText;

/// Concurrent requests.
const WIDTH: usize = 6;

/// Name of the bundled draft when it is the candidate.
const CANDIDATE: &str = "candidate";

/// Maximum number of times that all cases are requested until there is enough evidence.
const PASSES: u64 = 30;

/// Number of compared drafts before a score is judged.
const COMPARED: f64 = 100.0;

const ROLLOUT: &str = "/admin/rollout";

/// A router with this share of shadow drafts, a target, and two draft workers.
struct Pools {
    cluster: Cluster,
    _target: RunningWorker,
    serving: RunningWorker,
    on_trial: RunningWorker,
}

impl Pools {
    async fn start(shadow_share: f64, serving: WorkerKind, on_trial: WorkerKind) -> anyhow::Result<Self> {
        let cluster = Cluster::start(|config| config.scheduler.shadow_share = shadow_share).await?;
        let target = cluster.add(WorkerKind::Target).await?;
        let serving = cluster.add(serving).await?;
        let named = |config: &mut worker::config::WorkerConfig| {
            config.served_model_name = Some(CANDIDATE.to_owned());
        };
        let on_trial = cluster.add_with(on_trial, named).await?;
        cluster.ready().await?;
        cluster.wait_known(&[&serving, &on_trial]).await?;
        Ok(Self { cluster, _target: target, serving, on_trial })
    }

    async fn report(&self) -> anyhow::Result<LanesReport> {
        LanesReport::of(&self.cluster.admin_url()).await
    }

    async fn order(&self, method: Method, path: &str, body: Value) -> anyhow::Result<Value> {
        let request = HttpClient::new(self.cluster.admin_url())?.request(method, path).json(&body);
        let answer = HttpAnswer::of(request).await?;
        ensure!(answer.status == 200, "{path}: {} {}", answer.status, answer.text);
        answer.json()
    }

    /// Number of paired comparisons: both drafts at the same positions.
    async fn compared(&self) -> anyhow::Result<f64> {
        number(&score_of(&self.report().await?)?["paired"], "drafts")
    }

    /// Number of sequences that a worker drafts for, without shadowed ones.
    async fn served_at(&self, worker: &RunningWorker) -> anyhow::Result<u64> {
        let report = self.report().await?;
        let worker = report.worker(&worker.url())?;
        let number = |field: &str| worker[field].as_u64().with_context(|| format!("no {field} in {worker}"));
        Ok(number("sequences")? - number("shadowed")?)
    }
}

/// The router's score of the shadow draft.
fn score_of(report: &LanesReport) -> anyhow::Result<Value> {
    let drafts = report.0["shadows"]["drafts"].as_array().context("no shadow drafts are reported")?;
    ensure!(drafts.len() == 1, "{drafts:?}");
    Ok(drafts[0].clone())
}

fn number(of: &Value, field: &str) -> anyhow::Result<f64> {
    of[field].as_f64().with_context(|| format!("no {field} in {of}"))
}

fn tokens_of(answers: &[Answer]) -> u64 {
    answers.iter().map(|answer| answer.token_ids.len() as u64).sum()
}

/// Formats one line per task type, after a line with the totals.
fn table(score: &Value) -> String {
    let mut lines =
        vec![format!("{} compared with the serving draft, paired: {}", score["draft"], score["paired"])];
    for task in score["task_types"].as_array().into_iter().flatten() {
        let side = |side: &str| format!("{} in {}", task[format!("{side}_accepted")], task[side]["drafts"]);
        lines.push(format!("{}: shadow {}, serving {}", task["task_type"], side("shadow"), side("serving")));
    }
    lines.join("\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_better_and_a_worse_draft_are_scored_on_live_sequences_and_change_no_token() -> anyhow::Result<()> {
    let cases = covering_set(&PairText::load()?)?;
    let expected = plain_answers(&cases, WIDTH).await?;
    let mut differences = Vec::new();
    for (serving, on_trial) in
        [(WorkerKind::Ngram, WorkerKind::ShadowDraft), (WorkerKind::Draft, WorkerKind::ShadowNgram)]
    {
        let pools = Pools::start(1.0, serving, on_trial).await?;
        let client = pools.cluster.client().await?;
        let mut passes = 0;
        while passes < PASSES && pools.compared().await? < COMPARED {
            passes += 1;
            let got = client.ask_all(&cases, WIDTH).await?;
            check_all_same(&cases, (&expected, &got), &format!("{on_trial:?} as a shadow"))?;
        }
        let score = score_of(&pools.report().await?)?;
        println!("{}", table(&score));
        let paired = &score["paired"];
        let (drafts, difference) = (number(paired, "drafts")?, number(paired, "difference")?);
        ensure!(drafts >= COMPARED, "{score}");
        differences.push(difference);
        let page = pools.cluster.metrics().await?;
        let counted = |name: &str, of: &str| page.sum_where(name, &format!("of=\"{of}\""));
        ensure!(counted("outrider_shadow_drafts_total", "serving") as f64 >= drafts, "{score}");
        for of in ["shadow", "serving"] {
            ensure!(counted("outrider_shadow_accepted_tokens_total", of) > 0, "nothing is counted");
        }
        // It is asked once per position: an empty proposal, which arrives at once, is not requested again and
        // again.
        let (num_requested, rounds) =
            (counted("outrider_shadow_drafts_total", "shadow"), tokens_of(&expected));
        ensure!(
            num_requested <= passes * rounds,
            "{num_requested} proposals for {rounds} tokens, {passes} times"
        );
        // No target received a shadow draft: only the serving draft's tokens were verified.
        ensure!(pools.served_at(&pools.on_trial).await? == 0, "a shadow serves");
        pools.cluster.stop().await?;
    }
    // Late proposals of the serving draft, which occur on a busy machine, count for less, so each score alone
    // favours the shadow draft.
    ensure!(differences[0] > 0.0 && differences[0] > differences[1], "{differences:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_compared_with_itself_is_no_better() -> anyhow::Result<()> {
    let cases = covering_set(&PairText::load()?)?;
    let pools = Pools::start(1.0, WorkerKind::Draft, WorkerKind::ShadowDraft).await?;
    let client = pools.cluster.client().await?;
    for _ in 0..PASSES {
        client.ask_all(&cases, WIDTH).await?;
        if pools.compared().await? >= COMPARED {
            break;
        }
    }
    let score = score_of(&pools.report().await?)?;
    ensure!(number(&score["paired"], "drafts")? >= COMPARED, "{score}");
    ensure!(number(&score["paired"], "difference")? == 0.0, "{score}");
    pools.cluster.stop().await
}

/// Long answers of several task types.
fn long_cases() -> anyhow::Result<Vec<Case>> {
    let text = PairText::load()?;
    let mut cases = Vec::new();
    for task_type in ["summarization", "code"] {
        for (i, prompt) in text.bundled(task_type)?.into_iter().take(3).enumerate() {
            let temperature = if i == 0 { 0.0 } else { 1.0 };
            let case = Case::new(format!("{task_type}[{i}]"), prompt, temperature);
            let task_type = task_type.to_owned();
            cases.push(Case { max_tokens: 160, ignore_eos: true, seed: 40 + i as u64, task_type, ..case });
        }
    }
    Ok(cases)
}

#[tokio::test(flavor = "multi_thread")]
async fn replacing_a_draft_under_load_loses_no_stream_and_changes_no_id() -> anyhow::Result<()> {
    let cases = long_cases()?;
    let expected = plain_answers(&cases, WIDTH).await?;
    let pools = Pools::start(0.0, WorkerKind::Ngram, WorkerKind::ShadowDraft).await?;
    let client = pools.cluster.client().await?;
    let begin = json!({ "draft": CANDIDATE, "share": 0.5, "decides": false });
    // An operator's actions while streams are read, and the worker that drafts for no sequence afterwards.
    for (name, method, path, body, idle) in [
        ("a share", Method::POST, ROLLOUT, begin, None),
        ("a promotion", Method::POST, "/admin/rollout/promote", Value::Null, Some(&pools.serving)),
        ("the end", Method::DELETE, ROLLOUT, Value::Null, Some(&pools.on_trial)),
    ] {
        let mut streams = Vec::new();
        for case in &cases {
            streams.push(client.open(case).await?);
        }
        for stream in &mut streams {
            stream.read_tokens(8).await?;
        }
        pools.order(method, path, body).await?;
        if let Some(worker) = idle {
            ensure!(pools.served_at(worker).await? == 0, "{name}: sequences stay at {}", worker.url());
        }
        let mut got = Vec::new();
        for stream in streams {
            got.push(stream.rest().await?);
        }
        check_all_same(&cases, (&expected, &got), &format!("{name} while they ran"))?;
        let got = client.ask_all(&cases, WIDTH).await?;
        check_all_same(&cases, (&expected, &got), &format!("after {name}"))?;
    }
    // It never shadowed a sequence, so everything it ran was for targets.
    ensure!(
        pools.on_trial.metrics().await?.sum("outrider_worker_forward_seconds_count") > 0,
        "it never drafted"
    );
    pools.cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_draft_that_fails_is_replaced() -> anyhow::Result<()> {
    let cases = long_cases()?;
    let expected = plain_answers(&cases, WIDTH).await?;
    let pools = Pools::start(1.0, WorkerKind::Ngram, WorkerKind::ShadowDraft).await?;
    let client = pools.cluster.client().await?;
    pools.order(Method::POST, ROLLOUT, json!({ "draft": CANDIDATE })).await?;
    pools.order(Method::POST, "/admin/rollout/promote", Value::Null).await?;
    let mut streams = Vec::new();
    for case in &cases {
        streams.push(client.open(case).await?);
    }
    for stream in &mut streams {
        stream.read_tokens(8).await?;
    }
    let Pools { cluster, on_trial, .. } = pools;
    on_trial.stop().await;
    let mut got = Vec::new();
    for stream in streams {
        got.push(stream.rest().await?);
    }
    check_all_same(&cases, (&expected, &got), "after a promoted draft failed")?;
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_better_draft_is_promoted_and_a_worse_one_rolled_back() -> anyhow::Result<()> {
    let cases = covering_set(&PairText::load()?)?;
    let expected = plain_answers(&cases, WIDTH).await?;
    for (serving, on_trial, draft, stage) in [
        (WorkerKind::Ngram, WorkerKind::ShadowDraft, CANDIDATE, "promoted"),
        (WorkerKind::Draft, WorkerKind::ShadowNgram, "ngram", "rolled_back"),
    ] {
        let pools = Pools::start(1.0, serving, on_trial).await?;
        let client = pools.cluster.client().await?;
        // N-grams cost nothing, so the model is many times slower regardless of its worth.
        let settings = json!({
            "draft": draft, "share": 0.3, "min_drafts": 60, "min_sequences": 10, "max_slowdown": 1e9
        });
        pools.order(Method::POST, ROLLOUT, settings).await?;
        for _ in 0..PASSES {
            let got = client.ask_all(&cases, WIDTH).await?;
            check_all_same(&cases, (&expected, &got), &format!("while {draft} is rolled out"))?;
            if pools.report().await?.0["rollout"]["stage"] != "canary" {
                break;
            }
        }
        let report = pools.report().await?;
        let rollout = &report.0["rollout"];
        println!("{rollout}");
        ensure!(rollout["stage"] == stage, "{rollout}");
        let got = client.ask_all(&cases, WIDTH).await?;
        check_all_same(&cases, (&expected, &got), &format!("once {draft} is {stage}"))?;
        pools.cluster.stop().await?;
    }
    Ok(())
}
