//! The seam between text and scheduling: a tokenized, checked request goes in, committed token ids come out.
//!
//! What stands before it (API, admission, tokenize) knows text and no workers; what stands behind it (the
//! scheduler) knows ids and no text. The scheduler's driver writes through a [`GenerationSink`] and never waits for a
//! client: the channel is bounded, and a client that leaves [`MAX_UNREAD_EVENTS_PER_CHOICE`] events unread loses its
//! request. Must never hold text, sockets or anything of HTTP and gRPC.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use async_trait::async_trait;
use scheduling::scheduler::SchedulerReport;
pub use scheduling::scheduler::events::SpeculationUsage;
pub use scheduling::scheduler::policy::SpeculationRequest;
use smallvec::SmallVec;
use speculation::step::PromptLogprobs;
use speculation::{FinishReason, SequenceSpec, TokenId, TokenLogprobs};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::error::RouterError;

/// How many events a client may leave unread, for each choice of its request, before it is cut off. One verified span
/// is one event, so this is some hundred thousand bytes of text a choice behind what sockets buffer already.
pub const MAX_UNREAD_EVENTS_PER_CHOICE: usize = 4_096;

/// One tokenized, validated request, ready to be scheduled.
#[derive(Debug, Clone)]
pub struct GenerationRequest {
    /// Names the request in logs, traces and responses.
    pub request_id: String,
    /// A model of the [`crate::catalog::Catalog`].
    pub model: String,
    /// Size of the model's vocabulary.
    pub vocab_size: u32,
    /// The prompt, never empty; `spec.prompt_len` is its length.
    pub prompt_ids: Vec<TokenId>,
    /// How many sequences to run over this prompt; sequence `i` gets the spec with `choice = i`.
    pub num_choices: u32,
    /// Seed, sampling and limits; `choice` and `lane` are 0 and set by the scheduler. `max_len` equals `prompt_len` where only
    /// the prompt's logprobs are wanted: nothing is drawn then.
    pub spec: SequenceSpec,
    /// What the client, or its API key, said this is; else what its text looks like.
    pub task_type: String,
    /// What the client asked of speculation.
    pub speculation: SpeculationRequest,
    /// The request's span: parent of the rounds' spans.
    pub span: tracing::Span,
}

/// What is reported of a generation. Events of one choice come in order; choices interleave.
#[derive(Debug, Clone)]
pub enum GenerationEvent {
    /// Log probabilities of prompt ids, where `spec.prompt_logprobs` asked for them: once for the generation, in parts
    /// in ascending order where the prompt is fed in parts, all before the first token of any choice.
    PromptLogprobs(PromptLogprobs),
    /// One committed span of a choice; never empty.
    Tokens(CommittedTokens),
    /// The choice is complete. Sent once a choice, also where nothing was to be drawn.
    Finished {
        /// Which choice.
        choice: u32,
        /// A stop token, or the end of `max_len`.
        reason: FinishReason,
        /// Totals of the choice.
        usage: SpeculationUsage,
    },
    /// The generation failed; nothing follows, for any choice.
    Failed(RouterError),
}

/// The ids of a span. Few, as a rule: those stay where the event is, for memory that one thread takes and another one gives back is dear.
pub type SpanIds = SmallVec<[TokenId; 8]>;

/// One committed span of one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct CommittedTokens {
    /// Which choice.
    pub choice: u32,
    /// Accepted drafted ids, then the target's own draw.
    pub token_ids: SpanIds,
    /// How many leading `token_ids` were drafted.
    pub num_drafted: u32,
    /// One entry an id where `spec.logprobs` asked for them, else empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Totals of the choice up to and with this span: what is reported when a stop string ends it here.
    pub usage: SpeculationUsage,
}

/// What runs generations.
#[async_trait]
pub trait GenerationService: Send + Sync {
    /// Submits a request. Returns once it is scheduled; an error here is the client's answer before the first byte (no
    /// such model, no target ready, queue full).
    async fn submit(&self, request: GenerationRequest) -> Result<GenerationStream, RouterError>;

    /// What lanes and workers do now, and why.
    async fn report(&self) -> Result<SchedulerReport, RouterError>;
}

