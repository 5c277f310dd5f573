//! An error as an HTTP response. The body is OpenAI's; an API with another error object replaces it.

use axum::response::{IntoResponse, Json, Response};
use http::{HeaderMap, HeaderName, HeaderValue, header};

use super::openai::error::ErrorBody;
use crate::error::RouterError;

/// Header by which the client libraries of OpenAI and Anthropic decide on a retry.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

impl IntoResponse for RouterError {
    /// The error itself is attached to the response, for APIs with another error object.
    fn into_response(self) -> Response {
        let mut response = (self.mapping().status, Json(ErrorBody::from(&self))).into_response();
        let headers = response.headers_mut();
        write_retry_headers(&self, headers);
        if matches!(self, Self::Unauthenticated(_)) {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// Tells the client whether and when to retry.
fn write_retry_headers(error: &RouterError, headers: &mut HeaderMap) {
    if let Some(seconds) = error.retry_after_seconds() {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.is_final() {
        headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
}
