//! OpenAI's error object.

use std::borrow::Cow;

use serde::Serialize;

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
