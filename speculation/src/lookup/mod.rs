//! Drafts that are looked up: no model, no worker. [`SuffixIndex`] copies what followed the last ids when they stood earlier in the sequence;
//! [`PredictionCursor`] copies the text that a client predicts ([`PredictedText`]). Both follow the committed ids one by one, and tell of each
//! what they had expected in its place: so how good they are is known before anything of theirs was drafted.
//!
//! Pure: the ids stay with the sequence and are passed in. They must never propose an id that the sequence or the prediction does not hold.

mod prediction;
mod suffix;

pub use prediction::{PredictedText, PredictionCursor};
pub use suffix::SuffixIndex;

use crate::TokenId;

/// The longest match that a search tells apart. One that is followed from there on may become longer.
pub const LONGEST_SEARCHED: usize = 64;

/// A search looks at this many places at most.
const PLACES_MAX: usize = 64;

/// What a source expected in the place of one committed id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// How many ids before it were the same as where it was copied from; 0: it was only supposed to go on there.
    pub match_len: u32,
    /// Whether it was the committed id.
    pub is_right: bool,
}

/// Ids that a source expects next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// At least one.
    pub token_ids: Vec<TokenId>,
    /// How many of the last committed ids stand before the place that they are copied from.
    pub match_len: u32,
}

/// Where a source reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    /// Of the id that is expected next.
    next: usize,
    match_len: u32,
}

/// How many ids at the end of `a` and `b` are equal, as far as a search goes.
fn common_suffix(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(LONGEST_SEARCHED).take_while(|(a, b)| a == b).count()
}
