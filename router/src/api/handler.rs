//! Handles one generation request over HTTP, from request head to response head, in the format of its API
//! ([`ApiFormat`]).

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, HeaderValue};
use serde::de::DeserializeOwned;
use speculation::FinishReason;

use super::incoming::{
    RequestHead, authenticate, identity_from_headers, read_head, read_object, task_type_from_headers,
};
use super::openai::logprobs::json_bytes;
use super::openai::respond::OpenAi;
use super::request_id::REQUEST_ID;
use crate::detokenize::OutputToken;
use crate::error::RouterError;
use crate::metrics::Protocol;
use crate::pipeline::buffer_memory::MemoryReservation;
use crate::pipeline::deadline::Deadline;
use crate::pipeline::text_stream::TextStream;
use crate::pipeline::{AppState, RequestContext, run_caught, start_request};
use crate::request::gateway::Slo;
use crate::request::record::RequestRecord;
use crate::request::{Caller, Operation, RawRequest, new_id, span};

/// The format of one API: request bodies and responses.
pub(super) trait ApiFormat: Send + Sync {
    /// A request body, not checked yet.
    type Body: DeserializeOwned + Send;
    /// Properties of the request that the response depends on.
    type Options: Send;

    /// Kind of request.
    fn operation(&self) -> Operation;

    /// Prefix of response ids.
    fn id_prefix(&self) -> &'static str;

    /// Converts a body to the common request.
    fn parse(
        &self,
        body: Self::Body,
        context: BodyContext<'_>,
    ) -> Result<(RawRequest, Self::Options), RouterError>;

    /// Answers a request that has started. For a stream this returns at once.
    fn respond(
        &self,
        state: &AppState,
        text: TextStream,
        options: Self::Options,
    ) -> impl Future<Output = Result<Response, RouterError>> + Send;
}

/// Context of a request body.
pub(super) struct BodyContext<'a> {
    /// Shared state.
    pub(super) state: &'a AppState,
    /// The authenticated caller.
    pub(super) caller: &'a Caller,
    /// Task type from the header.
    pub(super) task_type: Option<String>,
}

/// Answers one request; the id of the response identifies the request unless the client sent an id. A panic
/// fails only this request.
pub(super) async fn handle_request<F: ApiFormat>(
    state: AppState,
    api_format: F,
    request: Request,
) -> Response {
    let request_id = new_id(api_format.id_prefix());
    let request_id_header =
        HeaderValue::from_str(&request_id).expect("an id is letters, digits and an underscore");
    let kind = (Protocol::Http, api_format.operation());
    let context = RequestContext::open(&state, kind, request_id, request.headers(), request.extensions());
    let span = context.record.span().clone();
    if let Ok(identity) = identity_from_headers(request.headers()) {
        span::record_identity(&span, identity.request_id, identity.session_id);
    }

    let work = respond_to(&state, &api_format, request, context);
    let mut response = run_caught(span, work).await.unwrap_or_else(RouterError::into_response);
    response.headers_mut().insert(REQUEST_ID, request_id_header);
    response
}

async fn respond_to<F: ApiFormat>(
    state: &AppState,
    api_format: &F,
    request: Request,
    mut context: RequestContext,
) -> Result<Response, RouterError> {
    match parse_request(state, api_format, request, &mut context.record).await {
        Ok(ParsedRequest { raw_request, options, caller, deadline, slo }) => {
            context.deadline = deadline;
            context.record.set_slo(slo);
            let result = match start_request(state, raw_request, &caller, context).await {
                Ok(text) => api_format.respond(state, text, options).await,
                Err(error) => Err(error),
            };
            let mut response = result.unwrap_or_else(RouterError::into_response);
            write_rate_limit_headers(&caller, response.headers_mut());
            Ok(response)
        }
        Err(error) => Err(context.refuse(error)),
    }
}

fn write_rate_limit_headers(caller: &Caller, headers: &mut HeaderMap) {
    if let Some(usage) = &caller.usage {
        usage.write_headers(headers);
    }
}

/// A request as it was sent.
struct ParsedRequest<F> {
    raw_request: RawRequest,
    options: F,
    caller: Caller,
    deadline: Option<Deadline>,
    slo: Slo,
}

async fn parse_request<F: ApiFormat>(
    state: &AppState,
    api_format: &F,
    request: Request,
    record: &mut RequestRecord,
) -> Result<ParsedRequest<F::Options>, RouterError> {
    let (head, body): (_, Body) = request.into_parts();
    let caller = authenticate(state, &head.headers)?;
    record.sent_by(&caller);
    let RequestHead { caller, slo, deadline } = read_head(state, caller, &head.headers)?;
    identity_from_headers(&head.headers)?;
    let memory = state.body_memory.reserve(caller.fair_queue_key());
    let body = read_object(memory, &head.headers, body, deadline).await?;
    let context = BodyContext { state, caller: &caller, task_type: task_type_from_headers(&head.headers)? };
    let (raw_request, options) = api_format.parse(body, context)?;
    Ok(ParsedRequest { raw_request, options, caller, deadline, slo })
}

/// Reads a chat completion request in OpenAI's format, with its caller and deadline, for handlers that answer
/// in their own format.
pub(crate) async fn read_chat(
    state: &AppState,
    request: Request,
    record: &mut RequestRecord,
) -> Result<(RawRequest, Caller, Option<Deadline>), RouterError> {
    let ParsedRequest { raw_request, caller, deadline, .. } =
        parse_request(state, &OpenAi(Operation::Chat), request, record).await?;
    Ok((raw_request, caller, deadline))
}

/// The whole output of a single choice.
pub(super) struct CollectedOutput {
    pub(super) text: String,
    /// Kept only if log probabilities are requested.
    pub(super) tokens: Vec<OutputToken>,
    pub(super) finish: FinishReason,
    /// The memory reserved for it.
    pub(super) reservation: MemoryReservation,
}

/// Collects the whole output of a single choice.
pub(super) async fn collect_output(
    state: &AppState,
    text: &mut TextStream,
) -> Result<CollectedOutput, RouterError> {
    let mut reservation = state.response_memory.reserve();
    let (mut output, mut tokens, mut finish) = (String::new(), Vec::new(), None);
    let keeps_tokens = text.info().logprobs;
    while let Some(delta) = text.next().await {
        let delta = delta?;
        let token_bytes = if keeps_tokens { json_bytes(&delta.tokens) } else { 0 };
        reservation.grow(delta.text.len() + token_bytes).inspect_err(|error| text.fail(error))?;
        output.push_str(&delta.text);
        if keeps_tokens {
            tokens.extend(delta.tokens);
        }
        finish = finish.or(delta.finish);
    }
    let finish = finish.ok_or_else(unfinished)?;
    Ok(CollectedOutput { text: output, tokens, finish, reservation })
}

/// The error for a stream that ended without the finish reason of a choice.
pub(super) fn unfinished() -> RouterError {
    RouterError::Internal("the stream ended before its choice finished".into())
}
