//! Range checks of numbers and lengths, with messages that name the field, the limit and the value.

use std::ops::RangeInclusive;

use speculation::TokenId;

use super::limits::ID_LEN_MAX;
use crate::catalog::ModelEntry;
use crate::error::RouterError;

/// Checks that a whole number is within `range`.
pub(super) fn integer(
    field: &str,
    value: Option<i64>,
    range: RangeInclusive<i64>,
) -> Result<Option<i64>, RouterError> {
    match value {
        Some(value) if !range.contains(&value) => {
            let (min, max) = range.into_inner();
            Err(RouterError::must_be(field, format_args!("between {min} and {max}, not {value}")))
        }
        within => Ok(within),
    }
}

/// Checks that a number is within `range`; NaN never is.
pub(super) fn number(
    field: &str,
    value: Option<f64>,
    range: RangeInclusive<f64>,
) -> Result<Option<f32>, RouterError> {
    match value {
        Some(value) if !range.contains(&value) => {
            let (min, max) = range.into_inner();
            Err(RouterError::must_be(field, format_args!("between {min} and {max}, not {value}")))
        }
        within => Ok(within.map(|value| value as f32)),
    }
}

/// Checks the length of a list or text, counted in `unit`.
pub(super) fn at_most(field: &str, len: usize, unit: &str, max: usize) -> Result<(), RouterError> {
    if len <= max {
        return Ok(());
    }
    Err(RouterError::invalid(field, format!("{field} has {len} {unit}, at most {max} are allowed")))
}

/// Whether a client or a gateway may give this id.
pub fn is_id(id: &[u8]) -> bool {
    (1..=ID_LEN_MAX).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}

/// Reads the id in a header, or in metadata.
pub fn header_id<'a>(header: &'static str, value: &'a [u8]) -> Result<&'a str, RouterError> {
    match std::str::from_utf8(value) {
        Ok(id) if is_id(value) => Ok(id),
        _ => {
            let message = format!("the header {header} must have 1 to {ID_LEN_MAX} visible ASCII characters");
            Err(RouterError::invalid(header, message))
        }
    }
}

/// Checks a token id against the model's vocabulary. `path` names the value in messages, `param` the field.
pub(super) fn token_id(param: &str, path: &str, id: i64, entry: &ModelEntry) -> Result<TokenId, RouterError> {
    let vocab_size = entry.vocab_size;
    TokenId::try_from(id).ok().filter(|&id| id < vocab_size).ok_or_else(|| {
        let message =
            format!("{path} is {id}, but token ids of this model are 0 to {}", vocab_size.saturating_sub(1));
        RouterError::invalid(param, message)
    })
}
