//! [`OpenAi`]: writes text in OpenAI's format, as one JSON object (`full_response`) or as chunks (`chunk`).
//! Must not withhold text: that is decided in [`crate::detokenize`].

use std::time::Duration;

use axum::response::Response;

use super::body::{Body, CompletionOptions};
use super::chunk::ChunkWriter;
use super::full_response;
use crate::api::handler::{ApiFormat, BodyContext};
use crate::api::sse;
use crate::error::RouterError;
use crate::pipeline::AppState;
use crate::pipeline::text_stream::TextStream;
use crate::request::{Operation, RawRequest};

/// Keep-alive interval of a stream: proxies close idle connections after 30 s or more.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Chat completions and completions.
pub(in crate::api) struct OpenAi(pub(in crate::api) Operation);

impl ApiFormat for OpenAi {
    type Body = Body;
    type Options = CompletionOptions;

    fn operation(&self) -> Operation {
        self.0
    }

    fn id_prefix(&self) -> &'static str {
        self.0.id_prefix()
    }

    fn parse(
        &self,
        body: Body,
        context: BodyContext<'_>,
    ) -> Result<(RawRequest, CompletionOptions), RouterError> {
        body.into_request(self.0, context.task_type)
    }

    async fn respond(
        &self,
        state: &AppState,
        text: TextStream,
        options: CompletionOptions,
    ) -> Result<Response, RouterError> {
        if options.stream.is_some() {
            let chunks = ChunkWriter::new(self.0, options, text.info());
            return Ok(sse::respond(text, chunks, state.keep_alive));
        }
        full_response::respond(text, (self.0, options), state.response_memory.reserve()).await
    }
}