/// Connects the scheduler's driver and a client for a generation of `num_choices` sequences.
pub fn channel(num_choices: u32) -> (GenerationSink, GenerationStream) {
    let (sender, receiver) = mpsc::channel(MAX_UNREAD_EVENTS_PER_CHOICE * num_choices.max(1) as usize);
    let all = Wish::default();
    let shared = Arc::new(Shared {
        choices: (0..num_choices).map(|_| all.child()).collect(),
        all,
        overflowed: AtomicBool::new(false),
    });
    let end = Arc::new(DriverEnd { sender, shared: Arc::clone(&shared) });
    (GenerationSink { end }, GenerationStream { receiver, shared, ended: false })
}

/// Whether something is still wanted: asked for every token, and waited on once.
#[derive(Debug, Default)]
struct Wish {
    is_over: AtomicBool,
    token: CancellationToken,
}

impl Wish {
    fn child(&self) -> Self {
        Self { is_over: AtomicBool::new(false), token: self.token.child_token() }
    }

    fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.token.cancel();
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}

/// What both ends see.
#[derive(Debug)]
struct Shared {
    /// Where it is over, every one of `choices` is.
    all: Wish,
    choices: Vec<Wish>,
    /// The sink found the channel full: the generation is cut.
    overflowed: AtomicBool,
}

/// What became of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "work for a choice that nobody wants must stop"]
pub enum Delivery {
    /// It will be read.
    Delivered,
    /// Nobody wants this choice any more: close its sequence. Other choices may go on.
    Unwanted,
}

/// The driver's end. Clones write to the same client. Their reference count is kept on its own cache line, away from
/// what both ends read for every token, to avoid false sharing.
#[derive(Debug, Clone)]
pub struct GenerationSink {
    end: Arc<DriverEnd>,
}

#[derive(Debug)]
struct DriverEnd {
    sender: mpsc::Sender<GenerationEvent>,
    shared: Arc<Shared>,
}

impl GenerationSink {
    /// Hands an event over without waiting. A client that is too far behind is cut here: the whole generation becomes
    /// unwanted and the client reads [`RouterError::SlowClient`] after what was delivered.
    pub fn send(&self, event: GenerationEvent) -> Delivery {
        let wanted = match &event {
            GenerationEvent::Tokens(tokens) => !self.is_cancelled(tokens.choice),
            GenerationEvent::Finished { choice, .. } => !self.is_cancelled(*choice),
            GenerationEvent::PromptLogprobs(_) | GenerationEvent::Failed(_) => !self.end.shared.all.is_over(),
        };
        if !wanted {
            return Delivery::Unwanted;
        }
        match self.end.sender.try_send(event) {
            Ok(()) => Delivery::Delivered,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.end.shared.overflowed.store(true, Ordering::Release);
                self.end.shared.all.end();
                Delivery::Unwanted
            }
            Err(mpsc::error::TrySendError::Closed(_)) => Delivery::Unwanted,
        }
    }

    /// [`Self::send`] for [`GenerationEvent::Finished`] and [`GenerationEvent::Failed`]: whether or not somebody reads it,
    /// there is nothing left to stop.
    pub fn send_last(&self, event: GenerationEvent) {
        match self.send(event) {
            Delivery::Delivered | Delivery::Unwanted => {}
        }
    }

    /// Whether nobody wants this choice any more.
    pub fn is_cancelled(&self, choice: u32) -> bool {
        self.end.shared.all.is_over()
            || self.end.shared.choices.get(choice as usize).is_none_or(Wish::is_over)
    }

    /// Fires when nobody wants this choice any more (its stop string was found, the client went away, or was too
    /// slow); for the owner task to wait on while the choice is queued or its round is out. Out-of-range choices are
    /// cancelled from the start.
    pub fn cancelled(&self, choice: u32) -> CancellationToken {
        let wish = self.end.shared.choices.get(choice as usize);
        wish.map(|wish| wish.token.clone()).unwrap_or_else(|| {
            let never_wanted = CancellationToken::new();
            never_wanted.cancel();
            never_wanted
        })
    }
}

/// The client's end. Dropping it cancels every choice.
#[derive(Debug)]
pub struct GenerationStream {
    receiver: mpsc::Receiver<GenerationEvent>,
    shared: Arc<Shared>,
    ended: bool,
}

