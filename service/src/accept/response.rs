//! A response body that can be taken away from the connection that writes it. An HTTP server polls a body
//! only while the client reads, so the resources of an unread body have to be released from outside.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::state::InFlight;

/// Maximum bytes of a frame. A connection copies a frame into its write buffer, which keeps its size.
const FRAME_BYTES: usize = 16 << 10;

/// Handle to a response for its handler, stored in the request's extensions. Clones are handles to the same
/// response.
#[derive(Clone, Debug)]
pub struct ResponseHandle(pub(super) Arc<ResponseSlot>);

impl ResponseHandle {
    /// Ends the response even though its client does not read: the body is dropped soon, and an HTTP/1
    /// connection is closed.
    pub fn cut(&self) {
        self.0.is_cut.store(true, Ordering::Release);
        self.0.wake.notify_one();
    }

    /// Whether the response was cut before its body ended.
    pub fn was_cut(&self) -> bool {
        self.0.is_cut.load(Ordering::Acquire)
    }
}

/// Holds a response's body.
#[derive(Debug)]
pub(super) struct ResponseSlot {
    content: Mutex<Content>,
    is_started: AtomicBool,
    is_cut: AtomicBool,
    /// Wakes the connection's task.
    wake: Arc<Notify>,
}

#[derive(Debug)]
struct Content {
    body: Option<Body>,
    /// The rest of a frame of `body` that is longer than [`FRAME_BYTES`].
    rest: Bytes,
    in_flight: Option<InFlight>,
    /// Time of the last frame, if the connection has not polled for another one.
    unread_since: Option<Instant>,
}

impl Content {
    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if !self.rest.is_empty() {
            let rest = std::mem::take(&mut self.rest);
            return Poll::Ready(Some(Ok(Frame::data(self.first_part(rest)))));
        }
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(context);
        polled.map_ok(|frame| frame.map_data(|data| self.first_part(data)))
    }

    /// Returns the first part of `data` and keeps the rest.
    fn first_part(&mut self, mut data: Bytes) -> Bytes {
        let first = data.split_to(data.len().min(FRAME_BYTES));
        self.rest = data;
        first
    }
}

impl ResponseSlot {
    /// Creates the slot of a response that does not exist yet.
    pub(super) fn new(wake: Arc<Notify>) -> Self {
        let content = Content { body: None, rest: Bytes::new(), in_flight: None, unread_since: None };
        Self {
            content: Mutex::new(content),
            is_started: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            wake,
        }
    }

    /// Whether the response's head exists.
    pub(super) fn is_started(&self) -> bool {
        self.is_started.load(Ordering::Acquire)
    }

    pub(super) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Acquire)
    }

    /// Whether nothing was read since `then`.
    pub(super) fn is_unread_since(&self, then: Instant) -> bool {
        self.content().unread_since.is_some_and(|since| since <= then)
    }

    /// Drops the body and everything it holds.
    pub(super) fn release(&self) {
        self.is_cut.store(true, Ordering::Release);
        self.empty();
    }

    fn empty(&self) {
        let emptied = {
            let mut content = self.content();
            content.unread_since = None;
            (content.body.take(), std::mem::take(&mut content.rest), content.in_flight.take())
        };
        // Dropped after the lock is released, because the body has locks of its own.
        drop(emptied);
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        // A body that panicked is dropped by the task that polled it.
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The body as read by the connection.
#[derive(Debug)]
pub(super) struct ResponseBody(Arc<ResponseSlot>);

impl ResponseBody {
    /// Creates the body of a new request; dropping it ends the request.
    pub(super) fn begin(slot: Arc<ResponseSlot>, in_flight: InFlight) -> Self {
        slot.content().in_flight = Some(in_flight);
        Self(slot)
    }

    /// Sets the content, once the head exists.
    pub(super) fn fill(&self, body: Body) {
        self.0.is_started.store(true, Ordering::Release);
        let mut content = self.0.content();
        // Checked under the lock: a body that is filled in after `release` would never be dropped.
        if !self.0.is_cut() {
            content.body = Some(body);
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
        if content.body.is_none() {
            let cut = self.0.is_cut().then(|| Err(axum::Error::new("the response was cut")));
            return Poll::Ready(cut);
        }
        let polled = content.poll_frame(context);
        content.unread_since = matches!(polled, Poll::Ready(Some(Ok(_)))).then(Instant::now);
        drop(content);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.0.empty();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        let content = self.0.content();
        let is_over = |body: &Body| body.is_end_stream() && content.rest.is_empty();
        content.body.as_ref().map_or_else(|| !self.0.is_cut(), is_over)
    }

    fn size_hint(&self) -> SizeHint {
        let content = self.0.content();
        let Some(body) = &content.body else { return SizeHint::new() };
        let (hint, rest) = (body.size_hint(), content.rest.len() as u64);
        let mut with_rest = SizeHint::new();
        with_rest.set_lower(hint.lower() + rest);
        if let Some(upper) = hint.upper() {
            with_rest.set_upper(upper + rest);
        }
        with_rest
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        self.0.empty();
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::accept::state::ConnectionState;

    #[test]
    fn a_long_frame_is_split_and_the_length_stays_right() {
        let whole: Vec<u8> = (0..FRAME_BYTES * 2 + 5).map(|at| at as u8).collect();
        let (_slot, mut body) = Arc::new(ConnectionState::new()).begin(http::Version::HTTP_11);
        body.fill(Body::from(whole.clone()));
        let mut context = Context::from_waker(Waker::noop());
        let (mut read, mut lengths) = (Vec::new(), Vec::new());
        while !body.is_end_stream() {
            assert_eq!(body.size_hint().exact(), Some((whole.len() - read.len()) as u64));
            let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut body).poll_frame(&mut context) else { panic!() };
            let data = frame.into_data().expect("it is data");
            lengths.push(data.len());
            read.extend_from_slice(&data);
        }
        assert_eq!((read, lengths), (whole, vec![FRAME_BYTES, FRAME_BYTES, 5]));
    }
}
