//! A response as server-sent events: a `data:` line a chunk, comments while nothing comes, `[DONE]` at the end. An error
//! after the first byte is an event with OpenAI's error object.
//!
//! Whatever is ready goes out in one write: the write is the dearest part of an event. It must never wait for more than is there.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use futures::stream;
use http::{HeaderValue, header};
use tokio::time::{Instant, Sleep, sleep_until};

use super::chunk::{ChunkWriter, event};
use super::error::ErrorBody;
use crate::pipeline::text_stream::TextStream;

/// What a client hears that would hear nothing else for too long.
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

const DONE: &[u8] = b"data: [DONE]\n\n";

/// Events of a client that was slow go out together, up to about so many bytes.
const WRITE_BYTES: usize = 16 << 10;

/// Most events are no longer.
const USUAL_EVENT_BYTES: usize = 384;

struct EventWriter {
    text: TextStream,
    chunks: ChunkWriter,
    silence: Silence,
    ended: bool,
}

pub(super) fn respond(text: TextStream, chunks: ChunkWriter, keep_alive: Duration) -> Response {
    let mut writer = EventWriter { text, chunks, silence: Silence::new(keep_alive), ended: false };
    let events = stream::poll_fn(move |context| {
        writer.poll_events(context).map(|events| events.map(Ok::<_, Infallible>))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, Body::from_stream(events)).into_response()
}

impl EventWriter {
    /// The events that are ready.
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let mut events = Vec::new();
        while !self.ended && events.len() < WRITE_BYTES {
            let Poll::Ready(next) = self.text.poll_next(context) else { break };
            events.reserve(USUAL_EVENT_BYTES);
            match next {
                Some(Ok(delta)) => {
                    let of = (self.text.info(), self.text.model().vocabulary());
                    self.chunks.piece(of, delta, &mut events);
                }
                Some(Err(error)) => {
                    event(&ErrorBody::from(&error), &mut events);
                    self.end(&mut events);
                }
                None => {
                    self.chunks.usage(self.text.info(), &self.text.usage(), &mut events);
                    self.end(&mut events);
                }
            }
        }
        if events.is_empty() {
            return self.silence.poll_too_long(context).map(|()| Some(Bytes::from_static(KEEP_ALIVE)));
        }
        self.silence.broken();
        Poll::Ready(Some(events.into()))
    }

    fn end(&mut self, events: &mut Vec<u8>) {
        events.extend_from_slice(DONE);
        self.ended = true;
    }
}

/// Watches how long nothing was said. Its timer is moved when it fires and not with every event.
struct Silence {
    most: Duration,
    since: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Silence {
    fn new(most: Duration) -> Self {
        let since = Instant::now();
        Self { most, since, timer: Box::pin(sleep_until(since + most)) }
    }

    fn broken(&mut self) {
        self.since = Instant::now();
    }

    fn poll_too_long(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(context));
            let is_over = self.timer.deadline() >= self.since + self.most;
            if is_over {
                self.broken();
            }
            let due = self.since + self.most;
            self.timer.as_mut().reset(due);
            if is_over {
                return Poll::Ready(());
            }
        }
    }
}
