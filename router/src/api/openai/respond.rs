//! Text to what an HTTP client reads: one JSON answer (`whole`), or server-sent events (`sse`). Must never hold text
//! back: that is decided in [`crate::detokenize`].

use std::time::Duration;

use axum::response::Response;

use super::body::AnswerForm;
use super::chunk::ChunkWriter;
use super::{sse, whole};
use crate::error::RouterError;
use crate::pipeline::AppState;
use crate::pipeline::text_stream::TextStream;
use crate::request::Operation;

/// How long a client may hear nothing: proxies cut silent connections after 30 s and more.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Answers a request that has started. For a stream this returns at once, and the text follows; a whole answer is
/// awaited. A client that reads a stream hears nothing for the state's `keep_alive` at most.
pub async fn respond(
    state: &AppState,
    text: TextStream,
    operation: Operation,
    form: AnswerForm,
) -> Result<Response, RouterError> {
    match form.stream {
        Some(form) => {
            let chunks = ChunkWriter::new(operation, form, text.info());
            Ok(sse::respond(text, chunks, state.keep_alive))
        }
        None => whole::respond(text, operation, state.answer_memory.begin()).await,
    }
}
