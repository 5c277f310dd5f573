//! A hostile draft worker that speaks the real wire protocol, with one kind of misbehaviour per instance.
//! Whatever it does, no token of any text may change, and every request must end.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures::{Stream, StreamExt as _};
use proto::SAMPLING_SCHEME;
use proto::v1;
use proto::v1::reply::Body;
use proto::v1::worker_server::Worker;
use proto::version::PROTOCOL_VERSIONS;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use service::shutdown::Lifetime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Capacity of the queue of frames to the router.
const QUEUE_FRAMES: usize = 64;

/// Answer of a hostile draft worker to a request for k ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftMisbehaviour {
    /// k random ids.
    RandomIds,
    /// More than k ids.
    TooMany,
    /// No id, or one: allowed, but useless.
    TooFew,
    /// One valid id, followed by ids outside the vocabulary.
    OutOfRange,
    /// A tree whose ids have parents that come later, or that do not exist.
    BrokenTree,
    /// A proposal for another position.
    WrongStart,
    /// A reply with the sequence number of the previous step.
    StaleStepSeq,
    /// A reply with the epoch of an earlier assignment.
    StaleEpoch,
    /// A reply for an unknown sequence.
    UnknownSequence,
    /// Each reply three times.
    Repeated,
    /// k random ids, then more proposals drafted ahead than there are outcomes, half of them with ids outside
    /// the vocabulary.
    FloodsAhead,
    /// No reply.
    Silence,
    /// A reply without a body.
    NoBody,
    /// A reply that the context is cached, as after a step without a draw.
    Fed,
    /// A request for the context, regardless of what was sent.
    NeedsContext,
    /// A span, as from a target.
    Span,
    /// A report that it preempted the sequence.
    Preempts,
    /// A refusal of the sequence.
    Refuses,
}

impl DraftMisbehaviour {
    /// All kinds.
    pub const ALL: [Self; 18] = [
        Self::RandomIds,
        Self::TooMany,
        Self::TooFew,
        Self::OutOfRange,
        Self::BrokenTree,
        Self::WrongStart,
        Self::StaleStepSeq,
        Self::StaleEpoch,
        Self::UnknownSequence,
        Self::Repeated,
        Self::FloodsAhead,
        Self::Silence,
        Self::NoBody,
        Self::Fed,
        Self::NeedsContext,
        Self::Span,
        Self::Preempts,
        Self::Refuses,
    ];

    /// The reason under which the router counts the reply as ignored, if it must.
    pub fn counted_as(self) -> Option<&'static str> {
        match self {
            Self::TooMany
            | Self::OutOfRange
            | Self::BrokenTree
            | Self::WrongStart
            | Self::FloodsAhead
            | Self::Fed
            | Self::Span => Some("malformed_reply"),
            Self::StaleStepSeq | Self::StaleEpoch | Self::Repeated => Some("stale_reply"),
            Self::UnknownSequence | Self::Silence | Self::NoBody => Some("late_draft"),
            Self::RandomIds | Self::TooFew | Self::NeedsContext | Self::Preempts | Self::Refuses => None,
        }
    }

    /// Whether some of its ids are verified by the target.
    pub fn is_verified(self) -> bool {
        matches!(self, Self::RandomIds | Self::TooFew | Self::OutOfRange | Self::Repeated | Self::FloodsAhead)
    }
}

/// The worker.
#[derive(Debug)]
pub struct HostileDraft {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    misbehaviour: DraftMisbehaviour,
    vocab_size: u32,
    rng: Mutex<StdRng>,
    num_misbehaviours: Arc<AtomicU64>,
    lifetime: Lifetime,
}

impl HostileDraft {
    /// Creates a worker of this kind; `num_misbehaviours` counts its hostile replies.
    pub fn new(
        misbehaviour: DraftMisbehaviour,
        vocab_size: u32,
        num_misbehaviours: Arc<AtomicU64>,
        lifetime: Lifetime,
    ) -> Self {
        let rng = Mutex::new(StdRng::seed_from_u64(misbehaviour as u64));
        Self { inner: Arc::new(Inner { misbehaviour, vocab_size, rng, num_misbehaviours, lifetime }) }
    }
}

type FrameStream = Pin<Box<dyn Stream<Item = Result<v1::WorkerFrame, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for HostileDraft {
    type AttachStream = FrameStream;
    type FetchAssetStream = futures::stream::Empty<Result<v1::AssetChunk, Status>>;

    async fn attach(
        &self,
        request: Request<Streaming<v1::RouterFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut frames = request.into_inner();
        let (replies, outgoing) = mpsc::channel(QUEUE_FRAMES);
        let hello = v1::WorkerFrame { hello: Some(hello()), ..v1::WorkerFrame::default() };
        replies.try_send(hello).map_err(|_| Status::internal("a new queue is full"))?;
        let inner = Arc::clone(&self.inner);
        let cancelled = inner.lifetime.cancelled();
        self.inner.lifetime.spawn("hostile draft", async move {
            let answering = async {
                while let Ok(Some(frame)) = frames.message().await {
                    if replies.send(inner.answer(frame)).await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                biased;
                // The cluster is stopping.
                () = cancelled => {}
                () = answering => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing).map(Ok))))
    }

    async fn fetch_asset(
        &self,
        _request: Request<v1::FetchAssetRequest>,
    ) -> Result<Response<Self::FetchAssetStream>, Status> {
        Err(Status::not_found("a hostile draft has no assets"))
    }
}

