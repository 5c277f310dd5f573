//! A hostile target that speaks the real wire protocol, with one kind of misbehaviour per instance. It acts
//! as a proxy of an honest target and corrupts its replies. No token of any text may change, and every
//! request must end while an honest target is running.
//!
//! It cannot imitate a target that draws other tokens in well-formed spans: the target's own draw is the text
//! (invariant I1).

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use clap::ValueEnum;
use futures::Stream;
use proto::v1;
use proto::v1::reply::Body;
use proto::v1::worker_client::WorkerClient;
use proto::v1::worker_server::Worker;
use service::shutdown::Lifetime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

/// Capacity of the queue in each direction.
const QUEUE_FRAMES: usize = 64;

/// How a hostile target changes an honest one's replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TargetMisbehaviour {
    /// Spans start one token later.
    WrongStart,
    /// Spans end with an id outside the vocabulary.
    OutOfVocabulary,
    /// Spans are longer than requested.
    TooLong,
    /// Spans report more accepted tokens than they contain.
    WrongAccepted,
    /// A verification is answered with the reply that the context is cached.
    Fed,
    /// Every reply requests the context, regardless of what was sent.
    NeedsContext,
    /// Every sequence is refused.
    Refuses,
    /// Every sequence is reported as preempted.
    Preempts,
    /// Replies have no body.
    NoBody,
    /// Replies are for an unknown sequence.
    UnknownSequence,
    /// Replies have the sequence number of the previous step.
    StaleStepSeq,
    /// Replies are sent three times.
    Repeated,
    /// There are no replies.
    Silent,
    /// Replies are honest, but report a time of 584,942 years.
    HugeTimings,
    /// Its profiled step times, window and pool have the largest possible numbers.
    HugeHello,
    /// Replies are honest, but routers may reserve nothing.
    NoCredits,
    /// Replies contain prompt scores at the highest possible position.
    HugeScores,
    /// Spans end the sequence although its text goes on.
    EndsEarly,
}

impl TargetMisbehaviour {
    /// All kinds.
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }
}

/// The worker.
#[derive(Debug)]
pub struct HostileTarget {
    honest: WorkerClient<Channel>,
    misbehaviour: TargetMisbehaviour,
    num_misbehaviours: Arc<AtomicU64>,
    lifetime: Lifetime,
}

impl HostileTarget {
    /// Creates a worker of this kind in front of the honest target at `url`; `num_misbehaviours` counts the
    /// corrupted frames. Its tasks run under `lifetime`.
    pub async fn connect(
        url: &str,
        misbehaviour: TargetMisbehaviour,
        num_misbehaviours: Arc<AtomicU64>,
        lifetime: Lifetime,
    ) -> anyhow::Result<Self> {
        let honest = WorkerClient::connect(url.to_owned()).await;
        let honest = honest.with_context(|| format!("no honest target answers at {url}"))?;
        let honest = honest.max_decoding_message_size(4 * proto::MAX_FRAME_BYTES);
        Ok(Self { honest, misbehaviour, num_misbehaviours, lifetime })
    }
}

