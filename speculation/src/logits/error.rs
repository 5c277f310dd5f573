//! Errors of drawing a token. Every variant refuses only one sequence's step.

use crate::{Refusal, RefusalCause, TokenId};

/// An error of a draw; all variants have the absolute position of the token to draw.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DrawError {
    /// Every token is masked.
    #[error(
        "no token is allowed at position {position}: loosen the mask, the stop tokens under min_tokens or logit_bias"
    )]
    NothingAllowed {
        /// Position of the token to draw.
        position: u32,
    },
    /// A logit is NaN or positive infinity, so there are no probabilities.
    #[error(
        "logit of token {token_id} at position {position} is not a number: check the model's weights and logit_bias"
    )]
    NotANumber {
        /// Position of the token to draw.
        position: u32,
        /// The lowest such token.
        token_id: TokenId,
    },
    /// The draft cannot be verified in the sequence's acceptance mode.
    #[error("draft at position {position} is refused: {reason}")]
    BadDraft {
        /// Position of the first invalid drafted token.
        position: u32,
        /// What is wrong with it and what to send instead.
        reason: String,
    },
    /// The sequence's grammar has no mask for this position.
    #[error("the grammar gives no mask at position {position}: {reason}")]
    NoMask {
        /// Position of the token to draw.
        position: u32,
        /// Why there is no mask.
        reason: String,
    },
    /// Logits and draft have incompatible shapes: a bug of the caller.
    #[error(
        "{got} logits at position {position} where {expected} are needed: one row of the vocabulary for each drafted token and one more"
    )]
    WrongShape {
        /// Position of the first row.
        position: u32,
        /// Rows times vocabulary size.
        expected: usize,
        /// Number of logits passed.
        got: usize,
    },
}

impl From<DrawError> for Refusal {
    fn from(error: DrawError) -> Self {
        let cause = match error {
            DrawError::NoMask { .. } => RefusalCause::Grammar,
            DrawError::NothingAllowed { .. }
            | DrawError::NotANumber { .. }
            | DrawError::BadDraft { .. }
            | DrawError::WrongShape { .. } => RefusalCause::Failure,
        };
        Self { cause, reason: error.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_mask_is_refused_because_of_the_grammar() {
        let reason = "no".to_owned();
        let errors = [
            (DrawError::NoMask { position: 3, reason: reason.clone() }, RefusalCause::Grammar),
            (DrawError::NothingAllowed { position: 3 }, RefusalCause::Failure),
            (DrawError::NotANumber { position: 3, token_id: 1 }, RefusalCause::Failure),
            (DrawError::BadDraft { position: 3, reason }, RefusalCause::Failure),
            (DrawError::WrongShape { position: 3, expected: 8, got: 4 }, RefusalCause::Failure),
        ];
        for (error, cause) in errors {
            let words = error.to_string();
            assert_eq!(Refusal::from(error), Refusal { cause, reason: words });
        }
    }
}
