//! Handles one generation request over HTTP, from request head to response head, in the format of its API
//! ([`Dialect`]).

use std::panic::AssertUnwindSafe;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use futures::FutureExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use serde::de::DeserializeOwned;
use serde_json::Value;
use service::accept::ResponseHandle;
use service::telemetry;
use speculation::FinishReason;
use tracing::Instrument as _;

use super::incoming::{authenticate, deadline_of, identity_of, read_object, task_type_of, through_gateway};
use super::openai::respond::OpenAi;
use crate::error::RouterError;
use crate::metrics::Protocol;
use crate::pipeline::answer_memory::AnswerHold;
use crate::pipeline::deadline::Deadline;
use crate::pipeline::text_stream::TextStream;
use crate::pipeline::{AppState, Arrival, begin};
use crate::request::gateway::Slo;
use crate::request::record::RequestRecord;
use crate::request::{Caller, Operation, SentRequest, span};

/// Identifies a request: the client's id if it sent one, else the router's.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The format of one API: request bodies and responses.
pub(super) trait Dialect: Send + Sync {
    /// A request body, not checked yet.
    type Body: DeserializeOwned + Send;
    /// Properties of the request that the response depends on.
    type Form: Send;

    /// Kind of request.
    fn operation(&self) -> Operation;

    /// Prefix of response ids.
    fn id_prefix(&self) -> &'static str;

    /// Converts a body to the common request.
    fn read(&self, body: Self::Body, asked: Asked<'_>) -> Result<(SentRequest, Self::Form), RouterError>;

    /// Answers a request that has started. For a stream this returns at once.
    fn respond(
        &self,
        state: &AppState,
        text: TextStream,
        form: Self::Form,
    ) -> impl Future<Output = Result<Response, RouterError>> + Send;

    /// Returns an error in the API's format.
    fn refuse(&self, error: &RouterError) -> Response;
}

/// Context of a request body.
pub(super) struct Asked<'a> {
    /// Shared state.
    pub(super) state: &'a AppState,
    /// The authenticated caller.
    pub(super) caller: &'a Caller,
    /// Task type from the header.
    pub(super) task_type: Option<String>,
}

/// Answers one request. A panic fails only this request.
pub(super) async fn exchange<D: Dialect>(state: AppState, dialect: D, request: Request) -> Response {
    let span = span::open(Protocol::Http, dialect.operation());
    telemetry::set_parent_from_headers(&span, request.headers());
    let request_id = new_id(dialect.id_prefix());
    let own_id = HeaderValue::from_str(&request_id).expect("an id is letters, digits and an underscore");
    let record = RequestRecord::arrived(Protocol::Http, span.clone(), &state.metrics);
    let mut named = own_id;
    if let Ok(identity) = identity_of(request.headers()) {
        span::record_identity(&span, identity.request_id, identity.session_id);
        named = request.headers().get(REQUEST_ID).cloned().unwrap_or(named);
    }

    let answer = answer(&state, &dialect, request, request_id, record).instrument(span);
    let outcome = AssertUnwindSafe(answer).catch_unwind().await;
    let outcome =
        outcome.unwrap_or_else(|_| Err(RouterError::Internal("the request handler panicked".into())));
    let mut response = outcome.unwrap_or_else(|error| dialect.refuse(&error));
    response.headers_mut().insert(REQUEST_ID, named);
    response
}

/// Creates a new id.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}{}", uuid::Uuid::now_v7().simple())
}

async fn answer<D: Dialect>(
    state: &AppState,
    dialect: &D,
    request: Request,
    request_id: String,
    mut record: RequestRecord,
) -> Result<Response, RouterError> {
    let response = request.extensions().get::<ResponseHandle>().cloned();
    match read(state, dialect, request).await {
        Ok(Read { sent, form, caller, deadline, slo }) => {
            record.held_to(slo);
            let arrival = Arrival { request_id, deadline, response, record };
            let answered = match begin(state, sent, &caller, arrival).await {
                Ok(text) => dialect.respond(state, text, form).await,
                Err(error) => Err(error),
            };
            let mut response = answered.unwrap_or_else(|error| dialect.refuse(&error));
            write_usage(&caller, response.headers_mut());
            Ok(response)
        }
        Err(error) => {
            record.failed(&error);
            Err(error)
        }
    }
}

fn write_usage(caller: &Caller, headers: &mut HeaderMap) {
    if let Some(usage) = &caller.usage {
        usage.write_headers(headers);
    }
}

/// A request as it was sent.
struct Read<F> {
    sent: SentRequest,
    form: F,
    caller: Caller,
    deadline: Option<Deadline>,
    slo: Slo,
}

async fn read<D: Dialect>(
    state: &AppState,
    dialect: &D,
    request: Request,
) -> Result<Read<D::Form>, RouterError> {
    let (head, body): (_, Body) = request.into_parts();
    let mut caller = authenticate(state, &head.headers)?;
    identity_of(&head.headers)?;
    let slo = through_gateway(state, &mut caller, |name| head.headers.get(name).map(HeaderValue::as_bytes))?;
    let deadline = deadline_of(&head.headers)?;
    let body = read_object(&head.headers, body, deadline).await?;
    let asked = Asked { state, caller: &caller, task_type: task_type_of(&head.headers)? };
    let (sent, form) = dialect.read(body, asked)?;
    Ok(Read { sent, form, caller, deadline, slo })
}

/// Reads a chat completion request in OpenAI's format, with its caller and deadline, for handlers that answer
/// in their own format.
pub(crate) async fn read_chat(
    state: &AppState,
    request: Request,
) -> Result<(SentRequest, Caller, Option<Deadline>), RouterError> {
    let Read { sent, caller, deadline, .. } = read(state, &OpenAi(Operation::Chat), request).await?;
    Ok((sent, caller, deadline))
}

/// Refuses the first field of the object at `path` (empty, or ending in a dot) that requests an unsupported
/// feature. `says_off` recognizes values that request nothing.
pub(super) fn refuse_fields(
    path: &str,
    fields: &[(&str, &Option<Value>)],
    says_off: impl Fn(&str, &Value) -> bool,
) -> Result<(), RouterError> {
    let asks =
        |value: &Option<Value>, field: &str| value.as_ref().is_some_and(|value| !says_off(field, value));
    match fields.iter().find(|(field, value)| asks(value, field)) {
        Some((field, _)) => {
            let field = format!("{path}{field}");
            let message = format!("{field} is not supported: leave it out");
            Err(RouterError::invalid(field, message))
        }
        None => Ok(()),
    }
}

/// Collects the whole text of a single choice. Returns it with its finish reason and with the memory reserved
/// for it.
pub(super) async fn collect(
    state: &AppState,
    text: &mut TextStream,
) -> Result<(String, FinishReason, AnswerHold), RouterError> {
    let mut hold = state.answer_memory.begin();
    let (mut said, mut finish) = (String::new(), None);
    while let Some(delta) = text.next().await {
        let delta = delta?;
        hold.grow(delta.text.len()).inspect_err(|error| text.fail(error))?;
        said.push_str(&delta.text);
        finish = finish.or(delta.finish);
    }
    match finish {
        Some(finish) => Ok((said, finish, hold)),
        None => Err(RouterError::Internal("the stream ended before its choice finished".into())),
    }
}

/// Response with the given JSON body.
pub(super) fn json_response(json: String) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], json).into_response()
}
