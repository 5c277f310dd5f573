//! A request body with a timeout that applies until the response begins. A bidirectional stream responds at
//! once and has no limit.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep};

use super::response::ResponseSlot;

/// Why reading a request body failed: it did not arrive in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the request's body did not arrive within {} s", .limit.as_secs_f64())]
pub struct BodyTimedOut {
    /// Maximum time.
    pub limit: Duration,
}

impl BodyTimedOut {
    /// Finds this error among an error's causes: layers wrap it.
    pub fn find<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Self> {
        anyhow::Chain::new(error).find_map(|cause| cause.downcast_ref::<Self>())
    }
}

/// The body as read by a handler.
pub(super) struct RequestBody {
    body: Incoming,
    answer: Arc<ResponseSlot>,
    timeout: Duration,
    /// Started when the handler first waits for data.
    timer: Option<Pin<Box<Sleep>>>,
}

impl RequestBody {
    pub(super) fn new(body: Incoming, answer: Arc<ResponseSlot>, timeout: Duration) -> Self {
        Self { body, answer, timeout, timer: None }
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame.map(|frame| frame.map_err(axum::Error::new)));
        }
        if self.answer.is_started() {
            return Poll::Pending;
        }
        let timeout = self.timeout;
        ready!(self.timer.get_or_insert_with(|| Box::pin(sleep(timeout))).as_mut().poll(context));
        Poll::Ready(Some(Err(axum::Error::new(BodyTimedOut { limit: timeout }))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
