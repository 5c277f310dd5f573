//! What is wrong with a configuration: collected, not thrown, so that the operator mends everything in one go.

use std::fmt::{self, Display};
use std::str::FromStr;

use figment::Figment;

use super::ConfigError;

/// One fault of one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The field, dotted where it is nested.
    pub field: String,
    /// Where its value came from, where it was set at all.
    pub origin: Option<String>,
    /// What is wrong, with the limit and what to do.
    pub message: String,
}

/// Collects the faults of a configuration. The first fault of a field hides later ones of the same field, which
/// would only follow from it.
#[derive(Debug, Default)]
pub struct Faults {
    found: Vec<Fault>,
    /// The values and where each came from, for the messages.
    pub(super) values: Figment,
}

impl Faults {
    /// No faults yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a fault of `field`.
    pub fn add(&mut self, field: &str, message: impl Display) {
        if self.found.iter().any(|fault| fault.field == field) {
            return;
        }
        let fault =
            Fault { field: field.to_owned(), origin: self.origin_of(field), message: message.to_string() };
        self.found.push(fault);
    }

    /// Where the value of `field` came from, unless it is the default.
    pub(super) fn origin_of(&self, field: &str) -> Option<String> {
        let origin = self.values.find_metadata(field)?.name.to_string();
        (!origin.is_empty()).then_some(origin)
    }

    /// Adds a fault of `field` unless `ok`.
    pub fn check(&mut self, field: &str, ok: bool, message: impl FnOnce() -> String) {
        if !ok {
            self.add(field, message());
        }
    }

    /// Parses a text field; a fault where that fails.
    pub fn parse<T: FromStr<Err: Display>>(&mut self, field: &str, text: &str) -> Option<T> {
        text.parse().map_err(|error| self.add(field, format_args!("`{text}`: {error}"))).ok()
    }

    /// A field that has no default and must be set.
    pub fn require<T>(&mut self, field: &str, value: Option<T>) -> Option<T> {
        if value.is_none() {
            let flag = field.replace('_', "-");
            self.add(
                field,
                format_args!("is required: give --{flag}, or set it in the file or the environment"),
            );
        }
        value
    }

    /// Whether nothing is wrong so far.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// All faults as one error, if there are any.
    pub fn finish(self) -> Result<(), ConfigError> {
        if self.found.is_empty() { Ok(()) } else { Err(ConfigError::Invalid(self.found)) }
    }
}

impl Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Some(origin) => write!(f, "{} ({origin}): {}", self.field, self.message),
            None => write!(f, "{}: {}", self.field, self.message),
        }
    }
}

/// One fault on the line itself, several below it.
pub(super) fn list(faults: &[Fault]) -> String {
    match faults {
        [fault] => format!("bad configuration: {fault}"),
        _ => {
            let lines: String = faults.iter().map(|fault| format!("\n  {fault}")).collect();
            format!("bad configuration, {} faults:{lines}", faults.len())
        }
    }
}
