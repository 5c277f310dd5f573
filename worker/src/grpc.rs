//! The gRPC service: one long-lived stream per router, and the model's text assets.
//!
//! An invalid frame does not end the stream: its malformed steps are refused one by one. The service never
//! accesses the model; everything goes through the device thread's mailbox.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt};
use proto::convert::{reply_to_wire, step_from_wire};
use proto::frame::split_worker_frame;
use proto::v1;
use proto::v1::worker_server::Worker;
use proto::version::{PROTOCOL_VERSIONS, common_version};
use service::metrics::GaugeGuard;
use service::shutdown::Lifetime;
use speculation::{Refusal, Reply, ReplyBody, SequenceId};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::assets::Assets;
use crate::facts::WorkerFacts;
use crate::metrics::WorkerMetrics;
use crate::step_loop::{Mailbox, Message, REPLY_FRAMES, SentStep, StreamId};
use crate::table::RouterId;

/// Timeout for a router's hello.
const HELLO_WAIT: Duration = Duration::from_secs(10);

const ASSET_CHUNK_BYTES: usize = 256 << 10;

/// The gRPC service of a worker.
#[derive(Debug, Clone)]
pub struct WorkerService {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    facts: WorkerFacts,
    assets: Option<Assets>,
    mailbox: Mailbox,
    streams: AtomicU64,
    metrics: WorkerMetrics,
    lifetime: Lifetime,
}

type FrameStream = Pin<Box<dyn Stream<Item = Result<v1::WorkerFrame, Status>> + Send>>;
type ChunkStream = Pin<Box<dyn Stream<Item = Result<v1::AssetChunk, Status>> + Send>>;

impl WorkerService {
    /// Creates the service; it sends requests to the device thread through `mailbox`.
    pub fn new(
        facts: WorkerFacts,
        assets: Option<Assets>,
        mailbox: Mailbox,
        metrics: WorkerMetrics,
        lifetime: Lifetime,
    ) -> Self {
        Self {
            inner: Arc::new(Inner { facts, assets, mailbox, streams: AtomicU64::new(1), metrics, lifetime }),
        }
    }
}

#[tonic::async_trait]
impl Worker for WorkerService {
    type AttachStream = FrameStream;
    type FetchAssetStream = ChunkStream;

    async fn attach(
        &self,
        request: Request<Streaming<v1::RouterFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut frames = request.into_inner();
        let router = read_hello(&mut frames).await?;
        let inner = Arc::clone(&self.inner);
        let stream = StreamId(inner.streams.fetch_add(1, Ordering::Relaxed));
        let (replies, outgoing) = mpsc::channel(REPLY_FRAMES);
        let hello = v1::WorkerFrame {
            hello: Some(inner.facts.hello(inner.assets.as_ref())),
            ..v1::WorkerFrame::default()
        };
        replies.try_send(hello).map_err(|_| Status::internal("a new stream's queue is full"))?;
        let (newest, mut replaced) = oneshot::channel();
        let opened = Message::Opened { router, stream, replies: replies.clone(), newest };
        inner
            .mailbox
            .messages
            .send(opened)
            .await
            .map_err(|_| Status::unavailable("the worker is stopping"))?;
        let lifetime = self.inner.lifetime.clone();
        self.inner.lifetime.spawn("router stream", async move {
            let counted = GaugeGuard::new(inner.metrics.streams.clone());
            tokio::select! {
                biased;
                // A stopping worker reads no more steps.
                () = lifetime.cancelled() => {}
                // The router opened a newer stream, which carries all replies now; end this one so that the
                // router notices.
                _ = &mut replaced => tracing::info!(router = router.0, "the router opened a newer stream: this older one is closed"),
                () = inner.read_frames(frames, (router, stream), &replies) => {}
            }
            drop(counted);
            // If the device thread has ended, there is nothing to close.
            drop(inner.mailbox.messages.send(Message::Closed { router, stream }).await);
        });
        let lifetime = self.inner.lifetime.clone();
        let outgoing = ReceiverStream::new(outgoing)
            .flat_map(|frame| futures::stream::iter(split_worker_frame(frame)))
            .map(Ok)
            .take_until(async move { lifetime.cancelled().await });
        Ok(Response::new(Box::pin(outgoing)))
    }

