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
