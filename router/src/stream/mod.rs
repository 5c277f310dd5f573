//! Text to what an HTTP client reads: one JSON answer (`whole`), or server-sent events (`sse`). Must never hold text
//! back: that is decided in [`crate::token_span`].

mod chunk;
mod sse;
mod whole;

use axum::response::Response;

use crate::error::RouterError;
use crate::ingress::Operation;
use crate::ingress::openai::body::AnswerForm;
use crate::token_span::text_stream::TextStream;

/// Answers a request that has started. For a stream this returns at once, and the text follows; a whole answer is
/// awaited.
pub async fn respond(
    text: TextStream,
    operation: Operation,
    form: AnswerForm,
) -> Result<Response, RouterError> {
    match form.stream {
        Some(form) => Ok(sse::respond(text, operation, form)),
        None => whole::respond(text, operation).await,
    }
}
