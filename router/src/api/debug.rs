//! `/debug/lanes`: for operators, the inputs of each lane's choice of k and the state of its workers.
//! Requires an operator's API key (`admin=true`) if keys are configured.

use axum::extract::State;
use axum::response::Json;
use http::HeaderMap;
use scheduling::scheduler::SchedulerReport;
use scheduling::wait_stats::WaitReport;
use serde::Serialize;

use super::admin::check_operator;
use crate::error::RouterError;
use crate::pipeline::AppState;

/// Response of `/debug/lanes`.
#[derive(Debug, Serialize)]
pub(super) struct LanesPage {
    #[serde(flatten)]
    scheduler: SchedulerReport,
    /// Admission wait times, by priority.
    admission_waits: Vec<WaitReport>,
}

/// `GET /debug/lanes`.
pub(super) async fn lanes(
    State(state): State<AppState>,
    headers: HeaderMap,
) -> Result<Json<LanesPage>, RouterError> {
    check_operator(&state, &headers)?;
    let scheduler = state.generation.report().await?;
    Ok(Json(LanesPage { scheduler, admission_waits: state.admission.waits() }))
}
