//! TOML files edited by hand: a fault is reported with its line number, on a single line.
//!
//! Used by the configuration file and the static list of workers. Parses text; never opens a file.

use std::fmt;

use serde::de::DeserializeOwned;

/// A fault in a TOML text, with its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TomlFault {
    /// Line number, from 1.
    pub line: usize,
    /// What is wrong.
    pub message: String,
}

/// Parses a whole text.
pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, TomlFault> {
    toml::from_str(text).map_err(|error| {
        let line = line_of(text, error.span().map_or(0, |span| span.start));
        TomlFault { line, message: error.message().replace('\n', ", ") }
    })
}

/// Line number, from 1, of byte `offset` in `text`.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count()
}

impl fmt::Display for TomlFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}
