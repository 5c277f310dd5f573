//! `/debug/lanes`: what each lane's choice of k rests on and how its workers are, for operators. Behind the API keys, if there are any.

use axum::extract::State;
use axum::response::{IntoResponse as _, Json, Response};
use http::{HeaderMap, HeaderValue, header};
use scheduling::scheduler::SchedulerReport;
use scheduling::waits::WaitReport;
use serde::Serialize;

use crate::pipeline::AppState;

/// What `/debug/lanes` shows.
#[derive(Debug, Serialize)]
struct LanesPage {
    #[serde(flatten)]
    scheduler: SchedulerReport,
    /// How long requests waited to be admitted, by priority.
    admission_waits: Vec<WaitReport>,
}

/// `GET /debug/lanes`.
pub(super) async fn lanes(State(state): State<AppState>, headers: HeaderMap) -> Response {
    if let Err(error) = state.auth.authenticate(headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes))
    {
        return error.into_response();
    }
    match state.generation.report().await {
        Ok(scheduler) => {
            Json(LanesPage { scheduler, admission_waits: state.admission.waits() }).into_response()
        }
        Err(error) => error.into_response(),
    }
}
