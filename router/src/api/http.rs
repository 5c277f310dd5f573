//! The HTTP API: routes, bodies, and errors in OpenAI's shape whatever goes wrong. [`http_app`] is what a server
//! mounts.

use std::panic::AssertUnwindSafe;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use futures::FutureExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use service::accept::ResponseHandle;
use service::telemetry;
use tracing::Instrument as _;

use super::incoming::{authenticate, deadline_of, read_object, task_type_of};
use super::openai::body::{AnswerForm, Body as OpenAiBody};
use super::openai::models::{Model, ModelList};
use super::openai::respond::respond;
use super::vllm;
use crate::error::RouterError;
use crate::metrics::Protocol;
use crate::pipeline::deadline::Deadline;
use crate::pipeline::{AppState, Arrival, begin};
use crate::request::record::RequestRecord;
use crate::request::{Caller, Operation, SentRequest, span};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What clients reach: OpenAI's routes, vLLM's beside them, and the probes.
pub fn http_app(state: AppState) -> Router {
    let probes = service::health::probes(state.health.clone());
    Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(list_models))
        // A model's id may hold slashes.
        .route("/v1/models/{*id}", get(get_model))
        .merge(vllm::routes())
        .with_state(state)
        .merge(probes)
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(route_not_found)
}

/// What operators reach, at an address of its own: the probes with their reasons, metrics, and what the lanes think.
pub fn admin_app(state: AppState) -> Router {
    let observed = service::health::router(state.health.clone(), state.metrics_page.clone());
    Router::new().route("/debug/lanes", get(super::debug::lanes)).with_state(state).merge(observed)
}

async fn chat_completions(State(state): State<AppState>, request: Request) -> Response {
    generate(state, Operation::Chat, request).await
}

async fn completions(State(state): State<AppState>, request: Request) -> Response {
    generate(state, Operation::Completion, request).await
}

async fn list_models(State(state): State<AppState>, headers: HeaderMap) -> Response {
    match authenticate(&state, &headers) {
        Ok(caller) => {
            let models = caller.models(&state.catalog);
            let models: ModelList = models.iter().map(|entry| Model::from(&**entry)).collect();
            Json(models).into_response()
        }
        Err(error) => error.into_response(),
    }
}

async fn get_model(State(state): State<AppState>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    let found = authenticate(&state, &headers).and_then(|caller| caller.model(&state.catalog, &id));
    match found {
        Ok(entry) => Json(Model::from(&*entry)).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let error = RouterError::MethodNotAllowed { method: method.to_string(), path: uri.path().to_owned() };
    error.into_response()
}

async fn route_not_found(method: Method, uri: Uri) -> Response {
    let error = RouterError::RouteNotFound { method: method.to_string(), path: uri.path().to_owned() };
    error.into_response()
}

/// One generating request, from its head to the head of its answer. A panic is this request's alone.
async fn generate(state: AppState, operation: Operation, request: Request) -> Response {
    let span = span::open(Protocol::Http, operation);
    telemetry::set_parent_from_headers(&span, request.headers());
    let request_id = operation.new_request_id();
    let id_header = HeaderValue::from_str(&request_id).expect("an id is letters, digits and a hyphen");
    let record = RequestRecord::arrived(Protocol::Http, span.clone(), &state.metrics);

    let answer = answer(&state, operation, request, request_id, record).instrument(span);
    let outcome = AssertUnwindSafe(answer).catch_unwind().await;
    let outcome =
        outcome.unwrap_or_else(|_| Err(RouterError::Internal("answering this request panicked".into())));
    let mut response = outcome.unwrap_or_else(|error| error.into_response());
    response.headers_mut().insert(REQUEST_ID, id_header);
    response
}

async fn answer(
    state: &AppState,
    operation: Operation,
    request: Request,
    request_id: String,
    mut record: RequestRecord,
) -> Result<Response, RouterError> {
    let response = request.extensions().get::<ResponseHandle>().cloned();
    match read(state, operation, request).await {
        Ok(Read { sent, form, caller, deadline }) => {
            let arrival = Arrival { request_id, deadline, response, record };
            let answered = match begin(state, sent, &caller, arrival).await {
                Ok(text) => respond(state, text, operation, form).await,
                Err(error) => Err(error),
            };
            let mut response = answered.unwrap_or_else(RouterError::into_response);
            if let Some(usage) = &caller.usage {
                usage.write_headers(response.headers_mut());
            }
            Ok(response)
        }
        Err(error) => {
            record.failed(&error);
            Err(error)
        }
    }
}

/// A request as it was sent.
struct Read {
    sent: SentRequest,
    form: AnswerForm,
    caller: Caller,
    deadline: Option<Deadline>,
}

async fn read(state: &AppState, operation: Operation, request: Request) -> Result<Read, RouterError> {
    let (head, body) = request.into_parts();
    let caller = authenticate(state, &head.headers)?;
    let deadline = deadline_of(&head.headers)?;
    let body: OpenAiBody = read_object(&head.headers, body, deadline).await?;
    let (sent, form) = body.into_sent(operation, task_type_of(&head.headers)?)?;
    Ok(Read { sent, form, caller, deadline })
}
