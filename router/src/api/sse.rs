//! A response as server-sent events: events while text arrives, comments while there is none. The API defines
//! the events ([`EventEncoder`]). An error after the first byte is an event too.
//!
//! All ready deltas are written at once, because the write is the most expensive part of an event. The writer
//! must never wait for more than is ready.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use futures::stream;
use http::{HeaderName, HeaderValue, header};
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep_until};

use super::json::SERIALIZABLE;
use crate::error::RouterError;
use crate::pipeline::text_delta::TextDelta;
use crate::pipeline::text_stream::TextStream;

/// Tells nginx to pass each event on at once.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Comment that keeps an idle stream alive.
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// Approximate limit of one write, reached when the client is slow.
const WRITE_BYTES: usize = 16 << 10;

/// Capacity reserved per event; most events are shorter.
const USUAL_EVENT_BYTES: usize = 384;

/// Event format of one API. Each method appends to `events`.
pub(super) trait EventEncoder: Send + 'static {
    /// Before the first delta.
    fn on_start(&mut self, text: &TextStream, events: &mut Vec<u8>);

    /// For a delta of a choice. An error ends the stream.
    fn on_delta(
        &mut self,
        text: &TextStream,
        delta: TextDelta,
        events: &mut Vec<u8>,
    ) -> Result<(), RouterError>;

    /// After the last delta.
    fn on_end(&mut self, text: &TextStream, events: &mut Vec<u8>);

    /// In place of the rest of the stream, after an error.
    fn on_error(&mut self, text: &TextStream, error: &RouterError, events: &mut Vec<u8>);
}

/// Appends an event without a name.
pub(super) fn write_event<T: Serialize>(data: &T, events: &mut Vec<u8>) {
    events.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *events, data).expect(SERIALIZABLE);
    events.extend_from_slice(b"\n\n");
}

/// Appends an event with this name.
pub(super) fn write_named_event<T: Serialize>(name: &str, data: &T, events: &mut Vec<u8>) {
    events.extend_from_slice(b"event: ");
    events.extend_from_slice(name.as_bytes());
    events.push(b'\n');
    write_event(data, events);
}

struct EventWriter<E> {
    text: TextStream,
    writer: E,
    idle_timer: IdleTimer,
    started: bool,
    ended: bool,
}

/// Streams a response, with a keep-alive comment after `keep_alive` without an event.
pub(super) fn respond(text: TextStream, writer: impl EventEncoder, keep_alive: Duration) -> Response {
    let idle_timer = IdleTimer::new(keep_alive);
    let mut writer = EventWriter { text, writer, idle_timer, started: false, ended: false };
    let events = stream::poll_fn(move |context| {
        writer.poll_events(context).map(|events| events.map(Ok::<_, Infallible>))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (ACCEL_BUFFERING, HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(events)).into_response()
}

impl<E: EventEncoder> EventWriter<E> {
    /// Returns the events that are ready.
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let mut events = Vec::new();
        if !std::mem::replace(&mut self.started, true) {
            self.writer.on_start(&self.text, &mut events);
        }
        while !self.ended && events.len() < WRITE_BYTES {
            let Poll::Ready(next) = self.text.poll_next(context) else { break };
            events.reserve(USUAL_EVENT_BYTES);
            let written = match next {
                Some(Ok(delta)) => {
                    let written = self.writer.on_delta(&self.text, delta, &mut events);
                    written.inspect_err(|error| self.text.fail(error))
                }
                Some(Err(error)) => Err(error),
                None => {
                    self.writer.on_end(&self.text, &mut events);
                    self.ended = true;
                    Ok(())
                }
            };
            if let Err(error) = written {
                self.writer.on_error(&self.text, &error, &mut events);
                self.ended = true;
            }
        }
        if events.is_empty() {
            return self.idle_timer.poll_elapsed(context).map(|()| Some(Bytes::from_static(KEEP_ALIVE)));
        }
        self.idle_timer.restart(self.text.last_token_at());
        Poll::Ready(Some(events.into()))
    }
}

/// Measures the time without events. The timer is reset when it fires, not on every event.
struct IdleTimer {
    timeout: Duration,
    idle_since: Instant,
    timer: Pin<Box<Sleep>>,
}

impl IdleTimer {
    fn new(timeout: Duration) -> Self {
        let idle_since = Instant::now();
        Self { timeout, idle_since, timer: Box::pin(sleep_until(idle_since + timeout)) }
    }

    /// Restarts the measurement: at the last token's time if it is new, else now.
    fn restart(&mut self, last_token_at: Option<Instant>) {
        self.idle_since = last_token_at.filter(|at| *at > self.idle_since).unwrap_or_else(Instant::now);
    }

    fn poll_elapsed(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(context));
            let is_elapsed = self.timer.deadline() >= self.idle_since + self.timeout;
            if is_elapsed {
                self.idle_since = Instant::now();
            }
            let due = self.idle_since + self.timeout;
            self.timer.as_mut().reset(due);
            if is_elapsed {
                return Poll::Ready(());
            }
        }
    }
}
