//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`. A body becomes the same request as a chat
//! completion's ([`body`], [`blocks`]), and the text becomes one message or its stream of events
//! ([`answer`]).

mod answer;
mod blocks;
mod body;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Json, Response};
use http::HeaderName;
use serde_json::json;

use self::answer::{ErrorMessage, Message, MessageEvents, StopReason};
use self::body::{Body, MessageOptions};
use super::handler::{
    ApiFormat, BodyContext, REQUEST_ID, collect_text, handle_request, json_response, write_retry_headers,
};
use super::incoming::{authenticate, deadline_from_headers, read_object};
use super::parsed_output::ParsedOutput;
use super::sse;
use crate::error::RouterError;
use crate::pipeline::text_stream::TextStream;
use crate::pipeline::{AppState, render};
use crate::request::{Operation, RawRequest};

/// Anthropic's header for the request id.
const OWN_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// `POST /v1/messages`.
pub(super) async fn create(State(state): State<AppState>, request: Request) -> Response {
    let mut response = handle_request(state, Messages, request).await;
    if let Some(id) = response.headers().get(REQUEST_ID).cloned() {
        response.headers_mut().insert(OWN_REQUEST_ID, id);
    }
    response
}

/// `POST /v1/messages/count_tokens`.
pub(super) async fn count_tokens(State(state): State<AppState>, request: Request) -> Response {
    counted(&state, request).await.unwrap_or_else(|error| Messages.error_response(&error))
}

async fn counted(state: &AppState, request: Request) -> Result<Response, RouterError> {
    let (head, body) = request.into_parts();
    let caller = authenticate(state, &head.headers)?;
    let mut body: Body = read_object(&head.headers, body, deadline_from_headers(&head.headers)?).await?;
    let _running = caller.usage.as_ref().map(|usage| usage.acquire()).transpose()?;
    // Required by the body's checks, but counting produces no output.
    body.max_tokens = body.max_tokens.or(Some(1));
    let (raw_request, _) = body.into_request(None)?;
    let rendered = render(state, raw_request, &caller).await?;
    let input_tokens: usize = rendered.prompts.iter().map(|(prompt, _)| prompt.ids.len()).sum();
    Ok(Json(json!({ "input_tokens": input_tokens })).into_response())
}

struct Messages;

impl ApiFormat for Messages {
    type Body = Body;
    type Options = MessageOptions;

    fn operation(&self) -> Operation {
        Operation::Chat
    }

    fn id_prefix(&self) -> &'static str {
        "msg_"
    }

    fn parse(
        &self,
        body: Body,
        context: BodyContext<'_>,
    ) -> Result<(RawRequest, MessageOptions), RouterError> {
        body.into_request(context.task_type)
    }

    async fn respond(
        &self,
        state: &AppState,
        mut text: TextStream,
        options: MessageOptions,
    ) -> Result<Response, RouterError> {
        if options.stream {
            let writer = MessageEvents::new(text.info());
            return Ok(sse::respond(text, writer, state.keep_alive));
        }
        let (output_text, finish, _reservation) = collect_text(state, &mut text).await?;
        let output = ParsedOutput::parse(&text.info().output, &output_text);
        let stop = StopReason::new(finish, output.has_calls(), text.stop_string(0));
        let message = Message::complete(text.info(), output.parts(), stop, &text.usage());
        let json = serde_json::to_string(&message).expect("text, numbers and lists of them are serializable");
        Ok(json_response(json))
    }

    fn error_response(&self, error: &RouterError) -> Response {
        let mut response = (error.mapping().status, Json(ErrorMessage::new(error))).into_response();
        write_retry_headers(error, response.headers_mut());
        response
    }
}
