//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`. A body becomes the same request as a chat
//! completion's ([`body`], [`blocks`]), and the text becomes one message or its stream of events
//! ([`answer`]). The list of models has a format of its own, too ([`models`]).

mod answer;
mod blocks;
mod body;
pub(super) mod models;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Json, Response};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use serde_json::json;

use self::answer::{ErrorMessage, Message, MessageEvents, StopReason};
use self::body::{Body, MessageOptions};
use super::buffered_response::buffered_response;
use super::handler::{ApiFormat, BodyContext, CollectedOutput, collect_output, handle_request};
use super::json::to_json;
use super::parsed_output::ParsedOutput;
use super::sse;
use super::tokenizer_request::TokenizerRequest;
use crate::error::RouterError;
use crate::pipeline::AppState;
use crate::pipeline::text_stream::TextStream;
use crate::request::{Operation, RawRequest};

/// Path of this API; others begin with it and a slash.
const PATH: &str = "/v1/messages";

/// Anthropic's header for the request id.
const OWN_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// `POST /v1/messages`.
pub(super) async fn create(State(state): State<AppState>, request: Request) -> Response {
    handle_request(state, Messages, request).await
}

/// `POST /v1/messages/count_tokens`.
pub(super) async fn count_tokens(
    State(state): State<AppState>,
    request: Request,
) -> Result<Response, RouterError> {
    let (request, mut body): (_, Body) = TokenizerRequest::read(&state, request).await?;
    // Required by the body's checks, but counting produces no output.
    body.max_tokens = body.max_tokens.or(Some(1));
    let (raw_request, _) = body.into_request(None)?;
    let input_tokens = request.count_tokens(&state, raw_request).await?;
    Ok(Json(json!({ "input_tokens": input_tokens })).into_response())
}

/// Whether a request belongs to this API, also at paths without a route.
pub(super) fn is_own_request(path: &str, headers: &HeaderMap) -> bool {
    is_at_or_below(path, PATH) || models::is_own_request(path, headers)
}

/// Whether a path is `parent` or one below it.
fn is_at_or_below(path: &str, parent: &str) -> bool {
    path.strip_prefix(parent).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Adds the id of the request under Anthropic's name, and gives an error Anthropic's format.
pub(super) fn complete(mut response: Response, request_id: HeaderValue) -> Response {
    if let Some(error) = response.extensions_mut().remove::<RouterError>() {
        let (mut head, _) = response.into_parts();
        head.headers.remove(header::CONTENT_LENGTH);
        let body = ErrorMessage::new(&error).with_request_id(request_id.to_str().unwrap_or_default());
        response = (head, Json(body)).into_response();
    }
    response.headers_mut().insert(OWN_REQUEST_ID, request_id);
    response
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
        let collected = collect_output(state, &mut text).await?;
        let CollectedOutput { text: output_text, finish, reservation, .. } = collected;
        let output = ParsedOutput::parse(&text.info().output, &output_text);
        let stop = StopReason::new(finish, output.has_calls(), text.stop_string(0));
        let message = Message::complete(text.info(), output.parts(), stop, &text.usage());
        Ok(buffered_response(to_json(&message), reservation))
    }
}
