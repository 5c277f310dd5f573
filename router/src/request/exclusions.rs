//! Tokens that a request excludes: `allowed_token_ids` and `bad_words`. At every position some token must
//! remain, whatever the output before it is: a target that can draw nothing refuses the sequence.

use std::collections::HashSet;

use proto::sampling::{MAX_BAD_WORD_IDS, MAX_BAD_WORDS};
use speculation::{SamplingParams, TokenId};

use super::bounds::at_most;
use super::check::checked_token_ids;
use super::checked::CheckedRequest;
use super::limits;
use super::raw::RawSampling;
use crate::catalog::ModelEntry;
use crate::error::RouterError;

const ALLOWED_TOKEN_IDS: &str = "allowed_token_ids";
const BAD_WORDS: &str = "bad_words";

impl RawSampling {
    /// The field that excludes tokens, if any does.
    pub(super) fn exclusion_field(&self) -> Option<&'static str> {
        let has_bad_words = !self.bad_words.is_empty() || !self.bad_word_ids.is_empty();
        let allowed = self.allowed_token_ids.as_ref().map(|_| ALLOWED_TOKEN_IDS);
        allowed.or(has_bad_words.then_some(BAD_WORDS))
    }

    /// Returns the only ids that may be drawn, in ascending order; none: all.
    pub(super) fn checked_allowed_token_ids(&self, entry: &ModelEntry) -> Result<Vec<TokenId>, RouterError> {
        let (field, max) = (ALLOWED_TOKEN_IDS, limits::ALLOWED_TOKEN_IDS_MAX);
        let Some(ids) = &self.allowed_token_ids else { return Ok(Vec::new()) };
        if ids.is_empty() || ids.len() > max {
            let message = format!("{field} has {} ids, it must have 1 to {max}", ids.len());
            return Err(RouterError::invalid(field, message));
        }
        let mut ids = checked_token_ids(field, ids, entry)?;
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// Returns the bad words that were sent as token ids.
    pub(super) fn checked_bad_word_ids(&self, entry: &ModelEntry) -> Result<Vec<Vec<TokenId>>, RouterError> {
        let checked = |(idx, ids): (usize, &Vec<i64>)| {
            let path = format!("{BAD_WORDS}[{idx}]");
            if ids.is_empty() {
                return Err(RouterError::invalid(BAD_WORDS, format!("{path} has no token ids")));
            }
            checked_token_ids(&path, ids, entry)
        };
        self.bad_word_ids.iter().enumerate().map(checked).collect()
    }

    /// Returns the bad words that were sent as text.
    pub(super) fn checked_bad_words(&self) -> Result<Vec<String>, RouterError> {
        at_most(BAD_WORDS, self.bad_words.len(), "words", limits::BAD_WORDS_MAX)?;
        let len = self.bad_words.iter().map(String::len).sum();
        at_most(BAD_WORDS, len, "bytes in all words", limits::BAD_WORDS_BYTES_MAX)?;
        match self.bad_words.iter().position(|word| word.trim().is_empty()) {
            Some(idx) => {
                let message = format!("{BAD_WORDS}[{idx}] must not be empty or only whitespace");
                Err(RouterError::invalid(BAD_WORDS, message))
            }
            None => Ok(self.bad_words.clone()),
        }
    }
}

impl CheckedRequest {
    /// Adds the tokens of the bad words, and checks that some token is never excluded.
    pub fn exclude(&mut self, bad_words: Vec<Vec<TokenId>>) -> Result<(), RouterError> {
        let sampling = &mut self.sampling;
        sampling.bad_words.extend(bad_words);
        let len = sampling.bad_words.len();
        let num_ids: usize = sampling.bad_words.iter().map(Vec::len).sum();
        if len > MAX_BAD_WORDS || num_ids > MAX_BAD_WORD_IDS {
            let message = format!(
                "{BAD_WORDS} make {len} sequences of {num_ids} tokens, at most {MAX_BAD_WORDS} of \
                 {MAX_BAD_WORD_IDS} are allowed"
            );
            return Err(RouterError::invalid(BAD_WORDS, message));
        }
        if leaves_a_token(&self.sampling, &self.stop.token_ids, self.entry.vocab_size) {
            return Ok(());
        }
        let field = if self.sampling.allowed_token_ids.is_empty() { BAD_WORDS } else { ALLOWED_TOKEN_IDS };
        let message = format!(
            "{field} may leave no token to generate: allow one that ends no bad word, and with min_tokens one \
             that is no stop token"
        );
        Err(RouterError::invalid(field, message))
    }
}

/// Whether a token is allowed at every position, whatever the output is: it ends no bad word, and is no stop
/// token where `min_tokens` excludes them.
fn leaves_a_token(sampling: &SamplingParams, stop_token_ids: &[TokenId], vocab_size: u32) -> bool {
    if !sampling.has_exclusions() {
        return true;
    }
    let mut excluded: HashSet<TokenId> =
        sampling.bad_words.iter().filter_map(|word| word.last().copied()).collect();
    if sampling.min_tokens > 0 {
        excluded.extend(stop_token_ids);
    }
    if sampling.allowed_token_ids.is_empty() {
        return (0..vocab_size).any(|id| !excluded.contains(&id));
    }
    sampling.allowed_token_ids.iter().any(|id| !excluded.contains(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_is_never_excluded_is_required() {
        let sampling = |allowed: &[TokenId], bad_words: &[&[TokenId]], min_tokens| SamplingParams {
            allowed_token_ids: allowed.to_vec(),
            bad_words: bad_words.iter().map(|word| word.to_vec()).collect(),
            min_tokens,
            ..SamplingParams::default()
        };
        for (sampling, expected) in [
            (sampling(&[], &[], 5), true),
            (sampling(&[7], &[], 0), true),
            // 7 is a stop token.
            (sampling(&[7], &[], 1), false),
            (sampling(&[6, 7], &[], 1), true),
            (sampling(&[6, 7], &[&[6]], 0), true),
            (sampling(&[6, 7], &[&[6]], 1), false),
            (sampling(&[6, 7], &[&[6], &[1, 7]], 0), false),
            (sampling(&[], &[&[0], &[1], &[2, 2], &[3], &[4], &[5], &[6]], 0), true),
            (sampling(&[], &[&[0], &[1], &[2, 2], &[3], &[4], &[5], &[6]], 1), false),
        ] {
            assert_eq!(leaves_a_token(&sampling, &[7], 8), expected, "{sampling:?}");
        }
    }
}
