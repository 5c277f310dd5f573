//! The interface between text and scheduling: a checked, tokenized request goes in, committed token ids come
//! out.
//!
//! The API, admission and tokenization handle text and do not depend on workers; the scheduler handles ids
//! and does not depend on text. The scheduler's driver writes through a [`GenerationSink`] and never waits
//! for a client: the channel is bounded, and a client that leaves more than [`MAX_UNREAD_BYTES`] of its
//! request unread is disconnected. Must not depend on text, sockets, HTTP or gRPC.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use async_trait::async_trait;
pub use scheduling::rollout::RolloutOrder;
pub use scheduling::scheduler::events::{Drain, SpeculationUsage};
pub use scheduling::scheduler::policy::SpeculationRequest;
use scheduling::scheduler::{SchedulerReport, WorkerReport};
use serde::Serialize;
use smallvec::SmallVec;
use speculation::lookup::PredictedText;
use speculation::step::PromptLogprobs;
use speculation::{FinishReason, SequenceSpec, TokenId, TokenLogprobs};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::error::RouterError;

/// Maximum number of unread bytes of a client, over all prompts and choices of its request: a few thousand
/// verified spans without log probabilities, in addition to socket buffers.
pub const MAX_UNREAD_BYTES: usize = 512 << 10;

/// Maximum number of unread events of one prompt, whatever their size.
pub const MAX_UNREAD_EVENTS: usize = 4_096;

/// Unread bytes of one request, shared by its generations.
#[derive(Debug, Clone, Default)]
pub struct Unread(Arc<AtomicUsize>);

impl Unread {
    /// Adds `num_bytes`; returns whether the total is within the limit.
    fn grow(&self, num_bytes: usize) -> bool {
        self.0.fetch_add(num_bytes, Ordering::AcqRel) + num_bytes <= MAX_UNREAD_BYTES
    }

    fn shrink(&self, num_bytes: usize) {
        self.0.fetch_sub(num_bytes, Ordering::AcqRel);
    }
}

/// One tokenized, validated request, ready to be scheduled.
#[derive(Debug, Clone)]
pub struct GenerationRequest {
    /// Identifies the request in logs, traces and responses.
    pub request_id: String,
    /// A model of the [`crate::catalog::Catalog`].
    pub model: String,
    /// Size of the model's vocabulary.
    pub vocab_size: u32,
    /// The prompt, never empty; `spec.prompt_len` is its length.
    pub prompt_ids: Vec<TokenId>,
    /// Number of sequences to run for this prompt; sequence `i` gets the spec with `choice = i`.
    pub num_choices: u32,
    /// Seed, sampling and limits; `choice` and `lane` are 0 and set by the scheduler. `max_len` equals
    /// `prompt_len` if only the prompt's log probabilities are requested: no token is generated then.
    pub spec: SequenceSpec,
    /// Task type from the client or its API key, else detected from the prompt.
    pub task_type: String,
    /// The client's settings for speculation.
    pub speculation: SpeculationRequest,
    /// The client's predicted output, if the request has one sequence.
    pub prediction: Option<Arc<PredictedText>>,
    /// The request's span: parent of the rounds' spans.
    pub span: tracing::Span,
    /// Unread bytes of the client.
    pub unread: Unread,
    /// Key for fair queueing: the API key, or one derived from a gateway's fairness id.
    pub api_key: u64,
    /// Whether the generation fails when it waits too long for its first target. Only set if no other
    /// generation of its request has started.
    pub may_expire: bool,
}

/// Event of a generation. Events of one choice arrive in order; choices interleave.
#[derive(Debug, Clone)]
pub enum GenerationEvent {
    /// Log probabilities of the prompt, if `spec.prompt_logprobs` requests them: once per generation, in
    /// ascending parts if the prompt is prefilled in parts, all before the first token of any choice.
    PromptLogprobs(PromptLogprobs),
    /// One committed span of a choice; never empty.
    Tokens(CommittedTokens),
    /// The choice is complete. Sent once per choice, also if no token was to be generated.
    Finished {
        /// Index of the choice.
        choice: u32,
        /// Stop token, or length limit `max_len`.
        reason: FinishReason,
        /// Usage of the choice.
        usage: SpeculationUsage,
    },
    /// The generation failed; no further event follows for any choice.
    Failed(RouterError),
}

impl GenerationEvent {
    /// Size while the event is unread. The prompt's log probabilities count as 0: they arrive once, before
    /// the first token, and the window limits their number.
    fn num_bytes(&self) -> usize {
        let more = match self {
            Self::Tokens(tokens) => {
                let entries = tokens
                    .logprobs
                    .iter()
                    .map(|entry| size_of::<TokenLogprobs>() + entry.top.len() * size_of::<(TokenId, f32)>());
                tokens.token_ids.len() * size_of::<TokenId>() + entries.sum::<usize>()
            }
            Self::PromptLogprobs(_) | Self::Finished { .. } | Self::Failed(_) => 0,
        };
        size_of::<Self>() + more
    }
}

