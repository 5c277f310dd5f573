//! A setting that must never be shown: not in a log line, not in what `{:?}` prints.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A password or a key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Keeps `text` from being shown.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, for whoever has to send it.
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
