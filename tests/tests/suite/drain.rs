//! An operator drains workers through the router: they get no new work, running sequences finish or move, and
//! the text stays the same.

use anyhow::{Context as _, ensure};
use reqwest::Method;
use serde_json::Value;
use tests::case::Case;
use tests::cluster::{Cluster, WorkerKind};
use tests::http_client::{HttpAnswer, HttpClient};
use tests::lanes_report::LanesReport;
use tests::pair::PairText;

fn case(max_tokens: u32) -> anyhow::Result<Case> {
    let prompt = PairText::load()?.bundled("summarization")?.swap_remove(1);
    let mut case = Case::new("beside a drained worker".to_owned(), prompt, 1.0);
    (case.max_tokens, case.ignore_eos, case.seed) = (max_tokens, true, 17);
    Ok(case)
}

/// Sends a drain request; returns the router's answer.
async fn order(cluster: &Cluster, method: Method, worker: &str, query: &str) -> anyhow::Result<Value> {
    let authority = worker.trim_start_matches("http://");
    let path = format!("/admin/workers/{authority}/drain{query}");
    let answer = HttpAnswer::of(HttpClient::new(cluster.admin_url())?.request(method, &path)).await?;
    ensure!(answer.status == 200, "{path}: {} {}", answer.status, answer.text);
    answer.json()
}

async fn sequences(cluster: &Cluster, worker: &str) -> anyhow::Result<u64> {
    let report = LanesReport::of(&cluster.admin_url()).await?;
    report.worker(worker)?["sequences"].as_u64().context("no number of sequences")
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_of_a_drained_target_move_and_keep_their_ids() -> anyhow::Result<()> {
    let (cluster, first, draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let second = cluster.add(WorkerKind::Target).await?;
    let client = cluster.client().await?;
    cluster.wait_known(&[&first, &second]).await?;
    let case = case(800)?;
    let expected = client.ask(&case.with_k(0)).await?.token_ids;
    let mut stream = client.open(&case).await?;
    stream.read_tokens(20).await?;
    let (first, second, draft) = (first.url(), second.url(), draft.url());
    let (serving, other) =
        if sequences(&cluster, &first).await? > 0 { (first, second) } else { (second, first) };

    let answer = order(&cluster, Method::POST, &serving, "?move=true").await?;
    ensure!(answer["workers"][0]["draining"] == "operator", "{answer}");
    ensure!(answer["drained"][0] == serving.as_str(), "{answer}");
    ensure!(sequences(&cluster, &serving).await? == 0, "something stayed");
    // Without its draft worker a stream continues at k = 0, and with it drafting resumes.
    stream.read_tokens(40).await?;
    order(&cluster, Method::POST, &draft, "").await?;
    ensure!(sequences(&cluster, &draft).await? == 0, "a draft worker is left at once");
    stream.read_tokens(80).await?;
    order(&cluster, Method::DELETE, &draft, "").await?;
    let moved = stream.rest().await?.token_ids;
    ensure!(moved == expected, "{moved:?} instead of {expected:?}");
    let short = Case { max_tokens: 100, ..case.with_k(2) };
    for _ in 0..4 {
        ensure!(client.ask(&short).await?.token_ids == expected[..100], "other ids at {other}");
    }
    let answer = order(&cluster, Method::DELETE, &serving, "").await?;
    ensure!(answer["workers"][0]["draining"].is_null(), "{answer}");

    let readiness = async || {
        let client = HttpClient::new(cluster.admin_url())?;
        HttpAnswer::of(client.request(Method::GET, "/health/ready")).await
    };
    order(&cluster, Method::POST, &serving, "").await?;
    ensure!(readiness().await?.status == 200, "{other} takes sequences");
    order(&cluster, Method::POST, &other, "").await?;
    let unready = readiness().await?;
    ensure!(unready.status == 503 && unready.text.contains("is draining"), "{}", unready.text);
    order(&cluster, Method::DELETE, &other, "").await?;
    ensure!(readiness().await?.status == 200, "{other} takes sequences again");
    cluster.stop().await
}