    async fn fetch_asset(
        &self,
        request: Request<v1::FetchAssetRequest>,
    ) -> Result<Response<Self::FetchAssetStream>, Status> {
        let name = request.into_inner().name;
        let bytes = self.inner.assets.as_ref().and_then(|assets| assets.get(&name)).ok_or_else(|| {
            Status::not_found(format!(
                "this worker has no asset `{name}`; its hello lists the available ones"
            ))
        })?;
        let chunks = (0..bytes.len())
            .step_by(ASSET_CHUNK_BYTES)
            .map(move |at| bytes.slice(at..bytes.len().min(at + ASSET_CHUNK_BYTES)))
            .map(|data| Ok(v1::AssetChunk { data }));
        Ok(Response::new(Box::pin(futures::stream::iter(chunks))))
    }
}

impl Inner {
    /// Forwards frames to the device thread until the router disconnects.
    async fn read_frames(
        &self,
        mut frames: Streaming<v1::RouterFrame>,
        (router, stream): (RouterId, StreamId),
        replies: &mpsc::Sender<v1::WorkerFrame>,
    ) {
        loop {
            let frame = match frames.message().await {
                Ok(Some(frame)) => frame,
                Ok(None) => return,
                Err(status) => {
                    tracing::info!(router = router.0, %status, "the stream of a router failed: its sequences are closed");
                    return;
                }
            };
            let received = self.mailbox.read_delay.arrival();
            let (steps, refused) = self.read_steps(frame.steps);
            if !refused.is_empty() {
                self.metrics.malformed.inc_by(refused.len() as u64);
                let frame = v1::WorkerFrame { replies: refused, ..v1::WorkerFrame::default() };
                // If the router does not read, the reply is dropped and the router asks again.
                drop(replies.try_send(frame));
            }
            let closes =
                frame.closes.iter().map(|close| (SequenceId(close.sequence_id), close.epoch)).collect();
            let message = Message::Frame { router, stream, steps, closes, received };
            if self.mailbox.messages.send(message).await.is_err() {
                return;
            }
        }
    }

    fn read_steps(&self, wire: Vec<v1::Step>) -> (Vec<SentStep>, Vec<v1::Reply>) {
        let mut steps = Vec::with_capacity(wire.len());
        let mut refused = Vec::new();
        for step in wire {
            let (sequence_id, epoch, step_seq) = (SequenceId(step.sequence_id), step.epoch, step.step_seq);
            let span_id = step.span_id;
            match step_from_wire(step, self.facts.role) {
                Ok(step) => steps.push(SentStep { step, span_id }),
                Err(error) => {
                    let body = ReplyBody::Refused(Refusal::failure(error.to_string()));
                    refused.push(reply_to_wire(&Reply {
                        sequence_id,
                        epoch,
                        step_seq,
                        body,
                        agreed: Vec::new(),
                        num_cached: 0,
                        num_ahead: 0,
                    }));
                }
            }
        }
        (steps, refused)
    }
}

async fn read_hello(frames: &mut Streaming<v1::RouterFrame>) -> Result<RouterId, Status> {
    let first = tokio::time::timeout(HELLO_WAIT, frames.message())
        .await
        .map_err(|_| Status::deadline_exceeded(format!("no hello within {HELLO_WAIT:?}")))??;
    let hello = first
        .and_then(|frame| frame.hello)
        .ok_or_else(|| Status::invalid_argument("the first frame of a stream must carry a hello"))?;
    let theirs = hello.protocol_version_min..=hello.protocol_version_max;
    let version = common_version(&PROTOCOL_VERSIONS, &theirs).ok_or_else(|| {
        Status::failed_precondition(format!(
            "the router supports protocol versions {theirs:?}, this worker {PROTOCOL_VERSIONS:?}: upgrade the older one"
        ))
    })?;
    tracing::debug!(router = hello.router_id, version, "a router connected");
    Ok(RouterId(hello.router_id))
}
