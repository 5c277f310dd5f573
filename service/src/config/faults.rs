//! Faults of a configuration: collected instead of returned one by one, so that the operator can fix all of
//! them at once.

use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;

use figment::Figment;

use super::ConfigError;

/// A fault of one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The field, dotted if nested.
    pub field: String,
    /// Where the value was set, if it was set.
    pub origin: Option<String>,
    /// What is wrong, with the limit and how to fix it.
    pub message: String,
}

/// Collects the faults of a configuration. Only the first fault of a field is kept; later ones would only
/// follow from it.
#[derive(Debug, Default)]
pub struct Faults {
    found: Vec<Fault>,
    /// The values and their origins, for messages.
    pub(super) values: Figment,
}

impl Faults {
    /// Creates an empty list.
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

    /// Returns where the value of `field` was set; `None` for a default.
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

    /// Adds a fault of `field` unless its value is in the range.
    pub fn check_between<T: PartialOrd + Display>(
        &mut self,
        field: &str,
        value: T,
        range: RangeInclusive<T>,
    ) {
        self.check(field, range.contains(&value), || {
            format!("{value} is not between {} and {}", range.start(), range.end())
        });
    }

    /// Adds a fault of `field` if its value, a number without a sign, is 0.
    pub fn check_positive<T: PartialEq + Default>(&mut self, field: &str, value: T) {
        self.check(field, value != T::default(), || "must be at least 1".to_owned());
    }

    /// Parses a text field; adds a fault if that fails.
    pub fn parse<T: FromStr<Err: Display>>(&mut self, field: &str, text: &str) -> Option<T> {
        text.parse().map_err(|error| self.add(field, format_args!("`{text}`: {error}"))).ok()
    }

    /// Requires a field that has no default.
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

    /// Adds a fault of each address that an earlier field listens on as well. Port 0 is a new one each time.
    pub fn check_distinct(&mut self, addresses: &[(&str, SocketAddr)]) {
        for (i, (field, address)) in addresses.iter().enumerate() {
            let is_taken = |(_, other): &&(&str, SocketAddr)| {
                let (ip, other_ip) = (address.ip(), other.ip());
                let overlaps = ip == other_ip || ip.is_unspecified() || other_ip.is_unspecified();
                address.port() != 0 && address.port() == other.port() && overlaps
            };
            if let Some((other, _)) = addresses[..i].iter().find(is_taken) {
                let flag = other.replace('_', "-");
                self.add(field, format_args!("{address} is also the address of --{flag}: give another port"));
            }
        }
    }

    /// Whether no fault was found so far.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Returns all faults as one error, if there are any.
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

/// A single fault is on the same line, several are listed below.
pub(super) fn list(faults: &[Fault]) -> String {
    match faults {
        [fault] => format!("bad configuration: {fault}"),
        _ => {
            let lines: String = faults.iter().map(|fault| format!("\n  {fault}")).collect();
            format!("bad configuration, {} faults:{lines}", faults.len())
        }
    }
}
