//! The HTTP API: routes, and errors for unknown routes. Servers mount [`http_app`].

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use http::{HeaderMap, Method, Uri};

use super::allowed_hosts::{AllowedHosts, check_host};
use super::handler::handle_request;
use super::incoming::{authenticate, invalid_query};
use super::openai::models::{Model, ModelList};
use super::openai::respond::OpenAi;
use super::openai::responses;
use super::pages::Parameters;
use super::path_text::PathText;
use super::request_id::identify;
use super::{anthropic, vllm};
use crate::error::RouterError;
use crate::pipeline::AppState;
use crate::request::Operation;

/// Routes for clients: OpenAI's, vLLM's and Anthropic's endpoints, and the probes.
pub fn http_app(state: AppState, hosts: AllowedHosts) -> Router {
    let probes = service::health::probes(state.health.clone());
    let routes = Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/input_tokens", post(responses::count_input_tokens))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/responses/{id}/input_items", get(responses::input_items::list))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/models", get(list_models))
        // A model's id may contain slashes.
        .route("/v1/models/{*id}", get(get_model))
        .merge(vllm::routes())
        .with_state(state)
        .merge(probes)
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(route_not_found);
    check_host(routes, hosts).layer(from_fn(identify))
}

/// Routes for operators, served at a separate address: probes with reasons, metrics, the state of the lanes,
/// and orders to drain workers, roll out drafts and log more or less.
pub fn admin_app(state: AppState) -> Router {
    let observed = service::health::router(state.health.clone(), state.metrics_page.clone());
    Router::new()
        .route("/debug/lanes", get(super::debug::lanes))
        .route("/admin/workers/{id}/drain", post(super::admin::drain).delete(super::admin::undrain))
        .route(
            "/admin/rollout",
            get(super::rollout::show).post(super::rollout::begin).delete(super::rollout::end),
        )
        .route("/admin/rollout/promote", post(super::rollout::promote))
        .route("/admin/log", get(super::log_filter::show).put(super::log_filter::replace))
        .with_state(state)
        .merge(observed)
}

async fn chat_completions(State(state): State<AppState>, request: Request) -> Response {
    handle_request(state, OpenAi(Operation::Chat), request).await
}

async fn completions(State(state): State<AppState>, request: Request) -> Response {
    handle_request(state, OpenAi(Operation::Completion), request).await
}

/// `GET /v1/models`: the models that the key may use.
pub(crate) async fn list_models(
    State(state): State<AppState>,
    parameters: Result<Query<Parameters>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, RouterError> {
    let models = authenticate(&state, &headers)?.models(&state.catalog);
    let entries = models.iter().map(|entry| &**entry);
    if anthropic::models::has_version(&headers) {
        let Query(parameters) = parameters.map_err(|error| invalid_query(&error))?;
        let page = anthropic::models::ModelPage::new(entries, &parameters)?;
        return Ok(Json(page).into_response());
    }
    let models: ModelList = entries.map(Model::from).collect();
    Ok(Json(models).into_response())
}

async fn get_model(
    State(state): State<AppState>,
    id: Result<PathText, RouterError>,
    headers: HeaderMap,
) -> Result<Response, RouterError> {
    let caller = authenticate(&state, &headers)?;
    let PathText(id) = id?;
    let entry = caller.model(&state.catalog, &id)?;
    if anthropic::models::has_version(&headers) {
        return Ok(Json(anthropic::models::Model::from(&*entry)).into_response());
    }
    Ok(Json(Model::from(&*entry)).into_response())
}

async fn method_not_allowed(method: Method, uri: Uri) -> RouterError {
    RouterError::MethodNotAllowed { method: method.to_string(), path: uri.path().to_owned() }
}

async fn route_not_found(method: Method, uri: Uri) -> RouterError {
    RouterError::RouteNotFound { method: method.to_string(), path: uri.path().to_owned() }
}
