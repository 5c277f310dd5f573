//! Workers that come and go: the client's stream continues, with the same ids as without the disturbance.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::json;
use tests::case::Case;
use tests::cluster::{Cluster, WorkerKind, plain_answers};
use tests::faulty_wire::WireFaults;
use tests::http_client::{CHAT, HttpAnswer, HttpClient};
use tests::pair::MODEL;
use tests::processes;
use tests::wait::{WAIT_TIMEOUT, until};

fn long_case(temperature: f32) -> anyhow::Result<Case> {
    Ok(Case { seed: 77, ..Case::long_text(temperature, 600)? })
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_of_a_stopped_target_continue_at_another_target() -> anyhow::Result<()> {
    let (cluster, mut first, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    for temperature in [0.0, 1.0] {
        let case = long_case(temperature)?;
        let expected = client.ask(&case.with_k(0)).await?;
        let second = cluster.add(WorkerKind::Target).await?;
        let mut stream = client.open(&case).await?;
        stream.read_tokens(20).await?;
        let (serving, other) = if second.steps().await? > 0 { (second, first) } else { (first, second) };
        let before = other.steps().await?;
        serving.stop().await;
        stream.rest().await?.check_same(&case.name, &expected)?;
        ensure!(other.steps().await? > before, "the other target never took over: the text ended too soon");
        first = other;
    }
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_waits_for_a_target_to_return() -> anyhow::Result<()> {
    let case = long_case(0.7)?;
    let (cluster, first, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    let expected = client.ask(&case.with_k(0)).await?;
    let mut stream = client.open(&case).await?;
    stream.read_tokens(20).await?;
    first.stop().await;
    let second = cluster.add(WorkerKind::Target).await?;
    stream.rest().await?.check_same(&case.name, &expected)?;
    ensure!(second.steps().await? > 0, "the text ended before its target did");
    cluster.stop().await
}

/// Clients see the window of the targets that are there, and are answered within it.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_with_a_shorter_window_replaces_another() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    let first = cluster.add_plain_target(|config| config.max_model_len = Some(512)).await?;
    cluster.ready().await?;
    let client = HttpClient::new(cluster.http_url())?;
    let window = async || -> anyhow::Result<u64> {
        let models = HttpAnswer::of(client.request(Method::GET, "/v1/models")).await?.json()?;
        models["data"][0]["max_model_len"].as_u64().with_context(|| format!("{models} has no window"))
    };
    ensure!(window().await? == 512);
    first.stop().await;
    let _second = cluster.add_plain_target(|config| config.max_model_len = Some(256)).await?;
    until("the window of the second target", async || Ok(window().await? == 256)).await?;
    // Without max_tokens, a chat may fill the window.
    let chat =
        json!({ "model": MODEL, "messages": [{ "role": "user", "content": "Hello" }], "ignore_eos": true });
    let usage = client.ask(CHAT, &chat).await?["usage"].take();
    ensure!(usage["total_tokens"] == 256, "{usage}");
    cluster.stop().await
}

/// A worker answers only on a router's newest stream: of two streams to one process, one would get no
/// answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_is_listed_twice_answers_every_request() -> anyhow::Result<()> {
    let (cluster, target, _draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    let case = short(&long_case(0.0)?);
    let expected = client.ask(&case.with_k(0)).await?;
    let mut stream = client.open(&long_case(0.0)?).await?;
    stream.read_tokens(20).await?;
    cluster.list_target_again(&target).await?;
    for _ in 0..20 {
        let answer = tokio::time::timeout(WAIT_TIMEOUT, client.ask(&case)).await;
        answer.context("a request hangs")??.check_same(&case.name, &expected)?;
    }
    let long = long_case(0.0)?;
    let rest = tokio::time::timeout(WAIT_TIMEOUT, stream.rest()).await.context("a stream hangs")??;
    rest.check_same(&long.name, &client.ask(&long.with_k(0)).await?)?;
    ensure!(target.metrics().await?.sum("outrider_worker_streams") == 1, "more than one stream is open");
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_worker_that_joins_late_is_used() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    // 600 tokens take more than two seconds with this latency: the text is in progress when the draft worker
    // has loaded.
    let far = WireFaults { latency: Duration::from_millis(2), ..WireFaults::default() };
    let _target = cluster.add_behind(WorkerKind::Target, far).await?;
    let client = cluster.client().await?;
    let case = long_case(0.0)?;
    // The whole text comes from a target without latency.
    let expected = plain_answers(std::slice::from_ref(&case), 1).await?.swap_remove(0);
    let without = client.ask(&short(&case)).await?.speculation();
    ensure!(without.draft_tokens == 0, "something was drafted without a draft worker");
    ensure!(without.disabled_reason == "no_draft_worker", "{without:?}");
    let mut stream = client.open(&case).await?;
    stream.read_tokens(20).await?;
    let draft = cluster.add(WorkerKind::Draft).await?;
    let got = stream.rest().await?;
    got.check_same(&case.name, &expected)?;
    ensure!(got.speculation().accepted_tokens > 0, "the running sequence did not get the draft worker");
    ensure!(draft.steps().await? > 0, "the draft worker never ran");
    cluster.stop().await
}

/// A draft worker may have a shorter window than its target: a sequence that reaches its end continues
/// without drafts, and other sequences keep theirs.
#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_at_the_end_of_the_drafts_window_does_not_affect_others() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    let _target = cluster.add(WorkerKind::Target).await?;
    let _draft = cluster.add_with(WorkerKind::Draft, |config| config.max_model_len = Some(512)).await?;
    let client = cluster.client().await?;
    let long = long_case(0.7)?.with_k(4);
    let neighbour = Case { max_tokens: 40, ..long.clone() };
    let (expected_long, alone) =
        (client.ask(&long.with_k(0)).await?, client.ask(&neighbour.with_k(0)).await?);
    let mut stream = client.open(&long).await?;
    stream.read_tokens(20).await?;
    // On a busy machine all drafts of one neighbour may be late.
    let mut drafted = 0;
    for _ in 0..8 {
        let beside = client.ask(&neighbour).await?;
        beside.check_same(&neighbour.name, &alone)?;
        let used = beside.speculation();
        ensure!(used.disabled_reason != "draft_refused", "{used:?}");
        drafted += used.draft_tokens;
    }
    ensure!(drafted > 0, "the neighbours got no drafts");
    let rest = stream.rest().await?;
    rest.check_same(&long.name, &expected_long)?;
    ensure!(rest.speculation().disabled_reason == "draft_refused", "it never reached the window's end");
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_of_a_killed_target_process_continue_at_another_target() -> anyhow::Result<()> {
    let mut cluster = processes::start(|spec| spec.target_workers = 2).await?;
    let client = processes::client(&cluster).await?;
    let case = long_case(1.0)?;
    processes::wait_known(&cluster, &["target-0", "target-1"]).await?;
    let expected = client.ask(&case.with_k(0)).await?;
    let steps = async || {
        let of_first = processes::steps(&cluster, "target-0").await?;
        anyhow::Ok([of_first, processes::steps(&cluster, "target-1").await?])
    };
    let before = steps().await?;
    let mut stream = client.open(&case).await?;
    stream.read_tokens(20).await?;
    let now = steps().await?;
    let (serving, other) = if now[0] > before[0] { (0, 1) } else { (1, 0) };
    ensure!(now[other] == before[other], "both targets serve one sequence");
    cluster.kill(&format!("target-{serving}")).await?;
    stream.rest().await?.check_same(&case.name, &expected)?;
    let other_after = processes::steps(&cluster, &format!("target-{other}")).await?;
    ensure!(other_after > before[other], "the other target never took over: the text ended too soon");
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_draft_process_changes_no_token() -> anyhow::Result<()> {
    let mut cluster = processes::start(|_| ()).await?;
    let client = processes::client(&cluster).await?;
    let case = long_case(1.0)?;
    let expected = client.ask(&case.with_k(0)).await?;
    client.wait_for_drafts(&short(&case)).await?;
    let mut stream = client.open(&case).await?;
    stream.read_tokens(20).await?;
    cluster.signal("draft-0", Signal::SIGKILL)?;
    let got = stream.rest().await?;
    got.check_same(&case.name, &expected)?;
    let used = got.speculation();
    ensure!(used.draft_tokens > 0, "it was killed before it drafted anything");
    ensure!(used.disabled_reason == "no_draft_worker", "it was killed after the text was done: {used:?}");
    cluster.wait_exit("draft-0").await?;
    let without = client.ask(&short(&case)).await?;
    ensure!(without.speculation().draft_tokens == 0, "{:?}", without.speculation());
    cluster.restart("draft-0").await?;
    cluster.wait_process_ready("draft-0", WAIT_TIMEOUT).await?;
    client.wait_for_drafts(&short(&case)).await?;
    client.ask(&case).await?.check_same(&case.name, &expected)?;
    cluster.stop().await;
    Ok(())
}

fn short(case: &Case) -> Case {
    Case { max_tokens: 12, ..case.clone() }
}
