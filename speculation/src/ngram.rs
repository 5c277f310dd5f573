//! A drafter without a model: what followed the last few tokens the last time they stood in the same sequence.
//!
//! Pure lookup, no state to keep or rebuild. It must never propose anything that is not a copy of the sequence's own ids.

use crate::TokenId;
use crate::step::DraftDistribution;

/// The longest match that is told apart: agreeing on more than this many last tokens counts no further.
const LONGEST_MATCH: usize = 4;

/// Guesses what follows `ids`: finds the longest match of the last 4 to 1 tokens earlier in `ids` (the most recent of
/// equally long ones) and returns what followed it, at most `max_tokens`; empty where the last token is new.
pub fn propose(ids: &[TokenId], max_tokens: usize) -> Vec<TokenId> {
    let mut longest = 0;
    let mut follows = ids.len();
    for end in (1..ids.len()).rev() {
        let matched = ids[..end].iter().rev().zip(ids.iter().rev()).take(LONGEST_MATCH);
        let length = matched.take_while(|(earlier, last)| earlier == last).count();
        if length > longest {
            longest = length;
            follows = end;
        }
        if longest == LONGEST_MATCH {
            break;
        }
    }
    ids[follows..].iter().copied().take(max_tokens).collect()
}

/// The distributions that rejection mode needs beside guesses that were looked up, not drawn: each certain of its token.
pub fn certain(token_ids: &[TokenId]) -> Vec<DraftDistribution> {
    token_ids.iter().map(|&id| vec![(id, 1.0)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(ids: &[TokenId], max_tokens: usize, expected: &[TokenId]) {
        assert_eq!(propose(ids, max_tokens), expected, "{ids:?}");
    }

    #[test]
    fn proposes_what_followed_the_longest_and_most_recent_match() {
        check(&[], 4, &[]);
        check(&[7], 4, &[]);
        check(&[1, 2, 3], 4, &[]);
        check(&[1, 2, 3, 1], 2, &[2, 3]);
        check(&[1, 2, 3, 1], 9, &[2, 3, 1]);
        check(&[1, 2, 3, 1], 0, &[]);
        // 5 stands after the most recent 2, 4 after the most recent [1, 2]: the longer match counts.
        check(&[1, 2, 4, 9, 2, 5, 1, 2], 1, &[4]);
        // Of two equally long matches the later one.
        check(&[1, 2, 4, 1, 2, 5, 1, 2], 1, &[5]);
        // Four matched tokens count for more than three later ones.
        check(&[1, 2, 3, 4, 9, 8, 2, 3, 4, 7, 1, 2, 3, 4], 1, &[9]);
        // Beyond four tokens a longer match is not longer: the later one again.
        check(&[0, 1, 2, 3, 4, 8, 9, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4], 1, &[5]);
        // A match may overlap the end.
        check(&[6, 6, 6], 4, &[6]);
    }
}
