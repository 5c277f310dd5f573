//! Checks of single numbers, with messages that name field, limit and value.

use std::ops::RangeInclusive;

use speculation::TokenId;

use crate::catalog::ModelEntry;
use crate::error::RouterError;

/// A whole number within `range`.
pub(super) fn integer(
    field: &str,
    value: Option<i64>,
    range: RangeInclusive<i64>,
) -> Result<Option<i64>, RouterError> {
    match value {
        Some(value) if !range.contains(&value) => {
            let (min, max) = range.into_inner();
            Err(RouterError::invalid(field, format!("{field} must be between {min} and {max}, not {value}")))
        }
        within => Ok(within),
    }
}

/// A number within `range`; what is not a number is in no range.
pub(super) fn number(
    field: &str,
    value: Option<f64>,
    range: RangeInclusive<f64>,
) -> Result<Option<f32>, RouterError> {
    match value {
        Some(value) if !range.contains(&value) => {
            let (min, max) = range.into_inner();
            Err(RouterError::invalid(field, format!("{field} must be between {min} and {max}, not {value}")))
        }
        within => Ok(within.map(|value| value as f32)),
    }
}

/// A token id of the model; `path` says which one it is, `param` which field it stands in.
pub(super) fn token_id(param: &str, path: &str, id: i64, entry: &ModelEntry) -> Result<TokenId, RouterError> {
    let vocab_size = entry.vocab_size;
    TokenId::try_from(id).ok().filter(|&id| id < vocab_size).ok_or_else(|| {
        let message =
            format!("{path} is {id}, but token ids of this model are 0 to {}", vocab_size.saturating_sub(1));
        RouterError::invalid(param, message)
    })
}
