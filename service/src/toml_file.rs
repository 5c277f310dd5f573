//! TOML files that people edit: a fault in one is told with its line, on one line.
//!
//! Shared by the configuration file and the static list of workers. Parses text; it never opens a file.

use std::fmt;

use serde::de::DeserializeOwned;

/// What is wrong in a TOML text, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TomlFault {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong there.
    pub message: String,
}

/// Parses a whole text.
pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, TomlFault> {
    toml::from_str(text).map_err(|error| {
        let line = line_of(text, error.span().map_or(0, |span| span.start));
        TomlFault { line, message: error.message().replace('\n', ", ") }
    })
}

/// The line, counted from 1, that byte `offset` of `text` stands in.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count()
}

impl fmt::Display for TomlFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}
