//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`. A body becomes the same request as a chat
//! completion's ([`body`], [`blocks`]), and the text becomes one message or its stream of events
//! ([`answer`]).

mod answer;
mod blocks;
mod body;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Json, Response};
use http::{HeaderName, HeaderValue, header};
use serde_json::json;

use self::answer::{ErrorMessage, Message, MessageEvents, StopReason};
use self::body::{Body, MessageForm};
use super::answer::Answer;
use super::exchange::{Asked, Dialect, REQUEST_ID, collect, exchange, json_response};
use super::incoming::{authenticate, deadline_of, read_object};
use super::sse;
use crate::error::RouterError;
use crate::pipeline::text_stream::TextStream;
use crate::pipeline::{AppState, render};
use crate::request::{Operation, SentRequest};

/// Anthropic's header for the request id.
const OWN_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// `POST /v1/messages`.
pub(super) async fn create(State(state): State<AppState>, request: Request) -> Response {
    let mut response = exchange(state, Messages, request).await;
    if let Some(id) = response.headers().get(REQUEST_ID).cloned() {
        response.headers_mut().insert(OWN_REQUEST_ID, id);
    }
    response
}

/// `POST /v1/messages/count_tokens`.
pub(super) async fn count_tokens(State(state): State<AppState>, request: Request) -> Response {
    counted(&state, request).await.unwrap_or_else(|error| Messages.refuse(&error))
}

async fn counted(state: &AppState, request: Request) -> Result<Response, RouterError> {
    let (head, body) = request.into_parts();
    let caller = authenticate(state, &head.headers)?;
    let mut body: Body = read_object(&head.headers, body, deadline_of(&head.headers)?).await?;
    let _running = caller.usage.as_ref().map(|usage| usage.begin()).transpose()?;
    // Required by the body's checks, but counting produces no output.
    body.max_tokens = body.max_tokens.or(Some(1));
    let (sent, _) = body.into_sent(None)?;
    let rendered = render(state, sent, &caller).await?;
    let input_tokens: usize = rendered.prompts.iter().map(|(prompt, _)| prompt.ids.len()).sum();
    Ok(Json(json!({ "input_tokens": input_tokens })).into_response())
}

struct Messages;

impl Dialect for Messages {
    type Body = Body;
    type Form = MessageForm;

    fn operation(&self) -> Operation {
        Operation::Chat
    }

    fn id_prefix(&self) -> &'static str {
        "msg_"
    }

    fn read(&self, body: Body, asked: Asked<'_>) -> Result<(SentRequest, MessageForm), RouterError> {
        body.into_sent(asked.task_type)
    }

    async fn respond(
        &self,
        state: &AppState,
        mut text: TextStream,
        form: MessageForm,
    ) -> Result<Response, RouterError> {
        if form.stream {
            let writer = MessageEvents::new(text.info());
            return Ok(sse::respond(text, writer, state.keep_alive));
        }
        let (said, finish, _hold) = collect(state, &mut text).await?;
        let answer = Answer::whole(&text.info().output, &said);
        let stop = StopReason::of(finish, answer.has_calls(), text.stop_string(0));
        let message = Message::whole(text.info(), answer.parts(), stop, &text.usage());
        let json = serde_json::to_string(&message).expect("text, numbers and lists of them are serializable");
        Ok(json_response(json))
    }

    fn refuse(&self, error: &RouterError) -> Response {
        let mut response = (error.meaning().status, Json(ErrorMessage::of(error))).into_response();
        if let Some(seconds) = error.retry_after_seconds() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
