//! What a draw depends on besides its row: the occurrences of each token before the position, for penalties,
//! and the output's ids, for bad words.
//!
//! Drafted ids are pushed while they are verified and popped again, so that penalties and bad words at a
//! drafted position are exactly those of ids committed one at a time.

use std::collections::BTreeMap;

use crate::TokenId;

/// Occurrences of each token in prompt and output, and the output. Needed only for sequences with penalties
/// or bad words.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenCounts {
    prompt_len: u32,
    len: u32,
    /// Ordered, so that results do not depend on a hasher's seed.
    by_token: BTreeMap<TokenId, Occurrences>,
    output: Vec<TokenId>,
}

/// Occurrences of one token before the position; at least one of the two is positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Occurrences {
    pub(super) in_prompt: u32,
    pub(super) in_output: u32,
}

impl TokenCounts {
    /// Creates empty counts; the first `prompt_len` pushed ids belong to the prompt.
    pub fn new(prompt_len: u32) -> Self {
        Self { prompt_len, ..Self::default() }
    }

    /// Appends an id.
    pub fn push(&mut self, id: TokenId) {
        let in_prompt = self.len < self.prompt_len;
        let occurrences = self.by_token.entry(id).or_default();
        if in_prompt {
            occurrences.in_prompt += 1;
        } else {
            occurrences.in_output += 1;
            self.output.push(id);
        }
        self.len += 1;
    }

    /// Removes the last id, which must be `id`.
    pub fn pop(&mut self, id: TokenId) {
        let in_prompt = self.len <= self.prompt_len;
        let occurrences = self.by_token.get_mut(&id).expect("an id that is popped was pushed");
        if in_prompt {
            occurrences.in_prompt -= 1;
        } else {
            occurrences.in_output -= 1;
            self.output.pop();
        }
        if *occurrences == Occurrences::default() {
            self.by_token.remove(&id);
        }
        self.len -= 1;
    }

    /// Number of counted ids.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether no ids are counted.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ids of the output.
    pub(super) fn output(&self) -> &[TokenId] {
        &self.output
    }

    /// All tokens that occur, by id.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TokenId, Occurrences)> {
        self.by_token.iter().map(|(&id, &occurrences)| (id, occurrences))
    }
}
