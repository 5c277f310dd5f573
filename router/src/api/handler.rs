//! Handles one generation request over HTTP, from request head to response head, in the format of its API
//! ([`ApiFormat`]).

use std::panic::AssertUnwindSafe;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use futures::FutureExt as _;
use http::{HeaderMap, HeaderValue};
use serde::de::DeserializeOwned;
use service::accept::ResponseHandle;
use service::telemetry;
use speculation::FinishReason;
use tracing::Instrument as _;

use super::incoming::{RequestHead, identity_from_headers, read_head, read_object, task_type_from_headers};
use super::openai::respond::OpenAi;
use super::request_id::REQUEST_ID;
use crate::error::RouterError;
use crate::metrics::Protocol;
use crate::pipeline::deadline::Deadline;
use crate::pipeline::response_memory::MemoryReservation;
use crate::pipeline::text_stream::TextStream;
use crate::pipeline::{AppState, RequestContext, start_request};
use crate::request::gateway::Slo;
use crate::request::record::RequestRecord;
use crate::request::{Caller, Operation, RawRequest, span};

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
    let span = span::open(Protocol::Http, api_format.operation());
    telemetry::set_parent_from_headers(&span, request.headers());
    let request_id = new_id(api_format.id_prefix());
    let request_id_header =
        HeaderValue::from_str(&request_id).expect("an id is letters, digits and an underscore");
    span::record_id(&span, &request_id);
    let record = RequestRecord::new(Protocol::Http, span.clone(), &state.metrics);
    if let Ok(identity) = identity_from_headers(request.headers()) {
        span::record_identity(&span, identity.request_id, identity.session_id);
    }

    let work = respond_to(&state, &api_format, request, request_id, record).instrument(span);
    let mut response = catch_panic(work).await.unwrap_or_else(RouterError::into_response);
    response.headers_mut().insert(REQUEST_ID, request_id_header);
    response
}

/// Runs a request's handler; a panic becomes an error.
pub(super) fn catch_panic<T>(
    work: impl Future<Output = Result<T, RouterError>>,
) -> impl Future<Output = Result<T, RouterError>> {
    AssertUnwindSafe(work).catch_unwind().map(|outcome| {
        outcome.unwrap_or_else(|_| Err(RouterError::Internal("the request handler panicked".into())))
    })
}

/// Creates a new id.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}{}", uuid::Uuid::now_v7().simple())
}

async fn respond_to<F: ApiFormat>(
    state: &AppState,
    api_format: &F,
    request: Request,
    request_id: String,
    mut record: RequestRecord,
) -> Result<Response, RouterError> {
    let response = request.extensions().get::<ResponseHandle>().cloned();
    match parse_request(state, api_format, request).await {
        Ok(ParsedRequest { raw_request, options, caller, deadline, slo }) => {
            record.set_slo(slo);
            let request_context = RequestContext { request_id, deadline, response, record };
            let result = match start_request(state, raw_request, &caller, request_context).await {
                Ok(text) => api_format.respond(state, text, options).await,
                Err(error) => Err(error),
            };
            let mut response = result.unwrap_or_else(RouterError::into_response);
            write_rate_limit_headers(&caller, response.headers_mut());
            Ok(response)
        }
        Err(error) => {
            record.failed(&error);
            Err(error)
        }
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
) -> Result<ParsedRequest<F::Options>, RouterError> {
    let (head, body): (_, Body) = request.into_parts();
    let RequestHead { caller, slo, deadline } = read_head(state, &head.headers)?;
    identity_from_headers(&head.headers)?;
    let body = read_object(&head.headers, body, deadline).await?;
    let context = BodyContext { state, caller: &caller, task_type: task_type_from_headers(&head.headers)? };
    let (raw_request, options) = api_format.parse(body, context)?;
    Ok(ParsedRequest { raw_request, options, caller, deadline, slo })
}

/// Reads a chat completion request in OpenAI's format, with its caller and deadline, for handlers that answer
/// in their own format.
pub(crate) async fn read_chat(
    state: &AppState,
    request: Request,
) -> Result<(RawRequest, Caller, Option<Deadline>), RouterError> {
    let ParsedRequest { raw_request, caller, deadline, .. } =
        parse_request(state, &OpenAi(Operation::Chat), request).await?;
    Ok((raw_request, caller, deadline))
}

/// Collects the whole text of a single choice. Returns it with its finish reason and with the memory reserved
/// for it.
pub(super) async fn collect_text(
    state: &AppState,
    text: &mut TextStream,
) -> Result<(String, FinishReason, MemoryReservation), RouterError> {
    let mut reservation = state.response_memory.reserve();
    let (mut output, mut finish) = (String::new(), None);
    while let Some(delta) = text.next().await {
        let delta = delta?;
        reservation.grow(delta.text.len()).inspect_err(|error| text.fail(error))?;
        output.push_str(&delta.text);
        finish = finish.or(delta.finish);
    }
    Ok((output, finish.ok_or_else(unfinished)?, reservation))
}

/// The error for a stream that ended without the finish reason of a choice.
pub(super) fn unfinished() -> RouterError {
    RouterError::Internal("the stream ended before its choice finished".into())
}
