//! `POST /admin/workers/{id}/drain` and `DELETE` of the same: an operator drains a worker, so that it gets
//! nothing new, or undoes that. Requires an operator's API key (`admin=true`) if keys are configured.
//!
//! `{id}` is the worker's address as shown by `/debug/lanes`, percent-encoded, or just its HOST:PORT.
//! Sequences at a draining target finish there; with `?move=true` they move, with their ids, to another
//! target of the same numerics class, if there is one. The order also applies to workers that connect at the
//! address later, until it is undone or the router ends.

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Json, Response};
use http::{HeaderMap, HeaderValue, Method, header};
use serde::Deserialize;

use super::incoming::invalid_query;
use super::path_text::PathText;
use crate::error::RouterError;
use crate::generation::Drain;
use crate::pipeline::AppState;

/// Query parameters.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DrainParams {
    /// Whether running sequences move to another target.
    #[serde(default)]
    r#move: bool,
}

/// `POST`.
pub(super) async fn drain(
    State(state): State<AppState>,
    worker: Result<PathText, RouterError>,
    params: Result<Query<DrainParams>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, RouterError> {
    check_operator(&state, &headers)?;
    let PathText(address) = worker?;
    let Query(params) = params.map_err(|error| invalid_query(&error))?;
    apply_drain(&state, Drain { address, is_draining: true, moves_sequences: params.r#move }).await
}

/// `DELETE`.
pub(super) async fn undrain(
    State(state): State<AppState>,
    worker: Result<PathText, RouterError>,
    headers: HeaderMap,
) -> Result<Response, RouterError> {
    check_operator(&state, &headers)?;
    let PathText(address) = worker?;
    apply_drain(&state, Drain { address, is_draining: false, moves_sequences: false }).await
}

async fn apply_drain(state: &AppState, drain: Drain) -> Result<Response, RouterError> {
    let worker = drain.address.clone();
    match state.generation.drain(drain).await? {
        Some(drained) => Ok(Json(drained).into_response()),
        None => Err(RouterError::WorkerNotFound { worker }),
    }
}

/// Checks that the key is an operator's, and that the request is not cross-origin: browsers send such
/// requests without a preflight, and a web page must not drain a visitor's workers or make the router write
/// reports.
pub(crate) fn check_operator(state: &AppState, headers: &HeaderMap) -> Result<(), RouterError> {
    let header_bytes = |name| headers.get(name).map(HeaderValue::as_bytes);
    let authority = |origin: &[u8]| {
        let start = origin.windows(3).position(|part| part == b"://").map_or(0, |at| at + 3);
        origin[start..].to_vec()
    };
    if let Some(origin) = header_bytes(header::ORIGIN)
        && header_bytes(header::HOST).is_none_or(|host| authority(origin) != host)
    {
        return Err(RouterError::CrossOrigin);
    }
    state.auth.authenticate_operator(header_bytes(header::AUTHORIZATION)).map(drop)
}

/// Lets only requests that read pass to `app`, at an address that others reach without a key.
pub fn read_only(app: Router) -> Router {
    app.layer(from_fn(refuse_order))
}

async fn refuse_order(request: Request, next: Next) -> Response {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return next.run(request).await;
    }
    let reason = "this address is reachable by others and no API keys are configured: set --api-keys FILE, or \
                  use a loopback address for --admin";
    RouterError::invalid("admin", reason).into_response()
}
