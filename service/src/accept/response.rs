//! A response's body that can be taken away from the connection that writes it. An HTTP server asks a body for more only
//! while the client reads: what a body holds must be given back where it does not.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::state::InFlight;

/// One response, seen from the handler that makes it: in the request's extensions. Clones are handles to the same.
#[derive(Clone, Debug)]
pub struct ResponseHandle(pub(super) Arc<Slot>);

impl ResponseHandle {
    /// Ends the response although its client reads nothing: the body is dropped soon, and a connection of HTTP/1 is closed.
    pub fn cut(&self) {
        self.0.is_cut.store(true, Ordering::Release);
        self.0.wake.notify_one();
    }

    /// Whether the response was ended before its body did.
    pub fn was_cut(&self) -> bool {
        self.0.is_cut.load(Ordering::Acquire)
    }
}

/// Where a response's body is kept.
#[derive(Debug)]
pub(super) struct Slot {
    content: Mutex<Content>,
    is_started: AtomicBool,
    is_cut: AtomicBool,
    /// Wakes the connection's task.
    wake: Arc<Notify>,
}

#[derive(Debug)]
struct Content {
    body: Option<Body>,
    in_flight: Option<InFlight>,
    /// Since when the connection has a frame and asks for no other.
    unread_since: Option<Instant>,
}

impl Slot {
    /// For a response that is still to be made.
    pub(super) fn new(wake: Arc<Notify>) -> Self {
        let content = Content { body: None, in_flight: None, unread_since: None };
        Self {
            content: Mutex::new(content),
            is_started: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            wake,
        }
    }

    /// Whether the response's head is made.
    pub(super) fn is_started(&self) -> bool {
        self.is_started.load(Ordering::Acquire)
    }

    pub(super) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Acquire)
    }

    /// Whether nothing was read of it since `then`.
    pub(super) fn is_unread_since(&self, then: Instant) -> bool {
        self.content().unread_since.is_some_and(|since| since <= then)
    }

    /// Drops the body and all that it holds.
    pub(super) fn release(&self) {
        self.is_cut.store(true, Ordering::Release);
        self.empty();
    }

    fn empty(&self) {
        let emptied = {
            let mut content = self.content();
            content.unread_since = None;
            (content.body.take(), content.in_flight.take())
        };
        // The body has locks of its own: it goes after this one is let go.
        drop(emptied);
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        // A body that panicked is dropped by whoever polled it.
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The body that the connection reads.
#[derive(Debug)]
pub(super) struct ResponseBody(Arc<Slot>);

impl ResponseBody {
    /// Of a request that begins; dropping it ends the request.
    pub(super) fn begin(slot: Arc<Slot>, in_flight: InFlight) -> Self {
        slot.content().in_flight = Some(in_flight);
        Self(slot)
    }

    /// The head is made, and this follows.
    pub(super) fn fill(&self, body: Body) {
        self.0.is_started.store(true, Ordering::Release);
        if !self.0.is_cut() {
            self.0.content().body = Some(body);
        }
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut content = self.0.content();
        let Some(body) = &mut content.body else {
            let cut = self.0.is_cut().then(|| Err(axum::Error::new("the response was cut")));
            return Poll::Ready(cut);
        };
        let polled = Pin::new(body).poll_frame(context);
        content.unread_since = matches!(polled, Poll::Ready(Some(Ok(_)))).then(Instant::now);
        drop(content);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.0.empty();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        let is_over = |body: &Body| body.is_end_stream();
        self.0.content().body.as_ref().map_or_else(|| !self.0.is_cut(), is_over)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.content().body.as_ref().map_or_else(SizeHint::new, HttpBody::size_hint)
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        self.0.empty();
    }
}
