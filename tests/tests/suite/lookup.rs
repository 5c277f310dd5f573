//! Lookup drafts of the router: from the sequence itself and from the text that a client predicts. Whatever
//! is looked up, and whatever fails meanwhile, the text is the target's own, in fewer steps.

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use speculation::AcceptanceMode;
use tests::case::{Case, covering_set};
use tests::client::check_all_same;
use tests::cluster::{Cluster, WorkerKind, plain_answers};
use tests::http_client::{CHAT, HttpClient};
use tests::pair::PairText;
use tests::predictions::{before_edit, chat_request, text_of};

/// Concurrent requests.
const WIDTH: usize = 6;

/// A router with suffix lookup.
async fn cluster() -> anyhow::Result<Cluster> {
    Cluster::start(|config| config.scheduler.policy.suffix_drafts = true).await
}

/// The covering set, and prompts that contain everything twice; the lanes choose k.
fn cases() -> anyhow::Result<Vec<Case>> {
    let text = PairText::load()?;
    let mut cases = covering_set(&text)?;
    for (i, prompt) in text.bundled("code")?.into_iter().take(4).enumerate() {
        for temperature in [0.0, 1.0] {
            let twice = [&prompt[..], &prompt[..]].concat();
            let case = Case::new(format!("code[{i}] twice at T = {temperature}"), twice, temperature);
            cases.push(Case { max_tokens: 64, ignore_eos: true, ..case });
        }
    }
    Ok(cases.into_iter().map(|case| Case { is_k_left_to_lane: true, ..case }).collect())
}

async fn looked_up(cluster: &Cluster, source: &str) -> anyhow::Result<(u64, u64)> {
    let page = cluster.metrics().await?;
    let label = format!("source=\"{source}\"");
    let sum = |name: &str| page.sum_where(name, &label);
    Ok((sum("outrider_lookup_draft_tokens_total"), sum("outrider_lookup_accepted_tokens_total")))
}

#[tokio::test(flavor = "multi_thread")]
async fn suffix_lookup_changes_no_token() -> anyhow::Result<()> {
    let cases = cases()?;
    let expected = plain_answers(&cases, WIDTH).await?;
    for with_draft_worker in [false, true] {
        let cluster = cluster().await?;
        let _target = cluster.add(WorkerKind::Target).await?;
        let _draft = if with_draft_worker { Some(cluster.add(WorkerKind::Draft).await?) } else { None };
        // One at a time: the router decides whether a draft's rows pay, and with concurrent requests they
        // rarely do.
        let got = cluster.client().await?.ask_all(&cases, 1).await?;
        check_all_same(&cases, (&expected, &got), &format!("with a draft worker: {with_draft_worker}"))?;
        // Beside a draft worker, its drafts may be worth more.
        let (drafted, accepted) = looked_up(&cluster, "suffix").await?;
        ensure!(with_draft_worker || accepted > 0, "none of {drafted} looked up tokens was accepted");
        cluster.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn suffix_lookup_drafts_are_verified_in_rejection_mode() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let _target = cluster.add(WorkerKind::Target).await?;
    let client = cluster.client().await?;
    let mut accepted = 0;
    for case in cases()?.into_iter().filter(|case| case.name.contains("twice")) {
        let answer = client.ask(&Case { acceptance: AcceptanceMode::Rejection, ..case }).await?;
        ensure!(answer.token_ids.len() == 64, "{} tokens came", answer.token_ids.len());
        accepted += answer.speculation().accepted_tokens;
    }
    ensure!(accepted > 0, "nothing was accepted");
    cluster.stop().await
}

const PROMPT: &str = "Write a function that sorts a list of names.";

#[tokio::test(flavor = "multi_thread")]
async fn a_predicted_text_takes_fewer_steps_and_changes_no_token() -> anyhow::Result<()> {
    for with_draft_worker in [false, true] {
        let cluster = Cluster::start(|_| ()).await?;
        let _target = cluster.add(WorkerKind::Target).await?;
        let _draft = if with_draft_worker { Some(cluster.add(WorkerKind::Draft).await?) } else { None };
        cluster.ready().await?;
        let http = HttpClient::new(cluster.http_url())?;
        for temperature in [0.0, 1.0] {
            let plain = http.ask(CHAT, &chat_request(PROMPT, (temperature, 160), None)).await?;
            let prediction = before_edit(text_of(&plain)?);
            let got = http.ask(CHAT, &chat_request(PROMPT, (temperature, 160), Some(&prediction))).await?;
            ensure!(text_of(&got)? == text_of(&plain)?, "T = {temperature}: {got}\n{plain}");
            ensure!(got["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"], "{got}");
            let details = &got["usage"]["completion_tokens_details"];
            ensure!(details["accepted_prediction_tokens"].as_u64() > Some(0), "T = {temperature}: {details}");
            let rounds = |answer: &Value| answer["usage"]["speculation"]["rounds"].as_u64();
            let (few, many) = (rounds(&got).context("no rounds")?, rounds(&plain).context("no rounds")?);
            // How many fewer depends on the cost of rows on this machine.
            ensure!(with_draft_worker || few < many, "T = {temperature}: {few} rounds, {many} without");
        }
        let (drafted, accepted) = looked_up(&cluster, "prediction").await?;
        ensure!(accepted > 0, "none of {drafted} was accepted");
        cluster.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prediction_is_still_used_after_its_target_is_lost() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    let first = cluster.add_far(WorkerKind::Target).await?;
    cluster.ready().await?;
    let http = HttpClient::new(cluster.http_url())?;
    let plain = http.ask(CHAT, &chat_request(PROMPT, (0.0, 160), None)).await?;
    let prediction = before_edit(text_of(&plain)?);
    let mut body = chat_request(PROMPT, (0.0, 160), Some(&prediction));
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });
    let mut response = http.open(CHAT, &body).await?;
    let mut events = Vec::new();
    events.extend_from_slice(&response.chunk().await?.context("nothing came")?);
    first.stop().await;
    let second = cluster.add(WorkerKind::Target).await?;
    while let Some(chunk) = response.chunk().await? {
        events.extend_from_slice(&chunk);
    }
    let events = String::from_utf8(events)?;
    let mut text = String::new();
    for data in events.lines().filter_map(|line| line.strip_prefix("data: {")) {
        let chunk: Value = serde_json::from_str(&format!("{{{data}"))?;
        text.push_str(chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    ensure!(text == text_of(&plain)?, "{events}\n{plain}");
    let steps = second.steps().await?;
    ensure!((1..160).contains(&steps), "the second target took {steps} steps for the rest of 160 tokens");
    cluster.stop().await
}