/// Ids of a span. Usually few, and then stored inline, because memory allocated on one thread and freed on
/// another is expensive.
pub type SpanIds = SmallVec<[TokenId; 8]>;

/// One committed span of one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct CommittedTokens {
    /// Index of the choice.
    pub choice: u32,
    /// Accepted drafted ids, then the target's own draw.
    pub token_ids: SpanIds,
    /// Number of leading `token_ids` that were drafted.
    pub num_drafted: u32,
    /// One entry per id if `spec.logprobs` requests them, else empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Usage of the choice up to and including this span; reported if a stop string ends the choice here.
    pub usage: SpeculationUsage,
}

/// Runs generations.
#[async_trait]
pub trait GenerationService: Send + Sync {
    /// Submits a request and returns once it is scheduled. An error here is sent to the client before the
    /// first byte (unknown model, no target ready, queue full).
    async fn submit(&self, request: GenerationRequest) -> Result<GenerationStream, RouterError>;

    /// Executes an operator's drain order, whose address may be just HOST:PORT; `None` if no worker matches.
    async fn drain(&self, drain: Drain) -> Result<Option<DrainState>, RouterError>;

    /// Executes an operator's rollout order; returns the report after it.
    async fn rollout(&self, order: RolloutOrder) -> Result<SchedulerReport, RouterError>;

    /// Current state of lanes and workers, with the reasons for decisions.
    async fn report(&self) -> Result<SchedulerReport, RouterError>;
}

/// Result of a drain order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DrainState {
    /// The connected workers that matched.
    pub workers: Vec<WorkerReport>,
    /// The matching addresses that are drained, including for workers that connect later.
    pub drained: Vec<String>,
}

/// Creates the channel between the scheduler's driver and a client, for a generation of `num_choices`
/// sequences of a request with this unread counter.
pub fn channel(num_choices: u32, unread: Unread) -> (GenerationSink, GenerationStream) {
    let (sender, receiver) = mpsc::channel(MAX_UNREAD_EVENTS);
    let all = Wish::default();
    let begun = CancellationToken::new();
    let shared = Arc::new(Shared {
        choices: (0..num_choices).map(|_| all.child()).collect(),
        all,
        begun,
        overflowed: AtomicBool::new(false),
        on_overflow: OnceLock::new(),
        unread,
    });
    let end = Arc::new(DriverEnd { sender, shared: Arc::clone(&shared) });
    (GenerationSink { end }, GenerationStream { receiver, shared, first: None, ended: false })
}

/// Cancellation state: an atomic flag to check for every token, and a token to wait on.
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

/// State shared by both ends.
struct Shared {
    /// When it is cancelled, so are all of `choices`.
    all: Wish,
    choices: Vec<Wish>,
    /// Cancelled when a choice gets its first target.
    begun: CancellationToken,
    /// The client fell too far behind: the generation is cancelled.
    overflowed: AtomicBool,
    /// Called on overflow, for a reader that is not being polled.
    on_overflow: OnceLock<Box<dyn Fn() + Send + Sync>>,
    unread: Unread,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { all, choices, begun: _, overflowed, on_overflow: _, unread } = self;
        let mut shown = f.debug_struct("ChannelState");
        shown.field("all", all).field("choices", choices).field("overflowed", overflowed);
        shown.field("unread", unread).finish_non_exhaustive()
    }
}

impl Shared {
    fn overflow(&self) {
        self.overflowed.store(true, Ordering::Release);
        self.all.end();
        if let Some(tell) = self.on_overflow.get() {
            tell();
        }
    }
}

/// Result of sending an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "work for a cancelled choice must stop"]
pub enum Delivery {
    /// The event was queued.
    Delivered,
    /// The choice is cancelled: close its sequence. Other choices may continue.
    Unwanted,
}

