//! [`TokenMask`]: the tokens that a grammar allows at one position (contract B1, first step).

use crate::TokenId;

/// One bit per token; tokens past the last bit are not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// The first `num_tokens` bits of `words`, lowest bit first.
    pub fn new(words: &[u32], num_tokens: usize) -> Self {
        let mut words = words[..num_tokens.div_ceil(32).min(words.len())].to_vec();
        let used = num_tokens % 32;
        if used > 0
            && words.len() == num_tokens.div_ceil(32)
            && let Some(last) = words.last_mut()
        {
            *last &= (1 << used) - 1;
        }
        Self { words }
    }

    /// Allows one more token.
    pub fn allow(&mut self, id: TokenId) {
        let word = id as usize / 32;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (id % 32);
    }

    /// Whether the token is allowed.
    pub fn allows(&self, id: TokenId) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Masks all tokens that are not allowed in a row of logits.
    pub fn apply(&self, logits: &mut [f32]) {
        let words = self.words.iter().copied().chain(std::iter::repeat(0));
        for (block, word) in logits.chunks_mut(32).zip(words) {
            if word == u32::MAX {
                continue;
            }
            for (bit, logit) in block.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_what_has_no_bit() {
        for num_tokens in [1, 31, 32, 33, 64, 70] {
            let mut mask = TokenMask::new(&[0b101, u32::MAX, 0b11, 0], num_tokens);
            mask.allow(90);
            let mut row = vec![1.0; 100];
            mask.apply(&mut row);
            for (id, logit) in row.into_iter().enumerate() {
                let has_bit = matches!(id, 0 | 2 | 32..=65) && id < num_tokens || id == 90;
                assert_eq!(logit == 1.0, has_bit, "id {id} of {num_tokens}");
                assert_eq!(mask.allows(id as TokenId), has_bit, "id {id} of {num_tokens}");
            }
        }
        assert!(!TokenMask::new(&[], 10).allows(3));
    }
}
