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
use scheduling::scheduler::SchedulerReport;
pub use scheduling::scheduler::events::SpeculationUsage;
pub use scheduling::scheduler::policy::SpeculationRequest;
use smallvec::SmallVec;
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
    /// The request's span: parent of the rounds' spans.
    pub span: tracing::Span,
    /// What its client has left unread.
    pub unread: Unread,
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

    /// What lanes and workers do now, and why.
    async fn report(&self) -> Result<SchedulerReport, RouterError>;
}

/// Connects the scheduler's driver and a client for a generation of `num_choices` sequences, of a request that has left so
/// much unread.
pub fn channel(num_choices: u32, unread: Unread) -> (GenerationSink, GenerationStream) {
    let (sender, receiver) = mpsc::channel(MAX_UNREAD_EVENTS);
    let all = Wish::default();
    let shared = Arc::new(Shared {
        choices: (0..num_choices).map(|_| all.child()).collect(),
        all,
        overflowed: AtomicBool::new(false),
        on_overflow: OnceLock::new(),
        unread,
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
struct Shared {
    /// Where it is over, every one of `choices` is.
    all: Wish,
    choices: Vec<Wish>,
    /// The sink found the channel full: the generation is cut.
    overflowed: AtomicBool,
    /// Called then, for a reader that is not asked for more.
    on_overflow: OnceLock<Box<dyn Fn() + Send + Sync>>,
    unread: Unread,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { all, choices, overflowed, on_overflow: _, unread } = self;
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
        if let Some(event) = &event {
            self.shared.unread.shrink(event.num_bytes());
        }
        let event = event.or_else(|| {
            let overflowed = self.shared.overflowed.load(Ordering::Acquire);
            overflowed.then_some(GenerationEvent::Failed(RouterError::SlowClient))
        });
        self.ended = matches!(event, None | Some(GenerationEvent::Failed(_)));
        Poll::Ready(event)
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
        let (sink, stream) = channel(2, Unread::default());
        let waiting = sink.cancelled(1);
        assert_eq!(sink.send(tokens(0, 7)), Delivery::Delivered);
        drop(stream);
        waiting.cancelled().await;
        assert_eq!(sink.send(tokens(0, 8)), Delivery::Unwanted);
        assert!(sink.is_cancelled(0) && sink.is_cancelled(1));
    }

    #[tokio::test]
    async fn one_choice_is_cancelled_alone() {
        let (sink, mut stream) = channel(2, Unread::default());
        stream.cancel_choice(0);
        assert_eq!(sink.send(tokens(0, 7)), Delivery::Unwanted);
        assert_eq!(sink.send(tokens(1, 8)), Delivery::Delivered);
        assert!(
            matches!(stream.next().await, Some(GenerationEvent::Tokens(t)) if t.choice == 1 && t.token_ids.as_slice() == [8])
        );
    }

    /// Sends until no more is wanted; how many events were delivered.
    fn flood(sink: &GenerationSink) -> usize {
        (0..).take_while(|&id| sink.send(tokens(0, id)) == Delivery::Delivered).count()
    }

    #[tokio::test]
    async fn a_client_too_far_behind_reads_what_was_delivered_and_then_the_reason() {
        let (sink, mut stream) = channel(1, Unread::default());
        let told = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&told);
        stream.on_overflow(move || {
            counted.fetch_add(1, Ordering::AcqRel);
        });
        let num_delivered = flood(&sink);
        assert!((1_000..=MAX_UNREAD_EVENTS).contains(&num_delivered), "{num_delivered}");
        assert!(sink.is_cancelled(0), "the lane learns that the generation is cut");
        assert_eq!(told.load(Ordering::Acquire), 1, "and so does whoever holds the stream");
        for id in 0..num_delivered {
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
    async fn all_prompts_and_choices_of_a_request_share_what_may_be_unread() {
        let (most, num_first) = (MAX_UNREAD_BYTES / tokens(0, 0).num_bytes(), 3_000);
        let unread = Unread::default();
        let (first, first_stream) = channel(128, unread.clone());
        let (second, mut second_stream) = channel(128, unread.clone());
        for id in 0..num_first {
            assert_eq!(first.send(tokens(id % 128, id)), Delivery::Delivered);
        }
        let num_second = flood(&second);
        assert_eq!(num_second, most - num_first as usize);
        drop((first_stream, second));
        while second_stream.next().await.is_some() {}
        assert_eq!(unread.0.load(Ordering::Acquire), 0, "what is read or dropped is not unread");
    }

    #[tokio::test]
    async fn log_probabilities_weigh_more_than_ids() {
        let logprobs = |_| TokenLogprobs { logprob: 0.0, top: vec![(7, -1.0); 20] };
        let (sink, _stream) = channel(1, Unread::default());
        let mut num_delivered = 0;
        loop {
            let GenerationEvent::Tokens(span) = tokens(0, 7) else { unreachable!("made above") };
            let event =
                GenerationEvent::Tokens(CommittedTokens { logprobs: (0..8).map(logprobs).collect(), ..span });
            if sink.send(event) == Delivery::Unwanted {
                break;
            }
            num_delivered += 1;
        }
        assert!(num_delivered < 400, "{num_delivered} events of 1,500 bytes and more were delivered");
    }

    #[tokio::test]
    async fn nothing_is_read_after_a_failure() {
        let (sink, mut stream) = channel(1, Unread::default());
        assert_eq!(sink.send(GenerationEvent::Failed(RouterError::ClientGone)), Delivery::Delivered);
        assert_eq!(sink.send(tokens(0, 1)), Delivery::Delivered, "the reader decides what it still reads");
        assert!(matches!(stream.next().await, Some(GenerationEvent::Failed(RouterError::ClientGone))));
        assert!(stream.next().await.is_none());
    }
}
