//! Timelines of recent sequences, of all clients: for operators only.

use axum::extract::State;
use axum::response::{IntoResponse as _, Json, Response};
use http::{HeaderMap, HeaderValue, header};

use super::Console;

/// `GET /console/requests`: timelines, latest first.
pub(super) async fn requests(State(console): State<Console>, headers: HeaderMap) -> Response {
    let key = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    match console.state.auth.authenticate_operator(key) {
        Ok(_) => Json(console.timelines.latest()).into_response(),
        Err(error) => error.into_response(),
    }
}
