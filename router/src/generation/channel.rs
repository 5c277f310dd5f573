//! The channel between the scheduler's driver and a client: [`GenerationSink`] and [`GenerationStream`]. The
//! driver never waits for a client: a client that leaves more than [`MAX_UNREAD_BYTES`] of its request unread
//! is disconnected.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use futures::StreamExt as _;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use smallvec::SmallVec;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::GenerationEvent;
use crate::error::RouterError;

/// Maximum number of unread bytes of a client, over all prompts and choices of its request: a few thousand
/// verified spans without log probabilities, in addition to socket buffers.
pub const MAX_UNREAD_BYTES: usize = 512 << 10;

/// Maximum number of unread events of one prompt, whatever their size.
pub const MAX_UNREAD_EVENTS: usize = 4_096;

/// Unread bytes of one request, shared by its generations.
#[derive(Debug, Clone, Default)]
pub struct UnreadBytes(Arc<AtomicUsize>);

impl UnreadBytes {
    /// Adds `num_bytes`; returns whether the total is within the limit.
    fn reserve(&self, num_bytes: usize) -> bool {
        self.0.fetch_add(num_bytes, Ordering::AcqRel) + num_bytes <= MAX_UNREAD_BYTES
    }

    fn release(&self, num_bytes: usize) {
        self.0.fetch_sub(num_bytes, Ordering::AcqRel);
    }
}

/// Creates the channel between the scheduler's driver and a client, for a generation of `num_choices`
/// sequences of a request with this unread counter.
pub fn channel(num_choices: u32, unread: UnreadBytes) -> (GenerationSink, GenerationStream) {
    let (sender, receiver) = mpsc::channel(MAX_UNREAD_EVENTS);
    let all = CancelState::default();
    let started = CancellationToken::new();
    let shared = Arc::new(ChannelState {
        choices: (0..num_choices).map(|_| all.child()).collect(),
        all,
        started,
        overflowed: AtomicBool::new(false),
        on_overflow: OnceLock::new(),
        unread,
    });
    let inner = Arc::new(SinkInner { sender, shared: Arc::clone(&shared) });
    (GenerationSink { inner }, GenerationStream { receiver, shared, peeked: None, ended: false })
}

/// Cancellation state: an atomic flag to check for every token, and a token to wait on.
#[derive(Debug, Default)]
struct CancelState {
    is_cancelled: AtomicBool,
    token: CancellationToken,
}

impl CancelState {
    fn child(&self) -> Self {
        Self { is_cancelled: AtomicBool::new(false), token: self.token.child_token() }
    }

    fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        self.token.cancel();
    }

    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }
}

/// State shared by both ends.
struct ChannelState {
    /// When it is cancelled, so are all of `choices`.
    all: CancelState,
    /// Usually one, and then stored inline: it is read for every token.
    choices: SmallVec<[CancelState; 1]>,
    /// Cancelled when a choice gets its first target.
    started: CancellationToken,
    /// The client fell too far behind: the generation is cancelled.
    overflowed: AtomicBool,
    /// Called on overflow, for a reader that is not being polled.
    on_overflow: OnceLock<Box<dyn Fn() + Send + Sync>>,
    unread: UnreadBytes,
}

impl fmt::Debug for ChannelState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { all, choices, started: _, overflowed, on_overflow: _, unread } = self;
        let mut debug = f.debug_struct("ChannelState");
        debug.field("all", all).field("choices", choices).field("overflowed", overflowed);
        debug.field("unread", unread).finish_non_exhaustive()
    }
}

impl ChannelState {
    fn overflow(&self) {
        self.overflowed.store(true, Ordering::Release);
        self.all.cancel();
        if let Some(callback) = self.on_overflow.get() {
            callback();
        }
    }
}

/// The driver's end. Clones write to the same client. The reference count is kept on its own cache line, away
/// from what both ends read for every token, to avoid false sharing.
#[derive(Debug, Clone)]
pub struct GenerationSink {
    inner: Arc<SinkInner>,
}

#[derive(Debug)]
struct SinkInner {
    sender: mpsc::Sender<GenerationEvent>,
    shared: Arc<ChannelState>,
}

impl GenerationSink {
    /// Sends an event without waiting. If the client is too far behind, the whole generation is
    /// cancelled, and the client reads [`RouterError::SlowClient`] after the delivered events.
    ///
    /// Returns whether the event was queued. Otherwise the choice is cancelled: [`Self::cancelled`] tells the
    /// driver to close its sequence. Other choices may continue.
    pub fn send(&self, event: GenerationEvent) -> bool {
        let is_wanted = match &event {
            GenerationEvent::Tokens(tokens) => !self.is_cancelled(tokens.choice),
            GenerationEvent::Finished { choice, .. } => !self.is_cancelled(*choice),
            GenerationEvent::PromptLogprobs(_) | GenerationEvent::Failed(_) => {
                !self.inner.shared.all.is_cancelled()
            }
        };
        if !is_wanted {
            return false;
        }
        let (shared, num_bytes) = (&self.inner.shared, event.num_bytes());
        if !shared.unread.reserve(num_bytes) {
            shared.unread.release(num_bytes);
            shared.overflow();
            return false;
        }
        let Err(error) = self.inner.sender.try_send(event) else { return true };
        shared.unread.release(num_bytes);
        if matches!(error, mpsc::error::TrySendError::Full(_)) {
            shared.overflow();
        }
        false
    }

