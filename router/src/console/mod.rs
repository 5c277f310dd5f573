//! The console: web pages about a router at the operators' address (`--admin`). The pages are static files in
//! the binary ([`files`]). Their data comes from here and from `/debug/lanes`: [`generate`] runs a request of
//! the playground and marks the drafted tokens, `/console/models` lists the models that it may use,
//! [`requests`] lists timelines of recent requests, [`pair`] checks the pair of models.
//!
//! If keys are configured, the playground requires an API key, and everything else but the files an
//! operator's; that is also refused to web pages of other origins. The playground must never do more than a
//! client could, and takes only JSON, which a browser sends to another origin only if that allows it.

mod files;
mod generate;
pub mod pair;
mod requests;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};

use self::pair::PairCheck;
use crate::api::check_operator;
use crate::api::http::list_models;
use crate::pipeline::AppState;
use crate::scheduler::timelines::Timelines;

/// State of the console's routes.
#[derive(Clone)]
struct Console {
    state: AppState,
    timelines: Timelines,
    pair: PairCheck,
}

/// The console's routes.
pub fn console_app(state: AppState, timelines: Timelines, pair: PairCheck) -> Router {
    let for_operators = Router::new()
        .route("/console/requests", get(requests::requests))
        .route("/console/pair", get(pair::pair).post(pair::check_pair))
        .route_layer(from_fn_with_state(state.clone(), require_operator));
    Router::new()
        .route("/", get(files::index))
        .route("/console/{name}", get(files::file))
        .route("/console/generate", post(generate::generate))
        .route("/console/models", get(list_models).with_state(state.clone()))
        .merge(for_operators)
        .with_state(Console { state, timelines, pair })
}

async fn require_operator(State(state): State<AppState>, request: Request, next: Next) -> Response {
    match check_operator(&state, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}
