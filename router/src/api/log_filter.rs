//! `/admin/log`: an operator reads (`GET`) or replaces (`PUT`) the filter of the router's log, which `--log`
//! sets at the start. Requires an operator's API key (`admin=true`) if keys are configured. The order applies
//! to this router until it ends.

use axum::extract::{Request, State};
use axum::response::Json;
use http::HeaderMap;
use serde::{Deserialize, Serialize};
use service::telemetry::{LogFilter, current_log_filter, replace_log_filter};

use super::admin::check_operator;
use super::incoming::{deadline_from_headers, read_order};
use crate::error::RouterError;
use crate::pipeline::AppState;

/// Body of requests and responses.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LogPage {
    /// As `--log`.
    filter: String,
}

/// `GET`.
pub(super) async fn show(
    State(state): State<AppState>,
    headers: HeaderMap,
) -> Result<Json<LogPage>, RouterError> {
    check_operator(&state, &headers)?;
    page()
}

/// `PUT`.
pub(super) async fn replace(
    State(state): State<AppState>,
    request: Request,
) -> Result<Json<LogPage>, RouterError> {
    let (head, body) = request.into_parts();
    check_operator(&state, &head.headers)?;
    let deadline = deadline_from_headers(&head.headers)?;
    let LogPage { filter } = read_order(&head.headers, body, deadline).await?;
    let parsed = filter.parse::<LogFilter>();
    let parsed = parsed.map_err(|error| RouterError::invalid("filter", format!("filter: {error}")))?;
    // Before and after: either filter may hide the line.
    tracing::info!(filter, "an operator replaces the filter of the log");
    replace_log_filter(parsed);
    tracing::info!(filter, "an operator replaced the filter of the log");
    page()
}

fn page() -> Result<Json<LogPage>, RouterError> {
    let filter =
        current_log_filter().ok_or_else(|| RouterError::Internal("this process has no log".into()))?;
    Ok(Json(LogPage { filter: filter.to_string() }))
}
