//! A response as server-sent events: a `data:` line a chunk, comments while nothing comes, `[DONE]` at the end. An error
//! after the first byte is an event with OpenAI's error object.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;

use super::chunk::{ChunkWriter, json};
use crate::ingress::Operation;
use crate::ingress::openai::body::StreamForm;
use crate::ingress::openai::error::ErrorBody;
use crate::token_span::text_stream::TextStream;

/// How long a client may hear nothing: proxies cut silent connections after 30 s and more.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

const DONE: &str = "[DONE]";

struct EventWriter {
    text: TextStream,
    chunks: ChunkWriter,
    ready: VecDeque<String>,
    ended: bool,
}

pub(super) fn respond(text: TextStream, operation: Operation, form: StreamForm) -> Response {
    let chunks = ChunkWriter::new(operation, form, text.info());
    let writer = EventWriter { text, chunks, ready: VecDeque::new(), ended: false };
    let events = stream::unfold(writer, |mut writer| async {
        let data = writer.next().await?;
        Some((Ok::<_, Infallible>(Event::default().data(data)), writer))
    });
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE_INTERVAL).text("keep-alive");
    Sse::new(events).keep_alive(keep_alive).into_response()
}

impl EventWriter {
    /// The data of the next event.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Some(data);
            }
            if self.ended {
                return None;
            }
            match self.text.next().await {
                Some(Ok(delta)) => {
                    let vocabulary = self.text.model().vocabulary();
                    self.ready.extend(self.chunks.piece(self.text.info(), vocabulary, delta));
                }
                Some(Err(error)) => {
                    self.ready.push_back(json(&ErrorBody::from(&error)));
                    self.end();
                }
                None => {
                    self.ready.extend(self.chunks.usage(self.text.info(), &self.text.usage()));
                    self.end();
                }
            }
        }
    }

    fn end(&mut self) {
        self.ready.push_back(DONE.to_owned());
        self.ended = true;
    }
}
