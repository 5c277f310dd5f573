//! `POST /admin/workers/{id}/drain` and `DELETE` of the same: an operator drains a worker, so that it gets
//! nothing new, or undoes that. Requires an API key if keys are configured.
//!
//! `{id}` is the worker's address as shown by `/debug/lanes`, percent-encoded, or just its HOST:PORT.
//! Sequences at a draining target finish there; with `?move=true` they move, with their ids, to another
//! target of the same numerics class, if there is one. The order also applies to workers that connect at the
//! address later, until it is undone or the router ends.

use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse as _, Json, Response};
use http::{HeaderMap, HeaderValue, header};
use serde::Deserialize;

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
    Path(worker): Path<String>,
    params: Query<DrainParams>,
    headers: HeaderMap,
) -> Response {
    apply_drain(
        &state,
        &headers,
        Drain { address: worker, is_draining: true, moves_sequences: params.r#move },
    )
    .await
}

/// `DELETE`.
pub(super) async fn undrain(
    State(state): State<AppState>,
    Path(worker): Path<String>,
    headers: HeaderMap,
) -> Response {
    apply_drain(&state, &headers, Drain { address: worker, is_draining: false, moves_sequences: false }).await
}

async fn apply_drain(state: &AppState, headers: &HeaderMap, drain: Drain) -> Response {
    if let Err(error) = check_operator(state, headers) {
        return error.into_response();
    }
    let worker = drain.address.clone();
    match state.generation.drain(drain).await {
        Ok(Some(drained)) => Json(drained).into_response(),
        Ok(None) => RouterError::WorkerNotFound { worker }.into_response(),
        Err(error) => error.into_response(),
    }
}

/// Checks the key, and that the request is not cross-origin: browsers send such requests without a preflight,
/// and a web page must not be able to drain a visitor's workers.
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
    state.auth.authenticate(header_bytes(header::AUTHORIZATION)).map(drop)
}
