//! `/debug/lanes`: what each lane's choice of k rests on and how its workers are, for operators. Behind the API keys, if there are any.

use axum::extract::State;
use axum::response::{IntoResponse as _, Json, Response};
use http::{HeaderMap, HeaderValue, header};

use super::AppState;
use crate::lane::LanesReport;

/// `GET /debug/lanes`.
pub(super) async fn lanes(State(state): State<AppState>, headers: HeaderMap) -> Response {
    if let Err(error) = state.auth.authenticate(headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes))
    {
        return error.into_response();
    }
    match state.lanes.explain().await {
        Ok(report) => {
            Json(LanesReport { admission_waits: state.admission.waits(), ..report }).into_response()
        }
        Err(error) => error.into_response(),
    }
}
