//! `POST /admin/workers/{id}/drain` and `DELETE` of the same: an operator has a worker get nothing new, or undoes that. Behind
//! the API keys, if there are any.
//!
//! `{id}` is the worker's address as `/debug/lanes` shows it, percent-encoded, or HOST:PORT of it. What runs at a target
//! finishes there; with `?move=true` it moves to another target of the same numerics class, with its ids, if there is one. The
//! order holds for workers that connect at the address later, until it is undone or the router ends.

use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse as _, Json, Response};
use http::{HeaderMap, HeaderValue, header};
use serde::Deserialize;

use crate::error::RouterError;
use crate::generation::Drain;
use crate::pipeline::AppState;

/// What may stand behind the `?`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct How {
    /// Whether what runs there moves.
    #[serde(default)]
    r#move: bool,
}

/// `POST`.
pub(super) async fn drain(
    State(state): State<AppState>,
    Path(worker): Path<String>,
    how: Query<How>,
    headers: HeaderMap,
) -> Response {
    order(&state, &headers, Drain { address: worker, is_draining: true, moves_sequences: how.r#move }).await
}

/// `DELETE`.
pub(super) async fn undo(
    State(state): State<AppState>,
    Path(worker): Path<String>,
    headers: HeaderMap,
) -> Response {
    order(&state, &headers, Drain { address: worker, is_draining: false, moves_sequences: false }).await
}

async fn order(state: &AppState, headers: &HeaderMap, drain: Drain) -> Response {
    if let Err(error) = check(state, headers) {
        return error.into_response();
    }
    let worker = drain.address.clone();
    match state.generation.drain(drain).await {
        Ok(Some(drained)) => Json(drained).into_response(),
        Ok(None) => RouterError::WorkerNotFound { worker }.into_response(),
        Err(error) => error.into_response(),
    }
}

/// Browsers send such requests across origins without asking, and a page that somebody looks at must not drain his workers.
pub(crate) fn check(state: &AppState, headers: &HeaderMap) -> Result<(), RouterError> {
    let text = |name| headers.get(name).map(HeaderValue::as_bytes);
    let authority = |origin: &[u8]| {
        let start = origin.windows(3).position(|part| part == b"://").map_or(0, |at| at + 3);
        origin[start..].to_vec()
    };
    if let Some(origin) = text(header::ORIGIN)
        && text(header::HOST).is_none_or(|host| authority(origin) != host)
    {
        return Err(RouterError::CrossOrigin);
    }
    state.auth.authenticate(text(header::AUTHORIZATION)).map(drop)
}
