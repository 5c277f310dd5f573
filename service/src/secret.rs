//! A setting that must never be shown, neither in logs nor by `{:?}` nor by an error of the configuration.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// A password or a key.
#[derive(Clone, PartialEq, Eq, Serialize)]
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

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The library's error for a value of another type repeats the value.
        let text = String::deserialize(deserializer);
        text.map(Self).map_err(|_| D::Error::custom("invalid type, expected a text: put it in quotes"))
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
