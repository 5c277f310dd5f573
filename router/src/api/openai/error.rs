//! OpenAI's error object.

use std::borrow::Cow;

use axum::response::{IntoResponse, Json, Response};
use http::{HeaderValue, header};
use serde::Serialize;

use crate::api::handler::write_retry_headers;
use crate::error::RouterError;

/// `{"error": {...}}`.
#[derive(Debug, Serialize)]
pub struct ErrorBody {
    error: ErrorObject,
}

#[derive(Debug, Serialize)]
struct ErrorObject {
    message: String,
    r#type: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

impl From<&RouterError> for ErrorBody {
    fn from(error: &RouterError) -> Self {
        let mapping = error.mapping();
        Self {
            error: ErrorObject {
                message: error.message(),
                r#type: mapping.kind,
                param: error.param().map(Cow::into_owned),
                code: mapping.code,
            },
        }
    }
}

impl ErrorBody {
    /// Creates the HTTP response.
    pub fn respond(error: &RouterError) -> Response {
        let mut response = (error.mapping().status, Json(Self::from(error))).into_response();
        let headers = response.headers_mut();
        write_retry_headers(error, headers);
        if matches!(error, RouterError::Unauthenticated(_)) {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl IntoResponse for RouterError {
    fn into_response(self) -> Response {
        ErrorBody::respond(&self)
    }
}