type FrameStream = Pin<Box<dyn Stream<Item = Result<v1::WorkerFrame, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for HostileTarget {
    type AttachStream = FrameStream;
    type FetchAssetStream = Streaming<v1::AssetChunk>;

    async fn attach(
        &self,
        request: Request<Streaming<v1::RouterFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut from_router = request.into_inner();
        let (to_honest, outgoing) = mpsc::channel(QUEUE_FRAMES);
        let hello = from_router.message().await?;
        let hello = hello.ok_or_else(|| Status::invalid_argument("the first frame must be a hello"))?;
        to_honest.try_send(hello).map_err(|_| Status::internal("a new queue is full"))?;
        let mut from_honest = self.honest.clone().attach(ReceiverStream::new(outgoing)).await?.into_inner();
        let (to_router, replies) = mpsc::channel(QUEUE_FRAMES);
        let (misbehaviour, num_misbehaviours) = (self.misbehaviour, Arc::clone(&self.num_misbehaviours));
        let cancelled = self.lifetime.cancelled();
        self.lifetime.spawn("hostile target", async move {
            let asked = async {
                while let Ok(Some(frame)) = from_router.message().await {
                    if to_honest.send(frame).await.is_err() {
                        return;
                    }
                }
            };
            let answered = async {
                while let Ok(Some(frame)) = from_honest.message().await {
                    if !frame.replies.is_empty() {
                        num_misbehaviours.fetch_add(1, Ordering::Relaxed);
                    }
                    if to_router.send(Ok(corrupt(misbehaviour, frame))).await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                biased;
                // The fault is over.
                () = cancelled => {}
                // Either side is closed.
                () = asked => {}
                () = answered => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }

    async fn fetch_asset(
        &self,
        request: Request<v1::FetchAssetRequest>,
    ) -> Result<Response<Self::FetchAssetStream>, Status> {
        self.honest.clone().fetch_asset(request.into_inner()).await
    }
}

/// Corrupts an honest frame.
fn corrupt(misbehaviour: TargetMisbehaviour, frame: v1::WorkerFrame) -> v1::WorkerFrame {
    let v1::WorkerFrame { hello, replies, mut preempted, credits, timing, draining, ahead } = frame;
    let credits =
        if misbehaviour == TargetMisbehaviour::NoCredits { Some(v1::Credits { blocks: 0 }) } else { credits };
    let timing =
        if misbehaviour == TargetMisbehaviour::HugeTimings { timing.map(|_| huge_timing()) } else { timing };
    let hello = match misbehaviour {
        TargetMisbehaviour::HugeHello => hello.map(huge_hello),
        _ => hello,
    };
    let replies = match misbehaviour {
        TargetMisbehaviour::Silent => Vec::new(),
        TargetMisbehaviour::Preempts => {
            preempted.extend(
                replies
                    .iter()
                    .map(|reply| v1::Preempted { sequence_id: reply.sequence_id, epoch: reply.epoch }),
            );
            Vec::new()
        }
        TargetMisbehaviour::Repeated => replies.iter().flat_map(|reply| [reply; 3]).cloned().collect(),
        _ => replies.into_iter().map(|reply| corrupt_reply(misbehaviour, reply)).collect(),
    };
    v1::WorkerFrame { hello, replies, preempted, credits, timing, draining, ahead }
}

fn corrupt_reply(misbehaviour: TargetMisbehaviour, mut reply: v1::Reply) -> v1::Reply {
    match misbehaviour {
        TargetMisbehaviour::NeedsContext => {
            reply.body = Some(Body::NeedContext(v1::NeedContext { cached_len: u32::MAX, has_spec: true }));
        }
        TargetMisbehaviour::Refuses => {
            reply.body = Some(Body::Refused(v1::Refused { reason: "not in the mood".to_owned(), cause: 0 }));
        }
        TargetMisbehaviour::NoBody => reply.body = None,
        TargetMisbehaviour::UnknownSequence => reply.sequence_id = u64::MAX,
        TargetMisbehaviour::StaleStepSeq => reply.step_seq = reply.step_seq.saturating_sub(1),
        TargetMisbehaviour::HugeScores => match &mut reply.body {
            Some(Body::Fed(fed)) => fed.prompt_logprobs = Some(huge_scores()),
            Some(Body::Span(span)) => span.prompt_logprobs = Some(huge_scores()),
            _ => {}
        },
        TargetMisbehaviour::Fed => {
            if let Some(Body::Span(span)) = &reply.body {
                reply.body = Some(Body::Fed(v1::Fed { cached_len: span.start, prompt_logprobs: None }));
            }
        }
        _ => {
            if let Some(Body::Span(span)) = &mut reply.body {
                corrupt_span(misbehaviour, span);
            }
        }
    }
    reply
}

fn corrupt_span(misbehaviour: TargetMisbehaviour, span: &mut v1::TokenSpan) {
    match misbehaviour {
        TargetMisbehaviour::WrongStart => span.start += 1,
        TargetMisbehaviour::OutOfVocabulary => {
            if let Some(last) = span.token_ids.last_mut() {
                *last = u32::MAX;
            }
        }
        TargetMisbehaviour::TooLong => span.token_ids.extend([1, 2, 3]),
        TargetMisbehaviour::WrongAccepted => span.num_accepted = u32::MAX,
        TargetMisbehaviour::EndsEarly => span.finish = v1::FinishReason::Stop.into(),
        _ => {}
    }
}

fn huge_timing() -> v1::StepTiming {
    v1::StepTiming {
        rows: u32::MAX,
        prefill_rows: u32::MAX,
        kv_tokens: u64::MAX,
        queue_us: u64::MAX,
        compute_us: u64::MAX,
        sequences: u32::MAX,
    }
}

fn huge_hello(hello: v1::WorkerHello) -> v1::WorkerHello {
    let point = |kv_tokens, micros| v1::StepTimePoint { rows: 1, kv_tokens, micros };
    let batch =
        |sequences, rows| v1::BatchTimePoint { sequences, rows, kv_tokens: u64::MAX, micros: u64::MAX };
    v1::WorkerHello {
        max_draft_tokens: u32::MAX,
        max_model_len: u32::MAX,
        kv_blocks: u64::MAX,
        kv_block_size: 0,
        step_times: vec![point(0, 1), point(1, u64::MAX)],
        batch_times: vec![batch(0, 0), batch(1, 1), batch(u32::MAX, 1), batch(u32::MAX, u32::MAX)],
        cpu: Some(v1::CpuShare { host_id: String::new(), cores: vec![0, u32::MAX], threads: u32::MAX }),
        ..hello
    }
}

fn huge_scores() -> v1::PromptLogprobs {
    v1::PromptLogprobs { start: u32::MAX, entries: vec![v1::TokenLogprobs::default(); 2] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn honest_frame() -> v1::WorkerFrame {
        let span =
            v1::TokenSpan { start: 7, num_accepted: 1, token_ids: vec![5, 6], ..v1::TokenSpan::default() };
        let reply = v1::Reply {
            sequence_id: 1,
            epoch: 1,
            step_seq: 9,
            body: Some(Body::Span(span)),
            ..v1::Reply::default()
        };
        v1::WorkerFrame {
            hello: Some(v1::WorkerHello::default()),
            replies: vec![reply],
            timing: Some(v1::StepTiming::default()),
            ..v1::WorkerFrame::default()
        }
    }

    #[test]
    fn every_misbehaviour_corrupts_a_frame() {
        for &misbehaviour in TargetMisbehaviour::all() {
            assert_ne!(corrupt(misbehaviour, honest_frame()), honest_frame(), "{misbehaviour:?}");
        }
    }
}
