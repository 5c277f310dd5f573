//! Workers and a router that discover each other through a real etcd, while workers start and fail, and while
//! etcd itself fails.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use outrider_cli::cluster::{ClusterSpec, Discovery, ProcessCluster};
use reqwest::Response;
use serde_json::{Value, json};
use speculation::Role;
use tests::etcd::Etcd;
use tests::http_client::{COMPLETIONS, HttpClient, completion_text, streamed_text};
use tests::pair::MODEL;
use tests::processes::{self, Logs};
use tests::wait::until;

/// Long enough that a text is still in progress when events happen to its workers.
const LONG: u32 = 1_000;

async fn cluster(etcd: &Etcd, change: impl FnOnce(&mut ClusterSpec)) -> anyhow::Result<ProcessCluster> {
    processes::start(|spec| {
        spec.discovery = Discovery::Uri(etcd.uri());
        change(spec);
    })
    .await
}

/// The same, with the processes' logs.
async fn logged_cluster(etcd: &Etcd) -> anyhow::Result<(ProcessCluster, Arc<Logs>)> {
    processes::start_logged(|spec| spec.discovery = Discovery::Uri(etcd.uri())).await
}

/// Waits until each of these workers reports that it is registered, or that it is not.
async fn wait_until_registered(
    cluster: &ProcessCluster,
    workers: &[&str],
    registered: bool,
) -> anyhow::Result<()> {
    for worker in workers {
        until(&format!("{worker} says registered = {registered}"), async || {
            let page = processes::metrics(cluster, worker).await?;
            Ok(page.sum("outrider_worker_registered") == u64::from(registered))
        })
        .await?;
    }
    Ok(())
}

/// Waits until this many workers are registered; etcd may not answer during an election.
async fn wait_until_listed(etcd: &Etcd, num_workers: usize) -> anyhow::Result<()> {
    until(&format!("etcd lists {num_workers} workers"), async || {
        Ok(etcd.workers().await.is_ok_and(|workers| workers.len() == num_workers))
    })
    .await
}

/// How often the router logged that a worker joined: more often than there are workers if a connection was
/// cut.
fn joined(logs: &Logs) -> usize {
    logs.of("router").iter().filter(|line| line.contains("worker joined")).count()
}

/// Checks that workers joined exactly this often: a worker whose connection was cut joins again. A log line
/// may appear shortly after its event.
async fn check_joined(logs: &Logs, expected: usize) -> anyhow::Result<()> {
    until("every worker that joined is logged", async || Ok(joined(logs) >= expected)).await?;
    ensure!(joined(logs) == expected, "a connection was cut: {:?}", logs.of("router"));
    Ok(())
}

/// Reads a stream to its end and returns its text; `read` is the part received before.
async fn whole_text(mut stream: Response, mut read: Vec<u8>) -> anyhow::Result<String> {
    while let Some(bytes) = stream.chunk().await? {
        read.extend_from_slice(&bytes);
    }
    streamed_text(&String::from_utf8(read)?)
}

fn request(max_tokens: u32) -> Value {
    let prompt = "Write a Python function that reverses a list.\n";
    // A fixed k: the request has drafts regardless of the lane's policy.
    let speculation = json!({ "num_draft_tokens": 4 });
    json!({
        "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "seed": 3, "ignore_eos": true,
        "speculation": speculation,
    })
}

fn streamed(max_tokens: u32) -> Value {
    let mut body = request(max_tokens);
    body["stream"] = true.into();
    body
}

/// Reads until some text has arrived; returns the bytes read.
async fn first_text(stream: &mut Response) -> anyhow::Result<Vec<u8>> {
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).contains("\"text\":\"") {
        read.extend_from_slice(&stream.chunk().await?.context("the stream ended at its beginning")?);
    }
    Ok(read)
}

/// Number of sequences that a worker holds now.
async fn sequences(cluster: &ProcessCluster, worker: &str) -> anyhow::Result<u64> {
    Ok(processes::metrics(cluster, worker).await?.sum("outrider_worker_sequences"))
}

