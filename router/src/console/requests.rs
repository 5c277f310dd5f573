//! Timelines of recent sequences, of all clients: for operators only.

use axum::extract::State;
use axum::response::Json;

use super::Console;
use crate::scheduler::timelines::Timeline;

/// `GET /console/requests`: timelines, latest first.
pub(super) async fn requests(State(console): State<Console>) -> Json<Vec<Timeline>> {
    Json(console.timelines.latest())
}
