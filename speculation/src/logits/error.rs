//! Why a token cannot be drawn. Every variant refuses one sequence's step and nothing else.

use crate::TokenId;

/// See the variants; all of them name the absolute position of the token that was to be drawn.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DrawError {
    /// Every token is masked.
    #[error(
        "no token is allowed at position {position}: loosen the mask, the stop tokens under min_tokens or logit_bias"
    )]
    NothingAllowed {
        /// Of the token that was to be drawn.
        position: u32,
    },
    /// A logit is NaN or positive infinity, from which no probability follows.
    #[error(
        "logit of token {token_id} at position {position} is not a number: check the model's weights and logit_bias"
    )]
    NotANumber {
        /// Of the token that was to be drawn.
        position: u32,
        /// The lowest such token.
        token_id: TokenId,
    },
    /// The draft cannot be judged in the sequence's acceptance mode.
    #[error("draft at position {position} is refused: {reason}")]
    BadDraft {
        /// Of the first drafted token at fault.
        position: u32,
        /// What is wrong with it and what to send instead.
        reason: String,
    },
    /// The sequence's grammar has no mask for this position.
    #[error("the grammar gives no mask at position {position}: {reason}")]
    NoMask {
        /// Of the token that was to be drawn.
        position: u32,
        /// Why not.
        reason: String,
    },
    /// Logits and draft do not fit together: a fault of the caller.
    #[error(
        "{got} logits at position {position} where {expected} are needed: one row of the vocabulary for each drafted token and one more"
    )]
    WrongShape {
        /// Of the first row.
        position: u32,
        /// Rows times vocabulary.
        expected: usize,
        /// What was passed.
        got: usize,
    },
}
