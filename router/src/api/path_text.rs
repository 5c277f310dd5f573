//! [`PathText`]: the variable part of a path, such as `{id}`.

use axum::extract::{FromRequestParts, Path};
use http::request::Parts;

use crate::error::RouterError;

/// The variable part of a path, percent-decoded. Handlers take it as a `Result`, so that they can check the
/// caller's key first.
pub(super) struct PathText(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for PathText {
    type Rejection = RouterError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RouterError> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(text)) => Ok(Self(text)),
            Err(_) => {
                let message = "the path is not valid UTF-8 after percent-decoding".to_owned();
                Err(RouterError::InvalidRequest { message, param: None })
            }
        }
    }
}