    /// Reports that a choice has its first target: the response may begin, so later errors cannot set its
    /// status.
    pub fn mark_started(&self) {
        self.inner.shared.started.cancel();
    }

    /// Whether the choice is cancelled.
    fn is_cancelled(&self, choice: u32) -> bool {
        self.inner.shared.all.is_cancelled()
            || self.inner.shared.choices.get(choice as usize).is_none_or(CancelState::is_cancelled)
    }

    /// Whether the choice's output is complete because a stop string was found.
    pub fn is_stopped(&self, choice: u32) -> bool {
        self.inner.shared.choices.get(choice as usize).is_some_and(CancelState::is_cancelled)
    }

    /// Returns a token that is cancelled with the choice (stop string found, client disconnected or too
    /// slow), for the owner task to wait on while the choice is queued or its round is in flight.
    /// Out-of-range choices are cancelled from the start.
    pub fn cancelled(&self, choice: u32) -> CancellationToken {
        let cancel_state = self.inner.shared.choices.get(choice as usize);
        cancel_state.map(|cancel_state| cancel_state.token.clone()).unwrap_or_else(|| {
            let cancelled = CancellationToken::new();
            cancelled.cancel();
            cancelled
        })
    }
}

/// The client's end. Dropping it cancels every choice.
#[derive(Debug)]
pub struct GenerationStream {
    receiver: mpsc::Receiver<GenerationEvent>,
    shared: Arc<ChannelState>,
    /// Event received by [`Self::peek`], not yet returned.
    peeked: Option<GenerationEvent>,
    ended: bool,
}

impl GenerationStream {
    /// Waits for the next event and keeps it, unless it is a failure.
    ///
    /// Cancel safety: no event is lost when the future is dropped.
    async fn peek(&mut self) -> Result<(), RouterError> {
        match self.next().await {
            Some(GenerationEvent::Failed(error)) => Err(error),
            Some(event) => {
                self.peeked = Some(event);
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
        if let Some(event) = self.peeked.take() {
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
            self.shared.unread.release(event.num_bytes());
        } else if self.shared.overflowed.load(Ordering::Acquire) {
            polled = Poll::Ready(Some(GenerationEvent::Failed(RouterError::SlowClient)));
        }
        self.ended = matches!(polled, Poll::Ready(None | Some(GenerationEvent::Failed(_))));
        polled
    }

    /// Registers a callback for when the generation is cancelled because its client reads too slowly; called
    /// at once if that has already happened. Only the first callback is used. It runs where tokens are
    /// written and must not block.
    pub fn on_overflow(&self, callback: impl Fn() + Send + Sync + 'static) {
        // Ignore a second callback.
        drop(self.shared.on_overflow.set(Box::new(callback)));
        if self.shared.overflowed.load(Ordering::Acquire)
            && let Some(callback) = self.shared.on_overflow.get()
        {
            callback();
        }
    }

    /// Ends one choice, whose output contains a stop string; the others continue.
    pub fn stop_choice(&self, choice: u32) {
        if let Some(cancel_state) = self.shared.choices.get(choice as usize) {
            cancel_state.cancel();
        }
    }
}

/// Waits until the response to a request may begin: each of its generations has a target, or one of them has
/// an event, which must not wait for the others. An error here is sent to the client before the first byte.
///
/// Cancel safety: no event is lost when the future is dropped.
pub async fn wait_started<'a>(
    streams: impl IntoIterator<Item = &'a mut GenerationStream>,
) -> Result<(), RouterError> {
    let streams: Vec<&mut GenerationStream> = streams.into_iter().collect();
    let started = join_all(streams.iter().map(|stream| stream.shared.started.clone().cancelled_owned()));
    let mut events: FuturesUnordered<_> = streams.into_iter().map(GenerationStream::peek).collect();
    tokio::select! {
        biased;
        // Check received events first: a failure may directly follow the beginning.
        Some(event) = events.next() => event,
        // Every generation has a target.
        _ = started => Ok(()),
    }
}

impl Drop for GenerationStream {
    fn drop(&mut self) {
        self.shared.all.cancel();
        // Release the unread events: other generations of the request may continue. Closed first, because the
        // driver may be sending an event now.
        self.receiver.close();
        while let Ok(event) = self.receiver.try_recv() {
            self.shared.unread.release(event.num_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
