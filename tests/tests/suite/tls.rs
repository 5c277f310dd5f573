//! TLS on every connection: clients to the router, and the router to a worker that requires a client
//! certificate. Peers without the right certificate are refused, and no other connection is affected.

use anyhow::{Context as _, ensure};
use router::workers::connection::{RouterIdentity, connect};
use router::workers::tls::WorkerTls;
use service::discovery::TARGET;
use service::tls::ClientTls;
use tests::authority::{NAME, TestCa};
use tests::case::{Case, covering_set};
use tests::client::Client;
use tests::cluster::{Cluster, WorkerKind, plain_answers};
use tests::pair::PairText;
use tests::wait::until;

fn for_both_roles(tls: ClientTls) -> WorkerTls {
    WorkerTls { draft: tls.clone(), target: tls }
}

/// Tries to attach to a worker, and returns the error.
async fn refusal(address: &str, tls: Option<ClientTls>) -> anyhow::Result<String> {
    let identity = RouterIdentity { router_id: 7, tls: tls.map(for_both_roles) };
    match connect(address, TARGET, &identity).await {
        Ok(_) => anyhow::bail!("{address} let it in"),
        Err(error) => Ok(format!("{error:#}")),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_on_every_connection_changes_no_text() -> anyhow::Result<()> {
    let cases: Vec<_> = covering_set(&PairText::load()?)?.into_iter().step_by(8).collect();
    let expected = plain_answers(&cases, cases.len()).await?;

    let (workers, clients) = (TestCa::new()?, TestCa::new()?);
    let (worker_tls, router_tls) = (workers.client()?, clients.server(false)?);
    let cluster = Cluster::start(|config| {
        config.worker_tls = Some(for_both_roles(worker_tls));
        config.tls = Some(router_tls);
    })
    .await?;
    let tls = workers.server(true)?;
    let target = cluster.add_plain_target(|config| config.tls = Some(tls)).await?;

    let listen = target.grpc_address();
    let (https, http) = (format!("https://{listen}"), format!("http://{listen}"));
    let hint = refusal(&https, None).await?;
    ensure!(hint.contains("--worker-ca"), "no hint in: {hint}");
    refusal(&http, None).await?;
    refusal(&https, Some(workers.client_without_certificate()?)).await?;
    refusal(&https, Some(clients.client()?)).await?;
    refusal(&https, Some(workers.expired_client()?)).await?;
    let other_name = refusal(&https, Some(workers.client()?.expecting("elsewhere"))).await?;
    ensure!(other_name.contains("certificate"), "no reason in: {other_name}");
    let demanded = refusal(&http, Some(workers.client()?)).await?;
    ensure!(demanded.contains("--worker-ca requires TLS"), "no reason in: {demanded}");

    cluster.ready().await?;
    let listener = format!("https://{}", cluster.grpc_address());
    let untrusting = Client::connect_with_tls(&listener, &workers.client_without_certificate()?).await;
    ensure!(untrusting.is_err(), "a client took a certificate of an authority that it does not trust");
    let client = Client::connect_with_tls(&listener, &clients.client_without_certificate()?).await?;
    for ((case, expected), got) in cases.iter().zip(&expected).zip(client.ask_all(&cases, cases.len()).await?)
    {
        ensure!(got.token_ids == expected.token_ids, "{}: another text", case.name);
    }
    cluster.stop().await.context("strangers keep the cluster up")
}

/// One authority signs all certificates: a target distinguishes routers from draft workers by the names in
/// them.
#[tokio::test(flavor = "multi_thread")]
async fn workers_reject_a_certificate_for_another_name() -> anyhow::Result<()> {
    let workers = TestCa::new()?;
    let router_tls = workers.named_client()?;
    let cluster = Cluster::start(|config| config.worker_tls = Some(for_both_roles(router_tls))).await?;
    let tls = workers.server_for_named()?;
    let target = cluster.add_plain_target(|config| config.tls = Some(tls)).await?;
    let https = format!("https://{}", target.grpc_address());
    refusal(&https, Some(workers.client()?)).await?;
    cluster.ready().await?;
    let case = Case::new("after a refusal", vec![7, 8, 9], 0.0);
    ensure!(!cluster.client().await?.ask(&case.with_k(0)).await?.token_ids.is_empty(), "no text");
    cluster.stop().await.context("a certificate for another name keeps the cluster up")
}

/// The addresses of pods are in no certificate.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_may_be_known_by_its_name_instead_of_its_address() -> anyhow::Result<()> {
    let workers = TestCa::new()?;
    let router_tls = workers.client()?.expecting(NAME);
    let cluster = Cluster::start(|config| config.worker_tls = Some(for_both_roles(router_tls))).await?;
    let tls = workers.named_server()?;
    let target = cluster.add_plain_target(|config| config.tls = Some(tls)).await?;
    let https = format!("https://{}", target.grpc_address());
    let reason = refusal(&https, Some(workers.client()?)).await?;
    ensure!(reason.contains("certificate"), "no reason in: {reason}");
    cluster.ready().await?;
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_under_load() -> anyhow::Result<()> {
    let cases: Vec<_> = covering_set(&PairText::load()?)?.into_iter().step_by(12).collect();
    let (before, after) = (TestCa::new()?, TestCa::new()?);
    let router_tls = before.server(false)?;
    let cluster = Cluster::start(|config| config.tls = Some(router_tls)).await?;
    cluster.add(WorkerKind::Target).await?;
    cluster.add(WorkerKind::Draft).await?;
    cluster.ready().await?;
    let listener = format!("https://{}", cluster.grpc_address());
    let client = Client::connect_with_tls(&listener, &before.client_without_certificate()?).await?;
    let expected = client.ask_all(&cases, cases.len()).await?;
    let mut long = cases[0].clone();
    (long.max_tokens, long.ignore_eos) = (600, true);
    let expected_long = client.ask(&long.with_k(0)).await?;

    let mut stream = client.open(&long).await?;
    stream.read_tokens(10).await?;
    before.replace_server_certificate(&after)?;
    // Requests continue over open connections while new connections get the new certificate.
    let renewed = until("a client that trusts the new authority connects", async || {
        for (got, expected) in client.ask_all(&cases, cases.len()).await?.iter().zip(&expected) {
            ensure!(got.token_ids == expected.token_ids, "another text");
        }
        Ok(Client::connect_with_tls(&listener, &after.client_without_certificate()?).await.is_ok())
    });
    renewed.await?;
    let old = Client::connect_with_tls(&listener, &before.client_without_certificate()?).await;
    ensure!(old.is_err(), "the old certificate is shown still");
    let new = Client::connect_with_tls(&listener, &after.client_without_certificate()?).await?;
    ensure!(new.ask(&long).await?.token_ids == expected_long.token_ids, "another text");
    ensure!(stream.rest().await?.token_ids == expected_long.token_ids, "the open stream has another text");
    cluster.stop().await
}
