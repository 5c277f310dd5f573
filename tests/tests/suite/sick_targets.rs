//! Targets that are connected but useless: silent, with NaN weights, with a short window, or stopping. As
//! long as one healthy target runs, every request is answered with the usual ids.

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use tests::case::Case;
use tests::checkpoint_copy::CheckpointCopy;
use tests::cluster::Cluster;
use tests::lanes_report::LanesReport;
use tests::pair;
use tests::processes;

fn case(max_tokens: u32) -> anyhow::Result<Case> {
    Ok(Case { seed: 31, ..Case::long_text(1.0, max_tokens)? })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_computes_nan_fails_no_request() -> anyhow::Result<()> {
    let broken = CheckpointCopy::of(&pair::target_dir())?;
    broken.fill_with_nan("model.norm.weight")?;
    let cluster = Cluster::start(|_| ()).await?;
    let model = broken.directory().to_owned();
    let nan_target = cluster.add_plain_target(|config| config.model = Some(model)).await?;
    let client = cluster.client().await?;
    let case = case(20)?;
    let error = client.ask(&case).await.err().context("an answer of a model whose weights are NaN")?;
    let reason = format!("{error:#}");
    ensure!(reason.contains("not a number"), "{reason}");
    let healthy = cluster.add_plain_target(|_| ()).await?;
    cluster.wait_known(&[&healthy]).await?;
    let expected = client.ask(&case).await?;
    for _ in 0..20 {
        let got = client.ask(&case).await?.token_ids;
        ensure!(got == expected.token_ids, "{got:?} instead of {:?}", expected.token_ids);
    }
    ensure!(nan_target.steps().await? > 0, "it received no step");
    ensure!(nan_target.steps_failed().await? > 0, "its own metrics show no failure");
    ensure!(healthy.steps_failed().await? == 0, "the other target failed, too");
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_with_a_short_window_gets_only_requests_that_fit() -> anyhow::Result<()> {
    let cluster = Cluster::start(|_| ()).await?;
    cluster.add_plain_target(|_| ()).await?;
    let client = cluster.client().await?;
    let (long, short) = (case(300)?, case(8)?);
    let expected = [client.ask(&long).await?, client.ask(&short).await?];
    let usage = &expected[1].usage;
    let window = Some(usage.prompt_tokens + usage.completion_tokens + 8);
    let limited = cluster.add_plain_target(|config| config.max_model_len = window).await?;
    cluster.wait_known(&[&limited]).await?;
    // Concurrently, so that the least loaded target would be the one with the short window half of the time.
    let cases: Vec<Case> = [long, short].into_iter().cycle().take(12).collect();
    for (got, expected) in client.ask_all(&cases, 4).await?.iter().zip(expected.iter().cycle()) {
        got.check_same("a request that fits one or both", expected)?;
    }
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_of_a_suspended_target_move_to_another_target() -> anyhow::Result<()> {
    let cluster = processes::start(|spec| spec.target_workers = 2).await?;
    let client = processes::client(&cluster).await?;
    processes::wait_known(&cluster, &["target-0", "target-1"]).await?;
    let (long, short) = (case(1_000)?, case(40)?);
    let expected = client.ask_plain(&[long.clone(), short.clone()], 1).await?;
    let mut stream = client.open(&long).await?;
    stream.read_tokens(20).await?;
    let report = LanesReport::of(&cluster.admin_url("router")?).await?;
    let sequences = |name: &str| -> anyhow::Result<u64> {
        Ok(report.worker(&cluster.worker_url(name)?)?["sequences"].as_u64().unwrap_or(0))
    };
    let serving = if sequences("target-0")? > 0 { "target-0" } else { "target-1" };
    ensure!(sequences(serving)? > 0, "the text was over before its target could be stopped");
    processes::pause(&cluster, serving).await?;
    stream.rest().await?.check_same(&long.name, &expected[0])?;
    let outages = processes::metrics(&cluster, "router").await?.sum("outrider_target_outages_total");
    ensure!(outages > 0, "the router did not notice that {serving} was stopped");
    // With a stopped target new requests are answered too.
    client.ask(&short).await?.check_same(&short.name, &expected[1])?;
    cluster.signal(serving, Signal::SIGCONT)?;
    client.ask(&short).await?.check_same(&short.name, &expected[1])?;
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_shuts_down_finishes_its_sequences() -> anyhow::Result<()> {
    let mut cluster = processes::start(|_| ()).await?;
    let client = processes::client(&cluster).await?;
    let (long, short) = (case(1_000)?, case(40)?);
    let expected = client.ask_plain(&[long.clone(), short.clone()], 1).await?;
    let mut stream = client.open(&long).await?;
    stream.read_tokens(20).await?;
    cluster.signal("target-0", Signal::SIGTERM)?;
    stream.rest().await?.check_same(&long.name, &expected[0])?;
    let exit = cluster.wait_exit("target-0").await?;
    ensure!(exit.status.is_some_and(|status| status.success()), "{}", exit.cause());
    cluster.restart("target-0").await?;
    client.ask(&short).await?.check_same(&short.name, &expected[1])?;
    cluster.stop().await;
    Ok(())
}
