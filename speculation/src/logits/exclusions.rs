//! Tokens that a request excludes (contract B1): all but its allowed ids, and the last token of each bad word
//! where the output ends with the tokens before it.

use super::{TokenMask, edit_logit};
use crate::{SamplingParams, TokenId};

/// Masks the excluded tokens in a row of logits. `output` has the output's ids before the row's position,
/// drafted ones included (unread unless the sequence has bad words).
pub(super) fn exclude(logits: &mut [f32], sampling: &SamplingParams, output: &[TokenId]) {
    if !sampling.allowed_token_ids.is_empty() {
        let mut mask = TokenMask::new(&[], 0);
        // An id outside the row may be any number, and a mask holds a bit for each id up to its largest.
        let in_row = |id: &&TokenId| (**id as usize) < logits.len();
        sampling.allowed_token_ids.iter().filter(in_row).for_each(|&id| mask.allow(id));
        mask.apply(logits);
    }
    for id in ends_of_bad_words(&sampling.bad_words, output) {
        edit_logit(logits, id, |_| f32::NEG_INFINITY);
    }
}

/// Whether a token that follows this output is not excluded. Only the end of `output` matters, as many ids as
/// the longest bad word has.
pub(crate) fn is_allowed(sampling: &SamplingParams, output: &[TokenId], id: TokenId) -> bool {
    let allowed = &sampling.allowed_token_ids;
    (allowed.is_empty() || allowed.binary_search(&id).is_ok())
        && ends_of_bad_words(&sampling.bad_words, output).all(|end| end != id)
}

/// The tokens that would complete a bad word.
fn ends_of_bad_words(bad_words: &[Vec<TokenId>], output: &[TokenId]) -> impl Iterator<Item = TokenId> {
    bad_words.iter().filter_map(move |word| {
        let (&end, before) = word.split_last()?;
        output.ends_with(before).then_some(end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The allowed ids of a vocabulary of 8, by both functions.
    fn allowed(sampling: &SamplingParams, output: &[TokenId]) -> Vec<TokenId> {
        let mut row = [1.0; 8];
        exclude(&mut row, sampling, output);
        let ids: Vec<TokenId> = (0..8).filter(|&id| row[id as usize] == 1.0).collect();
        assert!(row.iter().all(|&logit| logit == 1.0 || logit == f32::NEG_INFINITY), "{row:?}");
        let single: Vec<TokenId> = (0..8).filter(|&id| is_allowed(sampling, output, id)).collect();
        assert_eq!(ids, single, "{sampling:?} after {output:?}");
        ids
    }

    #[test]
    fn the_last_token_of_a_bad_word_is_excluded_after_the_others() {
        let sampling = SamplingParams {
            bad_words: vec![vec![7], vec![1, 2], vec![2, 1, 3], vec![5, 5], vec![900]],
            ..SamplingParams::default()
        };
        for (output, expected) in [
            (&[][..], &[0, 1, 2, 3, 4, 5, 6][..]),
            (&[1], &[0, 1, 3, 4, 5, 6]),
            (&[2, 1], &[0, 1, 4, 5, 6]),
            (&[2, 1, 1], &[0, 1, 3, 4, 5, 6]),
            (&[5], &[0, 1, 2, 3, 4, 6]),
            (&[1, 4], &[0, 1, 2, 3, 4, 5, 6]),
        ] {
            assert_eq!(allowed(&sampling, output), expected, "after {output:?}");
        }
    }

    #[test]
    fn only_allowed_tokens_remain_and_bad_words_apply_to_them_as_well() {
        let allowed_token_ids = vec![0, 3, 6, 7_000, u32::MAX];
        let sampling = SamplingParams { allowed_token_ids, ..SamplingParams::default() };
        assert_eq!(allowed(&sampling, &[3]), [0, 3, 6]);
        let both = SamplingParams { bad_words: vec![vec![3, 6], vec![1]], ..sampling };
        assert_eq!(allowed(&both, &[3]), [0, 3]);
        assert_eq!(allowed(&both, &[0]), [0, 3, 6]);
        assert_eq!(allowed(&SamplingParams::default(), &[3]), (0..8).collect::<Vec<_>>());
    }
}
