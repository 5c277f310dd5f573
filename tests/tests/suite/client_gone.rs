//! A client that disconnects: both workers stop within a round or two and release everything that they held
//! for it.

use std::time::Duration;

use anyhow::ensure;
use tests::case::Case;
use tests::cluster::{Cluster, RunningWorker, WorkerKind};
use tests::faulty_wire::WireFaults;
use tests::http_client::{COMPLETIONS, HttpClient};
use tests::pair::{MODEL, PairText};
use tests::wait::until;

/// Latency of every frame in each direction, so that a round takes long enough to observe events within it.
const SLOW: WireFaults = WireFaults {
    seed: 0,
    dropped: 0.0,
    duplicated: 0.0,
    delayed: 0.0,
    max_delay: Duration::ZERO,
    latency: Duration::from_millis(60),
};

/// The verification in progress when the client disconnected, and one that was sent before the router
/// noticed.
const MAX_VERIFICATIONS_AFTERWARDS: u64 = 2;

/// A draft worker runs one forward per drafted token.
const MAX_DRAFT_FORWARDS_AFTERWARDS: u64 = 4 * MAX_VERIFICATIONS_AFTERWARDS;

/// A pair with a distant target.
struct SlowPair {
    cluster: Cluster,
    target: RunningWorker,
    draft: RunningWorker,
}

impl SlowPair {
    async fn start() -> anyhow::Result<Self> {
        let cluster = Cluster::start(|_| ()).await?;
        let (target, _) = cluster.add_behind(WorkerKind::Target, SLOW).await?;
        let draft = cluster.add(WorkerKind::Draft).await?;
        Ok(Self { cluster, target, draft })
    }

    /// Waits until the client's sequence runs at both workers, disconnects the client by dropping it, and
    /// checks what the workers do after that.
    async fn check_both_stop_after_drop<C>(self, client: C) -> anyhow::Result<()> {
        let Self { cluster, target, draft } = self;
        until("both workers hold the sequence", async || {
            Ok(!holds_nothing(&target).await? && !holds_nothing(&draft).await?)
        })
        .await?;
        let (verified, drafted) = (forwards(&target).await?, forwards(&draft).await?);
        drop(client);
        until("both workers hold nothing any more", async || {
            Ok(holds_nothing(&target).await? && holds_nothing(&draft).await?)
        })
        .await?;
        let (verified, drafted) = (forwards(&target).await? - verified, forwards(&draft).await? - drafted);
        ensure!(
            verified <= MAX_VERIFICATIONS_AFTERWARDS,
            "{verified} verifications after the client had left"
        );
        ensure!(
            drafted <= MAX_DRAFT_FORWARDS_AFTERWARDS,
            "{drafted} draft forwards after the client disconnected"
        );
        cluster.stop().await
    }
}

async fn forwards(worker: &RunningWorker) -> anyhow::Result<u64> {
    Ok(worker.metrics().await?.sum("outrider_worker_forwards_total"))
}

async fn holds_nothing(worker: &RunningWorker) -> anyhow::Result<bool> {
    let page = worker.metrics().await?;
    Ok(page.sum("outrider_worker_kv_blocks_used") == 0 && page.sum("outrider_worker_sequences") == 0)
}

/// A text that is longer than any test.
fn endless_case() -> anyhow::Result<Case> {
    let prompt = PairText::load()?.bundled("creative")?.swap_remove(0);
    let mut case = Case::new("an endless story", prompt, 0.7);
    case.max_tokens = 1_000;
    case.ignore_eos = true;
    Ok(case)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpc_client_that_drops_its_stream_stops_both_workers() -> anyhow::Result<()> {
    let pair = SlowPair::start().await?;
    let mut stream = pair.cluster.client().await?.open(&endless_case()?).await?;
    stream.read_tokens(8).await?;
    pair.check_both_stop_after_drop(stream).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_client_that_closes_its_connection_stops_both_workers() -> anyhow::Result<()> {
    let pair = SlowPair::start().await?;
    let _ready = pair.cluster.client().await?;
    let case = endless_case()?;
    let body = serde_json::json!({
        "model": MODEL,
        "prompt": case.prompt_ids,
        "max_tokens": case.max_tokens,
        "ignore_eos": case.ignore_eos,
        "stream": true,
        "speculation": { "num_draft_tokens": case.num_draft_tokens },
    });
    let response = HttpClient::new(pair.cluster.http_url())?.open(COMPLETIONS, &body).await?;
    pair.check_both_stop_after_drop(response).await
}
