//! A router with a worker of an older build: the recorded first frames of one (proto/testdata) over the real
//! wire protocol.

use std::pin::Pin;

use anyhow::{Context as _, ensure};
use futures::Stream;
use prost::Message as _;
use proto::v1;
use proto::v1::worker_server::Worker;
use router::workers::connection::{RouterIdentity, connect};
use service::discovery::TARGET;
use service::shutdown::Lifetime;
use tests::fake_worker::serve;
use tonic::{Request, Response, Status, Streaming};

const WORKER: &[u8] = include_bytes!("../../../proto/testdata/worker_hello_1.bin");

/// Sends the recorded worker's hello, with these versions if given, and then nothing.
struct OlderWorker {
    versions: Option<(u32, u32)>,
}

type Frames = Pin<Box<dyn Stream<Item = Result<v1::WorkerFrame, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for OlderWorker {
    type AttachStream = Frames;
    type FetchAssetStream = Pin<Box<dyn Stream<Item = Result<v1::AssetChunk, Status>> + Send>>;

    async fn attach(
        &self,
        _: Request<Streaming<v1::RouterFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut frame =
            v1::WorkerFrame::decode(WORKER).map_err(|error| Status::internal(error.to_string()))?;
        if let (Some(hello), Some((min, max))) = (&mut frame.hello, self.versions) {
            (hello.protocol_version_min, hello.protocol_version_max) = (min, max);
        }
        let frames = futures::stream::once(async { Ok(frame) });
        Ok(Response::new(Box::pin(futures::StreamExt::chain(frames, futures::stream::pending()))))
    }

    async fn fetch_asset(
        &self,
        _: Request<v1::FetchAssetRequest>,
    ) -> Result<Response<Self::FetchAssetStream>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_router_connects_to_a_worker_of_the_first_build() -> anyhow::Result<()> {
    let lifetime = Lifetime::new();
    let identity = RouterIdentity { router_id: 7, tls: None };
    for versions in [None, Some((0, 1)), Some((1, 9))] {
        let url = serve(OlderWorker { versions }, &lifetime).await?;
        let connection = connect(&url, TARGET, &identity).await.with_context(|| format!("{versions:?}"))?;
        ensure!(connection.hello.model_id == "demo", "{:?}", connection.hello);
        ensure!(connection.credits == Some(1_024), "{:?}", connection.credits);
    }
    for versions in [(2, 9), (0, 0), (3, 2)] {
        let url = serve(OlderWorker { versions: Some(versions) }, &lifetime).await?;
        let error = connect(&url, TARGET, &identity)
            .await
            .err()
            .with_context(|| format!("{versions:?} was accepted"))?;
        ensure!(error.to_string().contains("upgrade the older one"), "{error:#}");
    }
    Ok(())
}
