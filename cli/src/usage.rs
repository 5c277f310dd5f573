//! Values of flags that are invalid although the command line parses.

use std::fmt::Display;

/// The value of a flag is invalid.
#[derive(Debug, thiserror::Error)]
#[error("{flag} is {value}, expected {expected}")]
pub struct UsageError {
    /// The flag.
    pub flag: &'static str,
    /// The value as given.
    pub value: String,
    /// What is accepted.
    pub expected: String,
}

/// Rejects a flag's value unless `holds`.
pub(crate) fn check(
    flag: &'static str,
    value: impl Display,
    expected: &str,
    holds: bool,
) -> Result<(), UsageError> {
    match holds {
        true => Ok(()),
        false => Err(UsageError { flag, value: value.to_string(), expected: expected.to_owned() }),
    }
}
