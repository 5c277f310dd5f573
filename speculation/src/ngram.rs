//! A drafter without a model: proposes what followed the most recent occurrence of the last few tokens in the
//! same sequence.
//!
//! A pure lookup without state. It must only propose copies of the sequence's own ids.

use crate::TokenId;
use crate::step::DraftDistribution;

/// Maximum match length; agreement beyond this many last tokens is not compared.
const LONGEST_MATCH: usize = 4;

/// Proposes what follows `ids`: finds the longest match of the last 4 to 1 tokens earlier in `ids` (the most
/// recent of equally long ones) and returns at most `max_tokens` ids that followed it. Empty if the last
/// token has not occurred before.
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

/// Distributions for rejection mode for ids that were looked up, not drawn: each assigns all weight to its
/// token.
pub fn point_distributions(token_ids: &[TokenId]) -> Vec<DraftDistribution> {
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
        // 5 follows the most recent 2, 4 follows the most recent [1, 2]: the longer match wins.
        check(&[1, 2, 4, 9, 2, 5, 1, 2], 1, &[4]);
        // Of two equally long matches the later one wins.
        check(&[1, 2, 4, 1, 2, 5, 1, 2], 1, &[5]);
        // A match of four tokens wins over a later one of three.
        check(&[1, 2, 3, 4, 9, 8, 2, 3, 4, 7, 1, 2, 3, 4], 1, &[9]);
        // Matches beyond four tokens count as equal: the later one wins.
        check(&[0, 1, 2, 3, 4, 8, 9, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4], 1, &[5]);
        // A match may overlap the end.
        check(&[6, 6, 6], 4, &[6]);
    }
}
