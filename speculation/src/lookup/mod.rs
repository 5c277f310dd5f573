//! Drafts by lookup, without a model or worker. [`SuffixIndex`] copies what followed an earlier occurrence of
//! the last ids in the sequence; [`PredictionCursor`] copies the text that a client predicts
//! ([`PredictedText`]). Both follow the committed ids one by one and report for each id whether they expected
//! it, so their quality is known before they are used for drafting.
//!
//! Pure: the ids belong to the sequence and are passed in. A lookup must never propose an id that the
//! sequence or the prediction does not contain.

mod prediction;
mod suffix;

pub use prediction::{PredictedText, PredictionCursor};
pub use suffix::SuffixIndex;

use crate::TokenId;

/// Maximum match length of a search. A match that is followed from there on may become longer.
pub const MAX_MATCH_LEN: usize = 64;

/// Maximum number of places examined by a search.
const MAX_SEARCHED_POSITIONS: usize = 64;

/// The prediction of a source for one committed id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckedPrediction {
    /// Match length: number of preceding ids that equal those before the place copied from; 0 for a guess
    /// without a match.
    pub match_len: u32,
    /// Whether the prediction equals the committed id.
    pub is_correct: bool,
}

/// Ids that a source predicts next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookupMatch {
    /// The predicted ids, at least one.
    pub token_ids: Vec<TokenId>,
    /// Match length: how many of the last committed ids stand before the place copied from.
    pub match_len: u32,
}

/// The read position of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Match {
    /// Index of the id predicted next.
    next: usize,
    match_len: u32,
}

/// Number of equal ids at the end of `a` and `b`, up to [`MAX_MATCH_LEN`].
fn common_suffix(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(MAX_MATCH_LEN).take_while(|(a, b)| a == b).count()
}
