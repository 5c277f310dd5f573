//! The seam between text and scheduling: a tokenized, checked request goes in, committed token ids come out.
//!
//! What stands before it (API, admission, tokenize) knows text and no workers; what stands behind it (the
//! scheduler) knows ids and no text. The scheduler's driver writes through a [`GenerationSink`] and never waits for a
//! client: the channel is bounded, and a client that leaves [`MAX_UNREAD_BYTES`] of its request unread loses that. Must never hold text, sockets or anything of HTTP and gRPC.

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

/// What a client may leave unread before it is cut off, over all prompts and choices of its request: some thousand verified
/// spans without log probabilities, behind what sockets buffer already.
pub const MAX_UNREAD_BYTES: usize = 512 << 10;

/// And of one prompt's events, whatever their size.
pub const MAX_UNREAD_EVENTS: usize = 4_096;

/// What a client has left unread of one request. The request's generations share it.
#[derive(Debug, Clone, Default)]
pub struct Unread(Arc<AtomicUsize>);

impl Unread {
    /// Whether so much may wait to be read too.
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
    /// What the client predicts of the output, where that is one sequence.
    pub prediction: Option<Arc<PredictedText>>,
    /// The request's span: parent of the rounds' spans.
    pub span: tracing::Span,
    /// What its client has left unread.
    pub unread: Unread,
    /// Whose it is: API keys take turns, and those whom a gateway tells apart by a key of its own.
    pub api_key: u64,
    /// Whether it fails where it waits too long for its first target: nothing of its request has begun yet.
    pub may_expire: bool,
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

impl GenerationEvent {
    /// What it weighs while it waits to be read. The prompt's log probabilities weigh nothing: they come once, all before
    /// the first token, and are as many as the window allows.
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

    /// Carries out an operator's order, whose address may be HOST:PORT alone; `None` where no worker is meant.
    async fn drain(&self, drain: Drain) -> Result<Option<DrainState>, RouterError>;

    /// Carries out an operator's order about the rollout of a draft; what lanes and workers do after it.
    async fn rollout(&self, order: RolloutOrder) -> Result<SchedulerReport, RouterError>;

    /// What lanes and workers do now, and why.
    async fn report(&self) -> Result<SchedulerReport, RouterError>;
}

/// What an operator's order to drain has led to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DrainState {
    /// The connected workers that were meant.
    pub workers: Vec<WorkerReport>,
    /// Of the addresses that were meant, those that are drained, of workers that connect later too.
    pub drained: Vec<String>,
}

/// Connects the scheduler's driver and a client for a generation of `num_choices` sequences, of a request that has left so
/// much unread.
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
struct Shared {
    /// Where it is over, every one of `choices` is.
    all: Wish,
    choices: Vec<Wish>,
    /// A choice has a target.
    begun: CancellationToken,
    /// The sink found the channel full: the generation is cut.
    overflowed: AtomicBool,
    /// Called then, for a reader that is not asked for more.
    on_overflow: OnceLock<Box<dyn Fn() + Send + Sync>>,
    unread: Unread,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { all, choices, begun: _, overflowed, on_overflow: _, unread } = self;
        let mut shown = f.debug_struct("Shared");
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

    /// [`Self::send`] for [`GenerationEvent::Finished`] and [`GenerationEvent::Failed`]: whether or not somebody reads it,
    /// there is nothing left to stop.
    pub fn send_last(&self, event: GenerationEvent) {
        match self.send(event) {
            Delivery::Delivered | Delivery::Unwanted => {}
        }
    }

    /// A choice has a target: from now on an error comes behind a beginning.
    pub fn begin(&self) {
        self.end.shared.begun.cancel();
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
    /// What came before anybody asked for it.
    first: Option<GenerationEvent>,
    ended: bool,
}

impl GenerationStream {
    /// Waits until a choice has a target. An error here is the client's answer before the first byte.
    ///
    /// Cancel safety: no event is lost when the future is dropped.
    pub async fn begun(&mut self) -> Result<(), RouterError> {
        let begun = self.shared.begun.clone();
        let event = tokio::select! {
            biased;
            // What is there is read first: a failure may follow the beginning at once.
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

    /// The next event; `None` after the last one. A sink that vanishes early ends the stream early: the reader knows
    /// which choices have finished.
    ///
    /// Cancel safety: no event is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<GenerationEvent> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// [`Self::next`], for whoever reads several streams at once.
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
            // After an overflow nothing more comes, whether or not sinks live on: read what is there and end.
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

    /// Has `tell` called when this generation is cut because its client reads too slowly; at once, if it is cut already. Once.
    /// It is called where tokens are written: it must not wait.
    pub fn on_overflow(&self, tell: impl Fn() + Send + Sync + 'static) {
        // Whoever comes second is not told.
        drop(self.shared.on_overflow.set(Box::new(tell)));
        if self.shared.overflowed.load(Ordering::Acquire)
            && let Some(tell) = self.shared.on_overflow.get()
        {
            tell();
        }
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
        // Other generations of the request may go on, and what waits here is not read any more.
        while let Ok(event) = self.receiver.try_recv() {
            self.shared.unread.shrink(event.num_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
