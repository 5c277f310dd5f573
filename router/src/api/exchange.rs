//! One generating request over HTTP, from its head to the head of its answer, in whichever shapes its API has ([`Dialect`]).

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

/// Names a request: the client's own name for it where it sent one, else ours.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The shapes of one API: what it reads, and what it answers.
pub(super) trait Dialect: Send + Sync {
    /// A body, its fields not yet judged.
    type Body: DeserializeOwned + Send;
    /// What the answer has to know of the request.
    type Form: Send;

    /// What the model is to do.
    fn operation(&self) -> Operation;

    /// What ids of its answers begin with.
    fn id_prefix(&self) -> &'static str;

    /// The request, free of the API's shapes.
    fn read(&self, body: Self::Body, asked: Asked<'_>) -> Result<(SentRequest, Self::Form), RouterError>;

    /// Answers a request that has started. For a stream this returns at once.
    fn respond(
        &self,
        state: &AppState,
        text: TextStream,
        form: Self::Form,
    ) -> impl Future<Output = Result<Response, RouterError>> + Send;

    /// An error in the API's shape.
    fn refuse(&self, error: &RouterError) -> Response;
}

/// What stands around a body.
pub(super) struct Asked<'a> {
    /// What is shared.
    pub(super) state: &'a AppState,
    /// Who asks.
    pub(super) caller: &'a Caller,
    /// What the header says that the work is.
    pub(super) task_type: Option<String>,
}

/// Answers one request. A panic is this request's alone.
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
        outcome.unwrap_or_else(|_| Err(RouterError::Internal("answering this request panicked".into())));
    let mut response = outcome.unwrap_or_else(|error| dialect.refuse(&error));
    response.headers_mut().insert(REQUEST_ID, named);
    response
}

/// A fresh id.
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

/// A chat completion in OpenAI's shape as it was sent, who sent it and until when it has to be answered: for what answers it in shapes of its own.
pub(crate) async fn read_chat(
    state: &AppState,
    request: Request,
) -> Result<(SentRequest, Caller, Option<Deadline>), RouterError> {
    let Read { sent, caller, deadline, .. } = read(state, &OpenAi(Operation::Chat), request).await?;
    Ok((sent, caller, deadline))
}

/// Refuses the first field of the object at `path` (empty, or with its dot) that asks for something that is not supported; `says_off` knows
/// the values that ask for nothing.
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

/// The whole text of an answer of one choice, why it ended, and the memory that it takes while this is kept.
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
        None => Err(RouterError::Internal("the text ended before its choice did".into())),
    }
}

/// An answer that is written already.
pub(super) fn json_response(json: String) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], json).into_response()
}