/// A handshake that can be paired with any target.
fn hello() -> v1::WorkerHello {
    v1::WorkerHello {
        protocol_version_min: *PROTOCOL_VERSIONS.start(),
        protocol_version_max: *PROTOCOL_VERSIONS.end(),
        role: v1::WorkerRole::Draft.into(),
        model_id: "hostile".to_owned(),
        sampling_scheme: SAMPLING_SCHEME.to_owned(),
        max_draft_tokens: 32,
        max_model_len: u32::MAX,
        ..v1::WorkerHello::default()
    }
}

impl Inner {
    fn answer(&self, frame: v1::RouterFrame) -> v1::WorkerFrame {
        let mut answer = v1::WorkerFrame::default();
        for step in frame.steps {
            if step.draw {
                self.num_misbehaviours.fetch_add(1, Ordering::Relaxed);
                self.misbehave(&step, &mut answer);
            } else {
                let cached_len = start_of(&step);
                answer.replies.push(reply(&step, Body::Fed(v1::Fed { cached_len, prompt_logprobs: None })));
            }
        }
        answer
    }

    fn misbehave(&self, step: &v1::Step, answer: &mut v1::WorkerFrame) {
        let k = step.num_draft_tokens as usize;
        let start = start_of(step);
        let proposal_reply = |ids| reply(step, Body::Proposal(proposal(start, ids)));
        let replies = match self.misbehaviour {
            DraftMisbehaviour::RandomIds => vec![proposal_reply(self.random_ids(k))],
            DraftMisbehaviour::TooMany => vec![proposal_reply(self.random_ids(k + 3))],
            // Alternating. The step number would not do: if a draft's first steps have even numbers, the lane
            // gives up before one is odd.
            DraftMisbehaviour::TooFew => {
                vec![proposal_reply(
                    self.random_ids(self.num_misbehaviours.load(Ordering::Relaxed) as usize % 2),
                )]
            }
            DraftMisbehaviour::OutOfRange => {
                let beyond = [self.vocab_size, self.vocab_size + 7, u32::MAX];
                vec![proposal_reply(self.random_ids(1).into_iter().chain(beyond).take(k).collect())]
            }
            DraftMisbehaviour::BrokenTree => {
                let parents = (0..k as u32).rev().map(|parent| parent.wrapping_mul(0x1_0001)).collect();
                let parents = if k == 1 { vec![u32::MAX] } else { parents };
                let broken = v1::Proposal { parents, ..proposal(start, self.random_ids(k)) };
                vec![reply(step, Body::Proposal(broken))]
            }
            DraftMisbehaviour::WrongStart => {
                vec![reply(step, Body::Proposal(proposal(start + 1, self.random_ids(k))))]
            }
            DraftMisbehaviour::StaleStepSeq => {
                vec![v1::Reply { step_seq: step.step_seq - 1, ..proposal_reply(self.random_ids(k)) }]
            }
            DraftMisbehaviour::StaleEpoch => {
                vec![v1::Reply { epoch: step.epoch - 1, ..proposal_reply(self.random_ids(k)) }]
            }
            DraftMisbehaviour::UnknownSequence => {
                vec![v1::Reply { sequence_id: u64::MAX, ..proposal_reply(self.random_ids(k)) }]
            }
            DraftMisbehaviour::Repeated => vec![proposal_reply(self.random_ids(k)); 3],
            DraftMisbehaviour::FloodsAhead => {
                answer.ahead.extend((0..200).map(|number| self.ahead(step, number)));
                vec![proposal_reply(self.random_ids(k))]
            }
            DraftMisbehaviour::Silence => Vec::new(),
            DraftMisbehaviour::NoBody => vec![v1::Reply { body: None, ..proposal_reply(Vec::new()) }],
            DraftMisbehaviour::Fed => {
                vec![reply(step, Body::Fed(v1::Fed { cached_len: start, prompt_logprobs: None }))]
            }
            DraftMisbehaviour::NeedsContext => {
                let need = v1::NeedContext { cached_len: u32::MAX, has_spec: true };
                vec![reply(step, Body::NeedContext(need))]
            }
            DraftMisbehaviour::Span => {
                let token_ids = self.random_ids(1);
                vec![reply(step, Body::Span(v1::TokenSpan { start, token_ids, ..v1::TokenSpan::default() }))]
            }
            DraftMisbehaviour::Preempts => {
                let preempted = v1::Preempted { sequence_id: step.sequence_id, epoch: step.epoch };
                answer.preempted.push(preempted);
                Vec::new()
            }
            DraftMisbehaviour::Refuses => {
                vec![reply(
                    step,
                    Body::Refused(v1::Refused { reason: "not in the mood".to_owned(), cause: 0 }),
                )]
            }
        };
        answer.replies.extend(replies);
    }

    /// Every second one has an id outside the vocabulary.
    fn ahead(&self, step: &v1::Step, number: u32) -> v1::ProposalAhead {
        v1::ProposalAhead {
            sequence_id: step.sequence_id,
            epoch: step.epoch,
            step_seq: step.step_seq,
            committed_ids: self.random_ids(number as usize % 3),
            draft_token_ids: vec![number, self.vocab_size * (number % 2)],
            parents: Vec::new(),
        }
    }

    fn random_ids(&self, count: usize) -> Vec<u32> {
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        (0..count).map(|_| rng.random_range(0..self.vocab_size)).collect()
    }
}

fn start_of(step: &v1::Step) -> u32 {
    step.base_len + step.append_ids.len() as u32
}

fn proposal(start: u32, draft_token_ids: Vec<u32>) -> v1::Proposal {
    v1::Proposal { start, draft_token_ids, ..v1::Proposal::default() }
}

fn reply(step: &v1::Step, body: Body) -> v1::Reply {
    v1::Reply {
        sequence_id: step.sequence_id,
        epoch: step.epoch,
        step_seq: step.step_seq,
        body: Some(body),
        ..v1::Reply::default()
    }
}
