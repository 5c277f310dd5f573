//! OpenAI's responses API: `/v1/responses`. A body becomes the same request as a chat completion's ([`body`],
//! [`input`], [`tools`]), and the text becomes one response object ([`answer`]) or its stream of events
//! ([`events`]), with log probabilities on request ([`scored_output`]). Responses are stored for a while in
//! [`crate::pipeline::response_store`], so that a later request can continue one, refer to its items
//! ([`references`]) or list those of its input ([`input_items`]).

mod answer;
mod body;
mod custom_tools;
mod events;
mod input;
pub(in crate::api) mod input_items;
mod reasoning;
mod references;
mod scored_output;
mod tool_search;
mod tools;

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::response::{IntoResponse, Json, Response};
use http::HeaderMap;
use serde_json::json;

use self::answer::{ResponseObject, ResponseState};
use self::body::{Body, ResponseOptions};
use self::events::ResponseEvents;
use self::scored_output::ScoredOutput;
use crate::api::buffered_response::buffered_response;
use crate::api::handler::{ApiFormat, BodyContext, CollectedOutput, collect_output, handle_request};
use crate::api::incoming::{authenticate, invalid_query, unsupported_parameter};
use crate::api::json::to_json;
use crate::api::pages::Parameters;
use crate::api::path_text::PathText;
use crate::api::sse;
use crate::api::tokenizer_request::TokenizerRequest;
use crate::error::RouterError;
use crate::pipeline::AppState;
use crate::pipeline::response_store::StoredResponse;
use crate::pipeline::text_stream::TextStream;
use crate::request::{Operation, RawRequest};

/// Prefix of the ids of responses.
const ID_PREFIX: &str = "resp_";

/// `POST /v1/responses`.
pub(in crate::api) async fn create(State(state): State<AppState>, request: Request) -> Response {
    handle_request(state, Responses, request).await
}

/// `POST /v1/responses/input_tokens`.
pub(in crate::api) async fn count_input_tokens(
    State(state): State<AppState>,
    request: Request,
) -> Result<Response, RouterError> {
    let (request, body): (_, Body) = TokenizerRequest::read(&state, request).await?;
    let context = BodyContext { state: &state, caller: &request.caller, task_type: None };
    let (raw_request, _) = Responses.parse(body, context)?;
    let input_tokens = request.count_tokens(&state, raw_request).await?;
    let count = json!({ "object": "response.input_tokens", "input_tokens": input_tokens });
    Ok(Json(count).into_response())
}

/// `GET /v1/responses/{id}`.
pub(in crate::api) async fn retrieve(
    State(state): State<AppState>,
    id: Result<PathText, RouterError>,
    parameters: Result<Query<Parameters>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, RouterError> {
    let caller = authenticate(&state, &headers)?;
    let PathText(id) = id?;
    let Query(parameters) = parameters.map_err(|error| invalid_query(&error))?;
    refuse_parameters(&parameters)?;
    let stored = stored_response(&state, caller.isolation_key, &id)?;
    // The store may evict the response while its client reads it.
    let mut reservation = state.response_memory.reserve();
    reservation.grow(stored.json.len())?;
    Ok(buffered_response(StoredJson(stored), reservation))
}

/// The JSON of a stored response, without a copy.
struct StoredJson(Arc<StoredResponse>);

impl AsRef<[u8]> for StoredJson {
    fn as_ref(&self) -> &[u8] {
        self.0.json.as_bytes()
    }
}

/// `DELETE /v1/responses/{id}`.
pub(in crate::api) async fn delete(
    State(state): State<AppState>,
    id: Result<PathText, RouterError>,
    headers: HeaderMap,
) -> Result<Response, RouterError> {
    let caller = authenticate(&state, &headers)?;
    let PathText(id) = id?;
    if !state.responses.remove(caller.isolation_key, &id) {
        return Err(not_found("response_id", &id));
    }
    Ok(Json(json!({ "id": id, "object": "response.deleted", "deleted": true })).into_response())
}

/// `POST /v1/responses/{id}/cancel`. Only background responses could be cancelled, and there are none: a
/// client ends a response by closing its connection.
pub(in crate::api) async fn cancel(
    State(state): State<AppState>,
    id: Result<PathText, RouterError>,
    headers: HeaderMap,
) -> Result<Response, RouterError> {
    let caller = authenticate(&state, &headers)?;
    let PathText(id) = id?;
    stored_response(&state, caller.isolation_key, &id)?;
    let message =
        format!("the response `{id}` was not created with background, so that it cannot be cancelled");
    Err(RouterError::invalid("response_id", message))
}

/// Refuses query parameters that would change the answer: a stored response is only sent whole.
fn refuse_parameters(parameters: &[(String, String)]) -> Result<(), RouterError> {
    let is_disabled = |(name, value): &(String, String)| match name.as_str() {
        "stream" => value == "false",
        // Only streams can be obfuscated.
        "include_obfuscation" => true,
        _ => false,
    };
    match parameters.iter().find(|parameter| !is_disabled(parameter)) {
        None => Ok(()),
        Some((name, _)) => Err(unsupported_parameter(name)),
    }
}

/// Returns the stored response that a path names.
fn stored_response(
    state: &AppState,
    isolation_key: u64,
    id: &str,
) -> Result<Arc<StoredResponse>, RouterError> {
    state.responses.get(isolation_key, id).ok_or_else(|| not_found("response_id", id))
}

fn not_found(param: &'static str, id: &str) -> RouterError {
    let message = format!(
        "the response `{id}` is not stored at this router: it was stored at another router, never stored (`store: \
         false`), deleted or evicted; to continue it, send the whole conversation as `input`"
    );
    RouterError::ResponseNotFound { message, param }
}

struct Responses;

impl ApiFormat for Responses {
    type Body = Body;
    type Options = ResponseOptions;

    fn operation(&self) -> Operation {
        Operation::Chat
    }

    fn id_prefix(&self) -> &'static str {
        ID_PREFIX
    }

    fn parse(
        &self,
        mut body: Body,
        context: BodyContext<'_>,
    ) -> Result<(RawRequest, ResponseOptions), RouterError> {
        let BodyContext { state, caller, task_type } = context;
        let isolation_key = caller.isolation_key;
        let earlier = match body.previous_response_id.as_deref() {
            None => Vec::new(),
            Some(id) => {
                let stored = state.responses.get(isolation_key, id);
                stored.ok_or_else(|| not_found("previous_response_id", id))?.conversation.clone()
            }
        };
        body.resolve_references(&state.responses, isolation_key)?;
        body.into_request(earlier, isolation_key, task_type)
    }

    async fn respond(
        &self,
        state: &AppState,
        mut text: TextStream,
        options: ResponseOptions,
    ) -> Result<Response, RouterError> {
        if options.stream {
            let writer = ResponseEvents::new(options, state, text.info());
            return Ok(sse::respond(text, writer, state.keep_alive));
        }
        let collected = collect_output(state, &mut text).await?;
        let CollectedOutput { text: output_text, tokens, finish, reservation } = collected;
        let (info, usage) = (text.info(), text.usage());
        let output = ScoredOutput::parse(info, &output_text, tokens);
        let output_parts = output.parts(text.model().vocabulary());
        let response_state = ResponseState::Ended { output: output_parts, finish, usage: &usage };
        let json = to_json(&ResponseObject::new(&options, info, response_state));
        options.store(&state.responses, &info.id, output_parts.parts, || json.clone());
        Ok(buffered_response(json, reservation))
    }
}
