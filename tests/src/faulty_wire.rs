//! A wire between router and worker that drops, duplicates, delays and reorders frames in both directions, by
//! a seed. It forwards everything else unchanged: the handshake, assets, and the end of either side.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{Stream, StreamExt as _};
use proto::v1;
use proto::v1::worker_client::WorkerClient;
use proto::v1::worker_server::Worker;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use service::shutdown::Lifetime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

/// Capacity of the queue in each direction.
const QUEUE_FRAMES: usize = 64;

/// Probabilities of the faults of a frame; the remaining frames pass.
#[derive(Debug, Clone, Copy, Default)]
pub struct WireFaults {
    /// Seed that decides which frames are affected.
    pub seed: u64,
    /// Share of frames that are dropped.
    pub dropped: f64,
    /// Share of frames that are duplicated.
    pub duplicated: f64,
    /// Share of frames that are delayed, so that later ones overtake them.
    pub delayed: f64,
    /// Maximum delay.
    pub max_delay: Duration,
    /// Latency added to every frame, without changing their order.
    pub latency: Duration,
}

/// Counters of frames.
#[derive(Debug, Default)]
pub struct FrameCounts {
    /// Forwarded once, without delay.
    pub delivered: AtomicU64,
    /// Dropped.
    pub dropped: AtomicU64,
    /// Forwarded twice.
    pub duplicated: AtomicU64,
    /// Delayed.
    pub delayed: AtomicU64,
    /// Forwarded before a frame that was sent earlier.
    pub reordered: AtomicU64,
}

/// The wire; for a router it looks like the worker behind it.
#[derive(Debug)]
pub struct FaultyWire {
    worker: WorkerClient<Channel>,
    faults: WireFaults,
    frame_counts: Arc<FrameCounts>,
    lifetime: Lifetime,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FrameFault {
    Deliver,
    Drop,
    Duplicate,
    Delay(Duration),
}

impl FaultyWire {
    /// Creates a wire to the worker at `url`.
    pub async fn connect(url: &str, faults: WireFaults, lifetime: Lifetime) -> anyhow::Result<Self> {
        let worker = WorkerClient::connect(url.to_owned()).await?;
        let worker = worker.max_decoding_message_size(4 * proto::MAX_FRAME_BYTES);
        Ok(Self { worker, faults, frame_counts: Arc::default(), lifetime })
    }

    /// The frame counters.
    pub fn frame_counts(&self) -> Arc<FrameCounts> {
        Arc::clone(&self.frame_counts)
    }

    fn forward<F: Clone + Send + 'static, T: Send + 'static>(
        &self,
        from: Streaming<F>,
        to: mpsc::Sender<T>,
        (wrap, salt): (fn(F) -> T, u64),
    ) {
        let direction = Direction {
            faults: self.faults,
            rng: StdRng::seed_from_u64(self.faults.seed ^ salt),
            frame_counts: Arc::clone(&self.frame_counts),
        };
        let cancelled = self.lifetime.cancelled();
        self.lifetime.spawn("faulty wire", async move {
            tokio::select! {
                biased;
                // The wire is closed.
                () = cancelled => {}
                () = direction.forward(from, to, wrap) => {}
            }
        });
    }
}

type FrameStream = Pin<Box<dyn Stream<Item = Result<v1::WorkerFrame, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for FaultyWire {
    type AttachStream = FrameStream;
    type FetchAssetStream = Streaming<v1::AssetChunk>;

    async fn attach(
        &self,
        request: Request<Streaming<v1::RouterFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut from_router = request.into_inner();
        let (to_worker, outgoing) = mpsc::channel(QUEUE_FRAMES);
        let (to_router, replies) = mpsc::channel(QUEUE_FRAMES);
        let no_hello = || Status::invalid_argument("the first frame must be a hello");
        let hello = from_router.message().await?.ok_or_else(no_hello)?;
        to_worker.try_send(hello).map_err(|_| Status::internal("a new queue is full"))?;
        let mut from_worker = self.worker.clone().attach(ReceiverStream::new(outgoing)).await?.into_inner();
        let hello = from_worker.message().await?.ok_or_else(no_hello)?;
        to_router.try_send(Ok(hello)).map_err(|_| Status::internal("a new queue is full"))?;
        self.forward(from_router, to_worker, (|frame| frame, 0));
        self.forward(from_worker, to_router, (Ok, 1));
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }

    async fn fetch_asset(
        &self,
        request: Request<v1::FetchAssetRequest>,
    ) -> Result<Response<Self::FetchAssetStream>, Status> {
        self.worker.clone().fetch_asset(request.into_inner()).await
    }
}

/// One direction of one stream.
struct Direction {
    faults: WireFaults,
    rng: StdRng,
    frame_counts: Arc<FrameCounts>,
}

impl Direction {
    /// Forwards frames until either side is closed.
    async fn forward<F: Clone, T>(mut self, mut from: Streaming<F>, to: mpsc::Sender<T>, wrap: fn(F) -> T) {
        let mut delayed = FuturesUnordered::new();
        loop {
            let (frame, times) = tokio::select! {
                biased;
                // A delayed frame is due.
                Some(frame) = delayed.next(), if !delayed.is_empty() => (frame, 1),
                // A new frame arrives; a broken side ends the wire like a closed one.
                frame = from.message() => {
                    let Ok(Some(frame)) = frame else { return };
                    match self.fault() {
                        FrameFault::Deliver => (frame, 1),
                        FrameFault::Duplicate => (frame, 2),
                        FrameFault::Drop => continue,
                        FrameFault::Delay(time) => {
                            delayed.push(async move {
                                tokio::time::sleep(time).await;
                                frame
                            });
                            continue;
                        }
                    }
                }
            };
            if !delayed.is_empty() {
                self.frame_counts.reordered.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(self.faults.latency).await;
            for _ in 0..times {
                if to.send(wrap(frame.clone())).await.is_err() {
                    return;
                }
            }
        }
    }

    fn fault(&mut self) -> FrameFault {
        let WireFaults { dropped, duplicated, delayed, max_delay, .. } = self.faults;
        let drawn = self.rng.random_range(0.0..1.0);
        let (fault, counter) = if drawn < dropped {
            (FrameFault::Drop, &self.frame_counts.dropped)
        } else if drawn < dropped + duplicated {
            (FrameFault::Duplicate, &self.frame_counts.duplicated)
        } else if drawn < dropped + duplicated + delayed {
            let time = max_delay.mul_f64(self.rng.random_range(0.0..1.0));
            (FrameFault::Delay(time), &self.frame_counts.delayed)
        } else {
            (FrameFault::Deliver, &self.frame_counts.delivered)
        };
        counter.fetch_add(1, Ordering::Relaxed);
        fault
    }
}