/// The driver's end. Clones write to the same client. The reference count is kept on its own cache line, away
/// from what both ends read for every token, to avoid false sharing.
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
    /// Sends an event without waiting. If the client is too far behind, the whole generation is
    /// cancelled, and the client reads [`RouterError::SlowClient`] after the delivered events.
    pub fn send(&self, event: GenerationEvent) -> Delivery {
        let wanted = match &event {
            GenerationEvent::Tokens(tokens) => !self.is_cancelled(tokens.choice),
            GenerationEvent::Finished { choice, .. } => !self.is_cancelled(*choice),
            GenerationEvent::PromptLogprobs(_) | GenerationEvent::Failed(_) => !self.end.shared.all.is_over(),
        };
        if !wanted {
            return Delivery::Unwanted;
        }
        let (shared, num_bytes) = (&self.end.shared, event.num_bytes());
        if !shared.unread.grow(num_bytes) {
            shared.unread.shrink(num_bytes);
            shared.overflow();
            return Delivery::Unwanted;
        }
        let Err(error) = self.end.sender.try_send(event) else { return Delivery::Delivered };
        shared.unread.shrink(num_bytes);
        if matches!(error, mpsc::error::TrySendError::Full(_)) {
            shared.overflow();
        }
        Delivery::Unwanted
    }

    /// [`Self::send`] for [`GenerationEvent::Finished`] and [`GenerationEvent::Failed`]: the result is
    /// ignored, because there is nothing left to stop.
    pub fn send_last(&self, event: GenerationEvent) {
        match self.send(event) {
            Delivery::Delivered | Delivery::Unwanted => {}
        }
    }

    /// Reports that a choice has its first target: the response may begin, so later errors cannot set its
    /// status.
    pub fn begin(&self) {
        self.end.shared.begun.cancel();
    }

    /// Whether the choice is cancelled.
    pub fn is_cancelled(&self, choice: u32) -> bool {
        self.end.shared.all.is_over()
            || self.end.shared.choices.get(choice as usize).is_none_or(Wish::is_over)
    }

    /// Returns a token that is cancelled with the choice (stop string found, client disconnected or too
    /// slow), for the owner task to wait on while the choice is queued or its round is in flight.
    /// Out-of-range choices are cancelled from the start.
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
    /// Event received by [`Self::begun`], not yet returned.
    first: Option<GenerationEvent>,
    ended: bool,
}

impl GenerationStream {
    /// Waits until a choice has a target. An error here is sent to the client before the first byte.
    ///
    /// Cancel safety: no event is lost when the future is dropped.
    pub async fn begun(&mut self) -> Result<(), RouterError> {
        let begun = self.shared.begun.clone();
        let event = tokio::select! {
            biased;
            // Check received events first: a failure may directly follow the beginning.
            event = self.next() => event,
            () = begun.cancelled() => return Ok(()),
        };
        match event {
            Some(GenerationEvent::Failed(error)) => Err(error),
            Some(event) => {
                self.first = Some(event);
                Ok(())
            }
            None => Err(RouterError::Draining),
        }
    }

    /// Returns the next event; `None` after the last one. A sink dropped early ends the stream early; the
    /// reader knows which choices have finished.
    ///
    /// Cancel safety: no event is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<GenerationEvent> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// [`Self::next`] as a poll function, for reading several streams at once.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<GenerationEvent>> {
        if let Some(event) = self.first.take() {
            return Poll::Ready(Some(event));
        }
        if self.ended {
            return Poll::Ready(None);
        }
        let mut polled = self.receiver.poll_recv(context);
        if polled.is_pending() {
            if !self.shared.overflowed.load(Ordering::Acquire) {
                return Poll::Pending;
            }
            // After an overflow nothing more is sent, even if sinks are still alive: read the queued events
            // and end.
            polled = Poll::Ready(self.receiver.try_recv().ok());
        }
        if let Poll::Ready(Some(event)) = &polled {
            self.shared.unread.shrink(event.num_bytes());
        } else if self.shared.overflowed.load(Ordering::Acquire) {
            polled = Poll::Ready(Some(GenerationEvent::Failed(RouterError::SlowClient)));
        }
        self.ended = matches!(polled, Poll::Ready(None | Some(GenerationEvent::Failed(_))));
        polled
    }

    /// Registers a callback for when the generation is cancelled because its client reads too slowly; called
    /// at once if that has already happened. Only the first callback is used. It runs where tokens are
    /// written and must not block.
    pub fn on_overflow(&self, tell: impl Fn() + Send + Sync + 'static) {
        // Ignore a second callback.
        drop(self.shared.on_overflow.set(Box::new(tell)));
        if self.shared.overflowed.load(Ordering::Acquire)
            && let Some(tell) = self.shared.on_overflow.get()
        {
            tell();
        }
    }

    /// Cancels one choice; the others continue.
    pub fn cancel_choice(&self, choice: u32) {
        if let Some(wish) = self.shared.choices.get(choice as usize) {
            wish.end();
        }
    }
}

impl Drop for GenerationStream {
    fn drop(&mut self) {
        self.shared.all.end();
        // Release the unread events: other generations of the request may continue.
        while let Ok(event) = self.receiver.try_recv() {
            self.shared.unread.shrink(event.num_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
