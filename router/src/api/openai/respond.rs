//! [`OpenAi`]: writes text in OpenAI's format, as one JSON object (`whole`) or as chunks (`chunk`).
//! Must not withhold text: that is decided in [`crate::detokenize`].

use std::time::Duration;

use axum::response::Response;

use super::body::{AnswerForm, Body};
use super::chunk::ChunkWriter;
use super::error::ErrorBody;
use super::whole;
use crate::api::exchange::{Asked, Dialect};
use crate::api::sse;
use crate::error::RouterError;
use crate::pipeline::AppState;
use crate::pipeline::text_stream::TextStream;
use crate::request::{Operation, SentRequest};

/// Keep-alive interval of a stream: proxies close idle connections after 30 s or more.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Chat completions and completions.
pub(in crate::api) struct OpenAi(pub(in crate::api) Operation);

impl Dialect for OpenAi {
    type Body = Body;
    type Form = AnswerForm;

    fn operation(&self) -> Operation {
        self.0
    }

    fn id_prefix(&self) -> &'static str {
        self.0.id_prefix()
    }

    fn read(&self, body: Body, asked: Asked<'_>) -> Result<(SentRequest, AnswerForm), RouterError> {
        body.into_sent(self.0, asked.task_type)
    }

    async fn respond(
        &self,
        state: &AppState,
        text: TextStream,
        form: AnswerForm,
    ) -> Result<Response, RouterError> {
        if form.stream.is_some() {
            let chunks = ChunkWriter::new(self.0, form, text.info());
            return Ok(sse::respond(text, chunks, state.keep_alive));
        }
        whole::respond(text, (self.0, form), state.answer_memory.begin()).await
    }

    fn refuse(&self, error: &RouterError) -> Response {
        ErrorBody::respond(error)
    }
}