/// Number of rows that a worker has computed.
async fn rows(cluster: &ProcessCluster, worker: &str) -> anyhow::Result<u64> {
    Ok(processes::metrics(cluster, worker).await?.sum("outrider_worker_rows_total"))
}

async fn wait_until_connected(cluster: &mut ProcessCluster, worker: &str) -> anyhow::Result<()> {
    cluster.wait_process_ready(worker, tests::wait::WAIT_TIMEOUT).await?;
    until(&format!("the router connects to {worker}"), async || {
        Ok(processes::metrics(cluster, worker).await?.sum("outrider_worker_streams") == 1)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_join_later_are_used() -> anyhow::Result<()> {
    let etcd = Etcd::start().await?;
    let mut cluster = cluster(&etcd, |spec| spec.draft_workers = 0).await?;
    let http = HttpClient::new(cluster.http_url())?;
    let alone = http.ask(COMPLETIONS, &request(48)).await?;
    ensure!(alone["usage"]["speculation"]["disabled_reason"] == "no_draft_worker", "{alone}");
    let roles = |workers: &[Value]| workers.iter().map(|worker| worker["role"].clone()).collect::<Vec<_>>();
    ensure!(roles(&etcd.workers().await?) == ["target"], "{:?}", etcd.workers().await?);

    let draft = cluster.add_worker(Role::Draft)?;
    wait_until_connected(&mut cluster, &draft).await?;
    let mut drafted = Value::Null;
    until("the draft worker is used", async || {
        drafted = http.ask(COMPLETIONS, &request(48)).await?;
        Ok(drafted["usage"]["speculation"]["accepted_tokens"].as_u64() > Some(0))
    })
    .await?;
    ensure!(completion_text(&drafted)? == completion_text(&alone)?, "a draft changed the text");

    // Two concurrent requests go to two targets.
    let target = cluster.add_worker(Role::Target)?;
    wait_until_connected(&mut cluster, &target).await?;
    let mut streams = Vec::new();
    until("both targets hold a sequence", async || {
        streams.push(http.open(COMPLETIONS, &streamed(LONG)).await?);
        Ok(sequences(&cluster, "target-0").await? > 0 && sequences(&cluster, &target).await? > 0)
    })
    .await?;
    drop(streams);
    ensure!(etcd.workers().await?.len() == 3, "{:?}", etcd.workers().await?);
    cluster.stop().await;
    until("workers that stop leave the list", async || Ok(etcd.workers().await?.is_empty())).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_of_a_killed_target_continue_unchanged_at_another_target() -> anyhow::Result<()> {
    let etcd = Etcd::start().await?;
    let mut cluster = cluster(&etcd, |spec| spec.target_workers = 2).await?;
    let http = HttpClient::new(cluster.http_url())?;
    for target in ["target-0", "target-1"] {
        wait_until_connected(&mut cluster, target).await?;
    }
    let expected = http.ask(COMPLETIONS, &request(LONG)).await?;
    until("the first text's sequence is let go", async || {
        Ok(sequences(&cluster, "target-0").await? + sequences(&cluster, "target-1").await? == 0)
    })
    .await?;

    let mut stream = http.open(COMPLETIONS, &streamed(LONG)).await?;
    let read = first_text(&mut stream).await?;
    let (victim, heir) = match sequences(&cluster, "target-0").await? {
        0 => ("target-1", "target-0"),
        _ => ("target-0", "target-1"),
    };
    let rows_before = rows(&cluster, heir).await?;
    cluster.kill(victim).await?;
    let text = whole_text(stream, read).await?;
    ensure!(text == completion_text(&expected)?, "another text after the failover: {text:?}");
    let rows = rows(&cluster, heir).await? - rows_before;
    ensure!(
        rows > 100,
        "{heir} computed {rows} rows after the other one was killed: the text was all but done"
    );

    let url = cluster.worker_url(victim)?;
    let listed = async || Ok(etcd.workers().await?.iter().any(|worker| worker["address"] == url));
    until("the killed target's key leaves etcd with its lease", async || {
        listed().await.map(|listed: bool| !listed)
    })
    .await?;
    ensure!(etcd.workers().await?.len() == 2, "{:?}", etcd.workers().await?);
    let after = http.ask(COMPLETIONS, &request(LONG)).await?;
    ensure!(completion_text(&after)? == completion_text(&expected)?, "another text at the other target");
    cluster.stop().await;
    Ok(())
}

/// Until the killed process's lease expires, discovery lists one address under two ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_restart_within_their_lease_are_used_again() -> anyhow::Result<()> {
    let etcd = Etcd::start().await?;
    let mut cluster = cluster(&etcd, |_| ()).await?;
    let http = HttpClient::new(cluster.http_url())?;
    let (body, first) = (request(48), http.ask(COMPLETIONS, &request(48)).await?);
    let expected = completion_text(&first)?;
    let answers = async |http: &HttpClient| {
        let pending = tokio::time::timeout(tests::wait::WAIT_TIMEOUT, http.ask(COMPLETIONS, &body));
        let answer = pending.await.context("a request hangs")??;
        ensure!(completion_text(&answer)? == expected, "another text after the restart: {answer}");
        anyhow::Ok(answer)
    };
    for worker in ["target-0", "draft-0"] {
        cluster.restart(worker).await?;
        wait_until_connected(&mut cluster, worker).await?;
        answers(&http).await?;
    }
    ensure!(etcd.workers().await?.len() > 2, "no lease outlived its process: the test shows nothing");
    until("the killed processes' keys leave etcd with their leases", async || {
        answers(&http).await?;
        Ok(etcd.workers().await?.len() == 2)
    })
    .await?;
    // The expiry of the older registration must not end the newer one's connection.
    for _ in 0..5 {
        let answer = answers(&http).await?;
        ensure!(answer["usage"]["speculation"]["accepted_tokens"].as_u64() > Some(0), "{answer}");
    }
    for worker in ["target-0", "draft-0"] {
        let streams = processes::metrics(&cluster, worker).await?.sum("outrider_worker_streams");
        ensure!(streams == 1, "{worker} has {streams} streams");
    }
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_served_while_etcd_is_down() -> anyhow::Result<()> {
    let mut etcd = Etcd::start().await?;
    let cluster = cluster(&etcd, |_| ()).await?;
    let http = HttpClient::new(cluster.http_url())?;
    let before = http.ask(COMPLETIONS, &request(48)).await?;
    let mut stream = http.open(COMPLETIONS, &streamed(LONG)).await?;
    first_text(&mut stream).await?;
    etcd.kill()?;
    let expected = http.ask(COMPLETIONS, &request(LONG)).await?;
    ensure!(expected["usage"]["completion_tokens"] == LONG, "{}", expected["usage"]);
    while stream.chunk().await?.is_some() {}
    let after = http.ask(COMPLETIONS, &request(48)).await?;
    ensure!(completion_text(&after)? == completion_text(&before)?, "another text while etcd is down");
    ensure!(after["usage"]["speculation"]["disabled_reason"].is_null(), "{}", after["usage"]);
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_keys_are_registered_again_and_no_connection_is_closed() -> anyhow::Result<()> {
    let etcd = Etcd::start().await?;
    let (mut cluster, logs) = logged_cluster(&etcd).await?;
    let http = HttpClient::new(cluster.http_url())?;
    wait_until_connected(&mut cluster, "draft-0").await?;
    let expected = http.ask(COMPLETIONS, &request(LONG)).await?;
    let mut stream = http.open(COMPLETIONS, &streamed(LONG)).await?;
    let read = first_text(&mut stream).await?;

    ensure!(etcd.delete_workers().await? == 2, "not every worker had a key");
    for role in ["target", "draft"] {
        logs.line_with("router", &["discovery no longer lists this worker", role]).await?;
    }
    let during = http.ask(COMPLETIONS, &request(48)).await?;
    ensure!(during["usage"]["speculation"]["accepted_tokens"].as_u64() > Some(0), "{during}");
    for worker in ["target-0", "draft-0"] {
        logs.line_with(worker, &["the worker's key was missing in etcd: wrote it again"]).await?;
    }
    wait_until_listed(&etcd, 2).await?;
    wait_until_registered(&cluster, &["target-0", "draft-0"], true).await?;
    ensure!(whole_text(stream, read).await? == completion_text(&expected)?, "another text");
    check_joined(&logs, 2).await?;

    // A worker that leaves differs from one whose key is gone: it closes its connection.
    cluster.signal("draft-0", Signal::SIGTERM)?;
    logs.line_with("router", &["worker left", "draft"]).await?;
    let alone = http.ask(COMPLETIONS, &request(48)).await?;
    ensure!(alone["usage"]["speculation"]["disabled_reason"] == "no_draft_worker", "{alone}");
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_register_again_after_etcd_lost_its_data_and_keep_connections() -> anyhow::Result<()> {
    let mut etcd = Etcd::start().await?;
    let (mut cluster, logs) = logged_cluster(&etcd).await?;
    let http = HttpClient::new(cluster.http_url())?;
    wait_until_connected(&mut cluster, "draft-0").await?;
    let expected = http.ask(COMPLETIONS, &request(LONG)).await?;
    let mut stream = http.open(COMPLETIONS, &streamed(LONG)).await?;
    let read = first_text(&mut stream).await?;

    etcd.restart_without_data().await?;
    let during = http.ask(COMPLETIONS, &request(LONG)).await?;
    ensure!(completion_text(&during)? == completion_text(&expected)?, "another text without the data");
    wait_until_listed(&etcd, 2).await?;
    wait_until_registered(&cluster, &["target-0", "draft-0"], true).await?;
    ensure!(whole_text(stream, read).await? == completion_text(&expected)?, "another text");
    // A worker that starts now is discovered: the router watches the new data.
    let draft = cluster.add_worker(Role::Draft)?;
    wait_until_connected(&mut cluster, &draft).await?;
    check_joined(&logs, 3).await?;
    cluster.stop().await;
    Ok(())
}

/// Three members: without one everything continues; without two no new worker is discovered but requests
/// continue; restarted members are used again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_cluster_of_three_recovers_from_losing_one_and_two_members() -> anyhow::Result<()> {
    let mut etcd = Etcd::start_members(3).await?;
    let (mut cluster, logs) = logged_cluster(&etcd).await?;
    let http = HttpClient::new(cluster.http_url())?;
    wait_until_connected(&mut cluster, "draft-0").await?;
    let short = (request(48), http.ask(COMPLETIONS, &request(48)).await?);
    let long = (request(LONG), http.ask(COMPLETIONS, &request(LONG)).await?);
    let answers = async |(body, expected): &(Value, Value)| {
        let answer = http.ask(COMPLETIONS, body).await?;
        ensure!(completion_text(&answer)? == completion_text(expected)?, "another text: {answer}");
        anyhow::Ok(())
    };

    etcd.kill_member(0)?;
    answers(&short).await?;
    let second = cluster.add_worker(Role::Draft)?;
    wait_until_connected(&mut cluster, &second).await?;
    let workers = ["target-0", "draft-0", second.as_str()];
    wait_until_registered(&cluster, &workers, true).await?;

    etcd.kill_member(1)?;
    wait_until_registered(&cluster, &workers, false).await?;
    answers(&short).await?;
    let third = cluster.add_worker(Role::Draft)?;
    cluster.wait_process_ready(&third, tests::wait::WAIT_TIMEOUT).await?;
    // Long enough for the router to discover the third draft worker, if it could.
    answers(&long).await?;
    ensure!(joined(&logs) == 3, "{third} was found without a quorum, or a connection was cut");

    etcd.start_member_again(0)?;
    wait_until_connected(&mut cluster, &third).await?;
    wait_until_registered(&cluster, &["target-0", "draft-0", &second, &third], true).await?;
    wait_until_listed(&etcd, 4).await?;
    answers(&short).await?;
    etcd.start_member_again(1)?;
    answers(&short).await?;
    check_joined(&logs, 4).await?;
    cluster.stop().await;
    Ok(())
}
