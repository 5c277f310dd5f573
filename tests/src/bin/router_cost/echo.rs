//! The bare peer of `latency` and of [`crate::relay`]: a tonic server that answers each frame of steps,
//! immediately or after a delay, with a frame of replies as large as those of real workers, and the client
//! that times its answers. There is no sequence table, no device thread, no router: only gRPC over loopback
//! between two processes remains.

use std::pin::Pin;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::{Stream, StreamExt as _};
use proto::v1;
use proto::v1::worker_client::WorkerClient;
use proto::v1::worker_server::{Worker, WorkerServer};
use service::process::stdin_closed;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

use crate::helper::Helper;

/// Number of ids that a verification of four drafted ids commits in these frames.
pub(crate) const SPAN_IDS: usize = 4;

/// The id used in all frames, from a large vocabulary.
const ID: u32 = 100_000;

struct EchoService {
    /// Processing time per frame; frames are processed one after the other.
    delay: Duration,
}

type Frames = Pin<Box<dyn Stream<Item = Result<v1::WorkerFrame, Status>> + Send>>;
type Chunks = Pin<Box<dyn Stream<Item = Result<v1::AssetChunk, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for EchoService {
    type AttachStream = Frames;
    type FetchAssetStream = Chunks;

    async fn attach(
        &self,
        request: Request<Streaming<v1::RouterFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let delay = self.delay;
        let frames = request.into_inner().then(move |frame| async move {
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            frame.map(|frame| answer(&frame))
        });
        Ok(Response::new(Box::pin(frames)))
    }

    async fn fetch_asset(
        &self,
        _: Request<v1::FetchAssetRequest>,
    ) -> Result<Response<Self::FetchAssetStream>, Status> {
        Err(Status::not_found("an echo has no assets"))
    }
}

/// Serves until the process that started it ends.
pub(crate) async fn serve(delay: Duration) -> anyhow::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}", listener.local_addr()?);
    let server = Server::builder().add_service(WorkerServer::new(EchoService { delay }));
    tokio::select! {
        served = server.serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true))) => Ok(served?),
        () = stdin_closed() => Ok(()),
    }
}

/// An echo process and a stream to it.
pub(crate) struct Echo {
    process: Helper,
    outbox: mpsc::Sender<v1::RouterFrame>,
    frames: Streaming<v1::WorkerFrame>,
}

impl Echo {
    /// Starts the process and connects as a router does.
    pub(crate) async fn start(delay: Duration) -> anyhow::Result<Self> {
        let arguments = ["echo", "--delay-us", &delay.as_micros().to_string()].map(str::to_owned);
        let process = Helper::start(&arguments).await?;
        let channel = Endpoint::from_shared(process.url.clone())?.tcp_nodelay(true).connect().await?;
        let (outbox, outgoing) = mpsc::channel(64);
        outbox.try_send(v1::RouterFrame::default())?;
        let attached = WorkerClient::new(channel).attach(ReceiverStream::new(outgoing)).await;
        let mut frames = attached?.into_inner();
        frames.message().await?.context("the echo closed the stream")?;
        Ok(Self { process, outbox, frames })
    }

    /// Mean round-trip time, microseconds, of a draft worker's frames and of a target's, with `sequences`
    /// each; waits for `pause` before each.
    pub(crate) async fn round_trips(
        &mut self,
        sequences: u64,
        (count, pause): (u32, Duration),
    ) -> anyhow::Result<[f64; 2]> {
        let mut sums = [Duration::ZERO; 2];
        for _ in 0..count {
            for (sum, drafted) in sums.iter_mut().zip([0, SPAN_IDS]) {
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
                let start = Instant::now();
                self.send(sequences, drafted).await?;
                self.receive().await?;
                *sum += start.elapsed();
            }
        }
        Ok(sums.map(|sum| sum.as_secs_f64() * 1e6 / f64::from(count)))
    }

    /// Sends a frame of `sequences` steps: to a target with `drafted` ids each, to a draft worker with none.
    pub(crate) async fn send(&mut self, sequences: u64, drafted: usize) -> anyhow::Result<()> {
        let steps = (0..sequences).map(|id| step(id, drafted)).collect();
        Ok(self.outbox.send(v1::RouterFrame { steps, ..v1::RouterFrame::default() }).await?)
    }

    /// Waits for the next answer.
    ///
    /// Cancel safety: no answer is lost when the future is dropped.
    pub(crate) async fn receive(&mut self) -> anyhow::Result<()> {
        self.frames.message().await?.context("the echo closed the stream")?;
        Ok(())
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.process.stop().await
    }
}

/// A step in mid-stream: to a target with `drafted` ids, or to a draft worker with none.
fn step(sequence_id: u64, drafted: usize) -> v1::Step {
    v1::Step {
        sequence_id: 1_000 + sequence_id,
        epoch: 1,
        step_seq: 1_000,
        base_len: 500,
        prefix_hash: u64::MAX / 3,
        append_ids: vec![ID; if drafted > 0 { 1 } else { 2 }],
        draw: true,
        num_draft_tokens: if drafted > 0 { 0 } else { SPAN_IDS as u32 },
        draft_token_ids: vec![ID; drafted],
        ..v1::Step::default()
    }
}

fn answer(frame: &v1::RouterFrame) -> v1::WorkerFrame {
    let replies = frame.steps.iter().map(|step| v1::Reply {
        sequence_id: step.sequence_id,
        epoch: step.epoch,
        step_seq: step.step_seq,
        body: Some(match step.draft_token_ids.is_empty() {
            true => v1::reply::Body::Proposal(v1::Proposal {
                start: step.base_len,
                draft_token_ids: vec![ID; SPAN_IDS],
                ..v1::Proposal::default()
            }),
            false => v1::reply::Body::Span(v1::TokenSpan {
                start: step.base_len,
                num_accepted: SPAN_IDS as u32 - 1,
                token_ids: vec![ID; SPAN_IDS],
                ..v1::TokenSpan::default()
            }),
        }),
        ..v1::Reply::default()
    });
    let timing = v1::StepTiming {
        rows: 80,
        sequences: 16,
        kv_tokens: 8_000,
        queue_us: 100,
        compute_us: 1_000,
        ..v1::StepTiming::default()
    };
    v1::WorkerFrame { replies: replies.collect(), timing: Some(timing), ..v1::WorkerFrame::default() }
}