impl GenerationStream {
    /// The next event; `None` after the last one. A sink that vanishes early ends the stream early: the reader knows
    /// which choices have finished.
    ///
    /// Cancel safety: no event is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<GenerationEvent> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// [`Self::next`], for whoever reads several streams at once.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<GenerationEvent>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = match self.receiver.poll_recv(context) {
            Poll::Ready(event) => event,
            Poll::Pending if !self.shared.overflowed.load(Ordering::Acquire) => return Poll::Pending,
            // After an overflow nothing more comes, whether or not sinks live on: read what is there and end.
            Poll::Pending => self.receiver.try_recv().ok(),
        };
        let event = event.or_else(|| {
            let overflowed = self.shared.overflowed.load(Ordering::Acquire);
            overflowed.then_some(GenerationEvent::Failed(RouterError::SlowClient))
        });
        self.ended = matches!(event, None | Some(GenerationEvent::Failed(_)));
        Poll::Ready(event)
    }

    /// Nothing more of this choice is wanted; the others go on.
    pub fn cancel_choice(&self, choice: u32) {
        if let Some(wish) = self.shared.choices.get(choice as usize) {
            wish.end();
        }
    }
}

impl Drop for GenerationStream {
    fn drop(&mut self) {
        self.shared.all.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(choice: u32, id: TokenId) -> GenerationEvent {
        GenerationEvent::Tokens(CommittedTokens {
            choice,
            token_ids: [id].as_slice().into(),
            num_drafted: 0,
            logprobs: Vec::new(),
            usage: SpeculationUsage::default(),
        })
    }

    #[tokio::test]
    async fn dropping_the_stream_cancels_every_choice() {
        let (sink, stream) = channel(2);
        let waiting = sink.cancelled(1);
        assert_eq!(sink.send(tokens(0, 7)), Delivery::Delivered);
        drop(stream);
        waiting.cancelled().await;
        assert_eq!(sink.send(tokens(0, 8)), Delivery::Unwanted);
        assert!(sink.is_cancelled(0) && sink.is_cancelled(1));
    }

    #[tokio::test]
    async fn one_choice_is_cancelled_alone() {
        let (sink, mut stream) = channel(2);
        stream.cancel_choice(0);
        assert_eq!(sink.send(tokens(0, 7)), Delivery::Unwanted);
        assert_eq!(sink.send(tokens(1, 8)), Delivery::Delivered);
        assert!(
            matches!(stream.next().await, Some(GenerationEvent::Tokens(t)) if t.choice == 1 && t.token_ids.as_slice() == [8])
        );
    }

    #[tokio::test]
    async fn a_client_too_far_behind_reads_what_was_delivered_and_then_the_reason() {
        let (sink, mut stream) = channel(1);
        for id in 0..MAX_UNREAD_EVENTS_PER_CHOICE {
            assert_eq!(sink.send(tokens(0, id as TokenId)), Delivery::Delivered);
        }
        assert_eq!(sink.send(tokens(0, 0)), Delivery::Unwanted);
        assert!(sink.is_cancelled(0), "the lane learns that the generation is cut");
        for id in 0..MAX_UNREAD_EVENTS_PER_CHOICE {
            let event = stream.next().await;
            assert!(
                matches!(&event, Some(GenerationEvent::Tokens(t)) if t.token_ids.as_slice() == [id as TokenId]),
                "{event:?}"
            );
        }
        // The sink is still alive: the reader must not wait for it.
        assert!(matches!(stream.next().await, Some(GenerationEvent::Failed(RouterError::SlowClient))));
        assert!(stream.next().await.is_none());
    }

    #[tokio::test]
    async fn nothing_is_read_after_a_failure() {
        let (sink, mut stream) = channel(1);
        assert_eq!(sink.send(GenerationEvent::Failed(RouterError::ClientGone)), Delivery::Delivered);
        assert_eq!(sink.send(tokens(0, 1)), Delivery::Delivered, "the reader decides what it still reads");
        assert!(matches!(stream.next().await, Some(GenerationEvent::Failed(RouterError::ClientGone))));
        assert!(stream.next().await.is_none());
    }
}
