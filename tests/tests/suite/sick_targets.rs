//! Targets that are connected but useless: silent, with NaN weights, with a short window, or stopping. As
//! long as one healthy target runs, every request is answered with the usual ids.

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use tests::case::Case;
use tests::checkpoint_copy::CheckpointCopy;
use tests::client::Answer;
use tests::cluster::{Cluster, WorkerKind};
use tests::lanes_report::LanesReport;
use tests::metrics::Page;
use tests::pair::{self, PairText};
use tests::processes;
use tests::wait::until;

fn case(max_tokens: u32) -> anyhow::Result<Case> {
    let prompt = PairText::load()?.bundled("summarization")?.swap_remove(2);
    let mut case = Case::new("with a faulty target".to_owned(), prompt, 1.0);
    case.max_tokens = max_tokens;
    case.ignore_eos = true;
    case.seed = 31;
    Ok(case)
}

fn check_same(expected: &Answer, got: &Answer) -> anyhow::Result<()> {
    ensure!(expected.token_ids == got.token_ids, "{:?} instead of {:?}", got.token_ids, expected.token_ids);
    Ok(())
}

/// Fills a bf16 tensor of a checkpoint with NaN.
fn fill_with_nan(copy: &CheckpointCopy, tensor: &str) -> anyhow::Result<()> {
    let mut filled = None;
    copy.edit("model.safetensors", |bytes| {
        let header_len = bytes.first_chunk().map_or(0, |len| u64::from_le_bytes(*len)) as usize;
        let Some(header) = bytes.get(8..8 + header_len) else { return };
        let header: serde_json::Value = serde_json::from_slice(header).unwrap_or_default();
        let offset = |i: usize| Some(8 + header_len + header[tensor]["data_offsets"][i].as_u64()? as usize);
        let Some(values) = offset(0).zip(offset(1)).and_then(|(start, end)| bytes.get_mut(start..end)) else {
            return;
        };
        values.as_chunks_mut().0.iter_mut().for_each(|value| *value = 0x7fc0_u16.to_le_bytes());
        filled = Some(values.len());
    })?;
    filled.filter(|len| *len > 0).with_context(|| format!("no tensor {tensor}"))?;
    Ok(())
}

/// Adds a healthy target and waits until the router can use it, which is later than its connection.
async fn add_healthy(cluster: &Cluster) -> anyhow::Result<()> {
    let healthy = cluster.add(WorkerKind::Target).await?;
    until("the router knows the healthy target", async || {
        Ok(LanesReport::of(&cluster.admin_url()).await?.worker(&healthy.url()).is_ok())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_computes_nan_fails_no_request() -> anyhow::Result<()> {
    let broken = CheckpointCopy::of(&pair::target_dir())?;
    fill_with_nan(&broken, "model.norm.weight")?;
    let cluster = Cluster::start(|_| ()).await?;
    let model = broken.directory().to_owned();
    let nan_target = cluster.add_with(WorkerKind::Target, |config| config.model = Some(model)).await?;
    let client = cluster.client().await?;
    let case = case(20)?;
    let error = client.ask(&case).await.err().context("an answer of a model whose weights are NaN")?;
    let reason = format!("{error:#}");
    ensure!(reason.contains("not a number"), "{reason}");
    add_healthy(&cluster).await?;
    let expected = client.ask(&case).await?;
    for _ in 0..20 {
        check_same(&expected, &client.ask(&case).await?)?;
    }
    ensure!(
        nan_target.metrics().await?.sum_where("outrider_worker_steps_total", "outcome=\"run\"") > 0,
        "it received no step"
    );
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_with_a_short_window_gets_only_requests_that_fit() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    cluster.add(WorkerKind::Target).await?;
    let client = cluster.client().await?;
    let (long, short) = (case(300)?, case(8)?);
    let expected = [client.ask(&long).await?, client.ask(&short).await?];
    let usage = &expected[1].usage;
    let window = Some(usage.prompt_tokens + usage.completion_tokens + 8);
    cluster.add_with(WorkerKind::Target, |config| config.max_model_len = window).await?;
    // Concurrently, so that the least loaded target would be the one with the short window half of the time.
    let cases: Vec<Case> = [long, short].into_iter().cycle().take(12).collect();
    for (got, expected) in client.ask_all(&cases, 4).await?.iter().zip(expected.iter().cycle()) {
        check_same(expected, got)?;
    }
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_of_a_suspended_target_move_to_another_target() -> anyhow::Result<()> {
    let cluster = processes::start(|spec| spec.target_workers = 2).await?;
    let client = processes::client(&cluster).await?;
    until("the router has both targets", async || {
        let report = LanesReport::of(&cluster.admin_url("router")?).await?;
        Ok(["target-0", "target-1"]
            .iter()
            .all(|name| cluster.worker_url(name).is_ok_and(|url| report.worker(&url).is_ok())))
    })
    .await?;
    let case = case(1_000)?;
    let expected = client.ask(&case.with_k(0)).await?;
    let mut stream = client.open(&case).await?;
    stream.read_tokens(20).await?;
    let report = LanesReport::of(&cluster.admin_url("router")?).await?;
    let sequences = |name: &str| -> anyhow::Result<u64> {
        Ok(report.worker(&cluster.worker_url(name)?)?["sequences"].as_u64().unwrap_or(0))
    };
    let serving = if sequences("target-0")? > 0 { "target-0" } else { "target-1" };
    ensure!(sequences(serving)? > 0, "the text was over before its target could be stopped");
    processes::pause(&cluster, serving).await?;
    check_same(&expected, &stream.rest().await?)?;
    let outages = Page::scrape(&cluster.admin_url("router")?).await?.sum("outrider_target_outages_total");
    ensure!(outages > 0, "the router did not notice that {serving} was stopped");
    // With a stopped target new requests are answered too.
    check_same(&expected, &client.ask(&case).await?)?;
    cluster.signal(serving, Signal::SIGCONT)?;
    check_same(&expected, &client.ask(&case).await?)?;
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_shuts_down_finishes_its_sequences() -> anyhow::Result<()> {
    let mut cluster = processes::start(|_| ()).await?;
    let client = processes::client(&cluster).await?;
    let case = case(1_000)?;
    let expected = client.ask(&case.with_k(0)).await?;
    let mut stream = client.open(&case).await?;
    stream.read_tokens(20).await?;
    cluster.signal("target-0", Signal::SIGTERM)?;
    check_same(&expected, &stream.rest().await?)?;
    let exit = cluster.wait_exit("target-0").await?;
    ensure!(exit.status.is_some_and(|status| status.success()), "{}", exit.cause());
    cluster.restart("target-0").await?;
    check_same(&expected, &client.ask(&case).await?)?;
    cluster.stop().await;
    Ok(())
}
