//! A setting that must never be shown, neither in logs nor by `{:?}`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A password or a key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps `text`.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text, for sending it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::Secret;

    #[test]
    fn what_is_printed_tells_nothing() {
        let secret = Secret::new("open sesame");
        assert_eq!((format!("{secret:?}"), secret.expose()), ("(secret)".to_owned(), "open sesame"));
    }
}
