//! Completes every response of the clients' HTTP API: the id of its request, and errors in the format of the
//! API that the path belongs to. Must not change the status.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderName, HeaderValue};

use super::anthropic;
use super::incoming::identity_from_headers;
use crate::request::new_id;

/// Identifies a request: the client's id if it sent a valid one, else the router's.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Answers a request with `next` and completes the response.
pub(super) async fn identify(request: Request, next: Next) -> Response {
    let is_anthropic = anthropic::is_own_request(request.uri().path(), request.headers());
    let has_valid_identity = identity_from_headers(request.headers()).is_ok();
    let sent_id = request.headers().get(REQUEST_ID).filter(|_| has_valid_identity).cloned();
    let mut response = next.run(request).await;
    let own_id =
        || HeaderValue::from_str(&new_id("req_")).expect("an id is letters, digits and an underscore");
    let id = sent_id.or_else(|| response.headers().get(REQUEST_ID).cloned()).unwrap_or_else(own_id);
    response.headers_mut().insert(REQUEST_ID, id.clone());
    if is_anthropic { anthropic::complete(response, id) } else { response }
}
