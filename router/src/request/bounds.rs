//! Range checks of single numbers, with messages that name the field, the limit and the value.

use std::ops::RangeInclusive;

use speculation::TokenId;

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
            Err(RouterError::invalid(field, format!("{field} must be between {min} and {max}, not {value}")))
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
            Err(RouterError::invalid(field, format!("{field} must be between {min} and {max}, not {value}")))
        }
        within => Ok(within.map(|value| value as f32)),
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
