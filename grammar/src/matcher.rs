//! [`Matcher`]: computes which tokens a grammar allows after an output.
//!
//! The result depends only on the grammar and the output's ids. The parser's state is a cache: it is moved to
//! the requested ids by rolling back what differs and reading what is new, regardless of the previous
//! request.

use std::sync::Arc;

use llguidance::Matcher as Parser;
use speculation::TokenId;
use speculation::logits::TokenMask;

use crate::GrammarError;
use crate::compiler::one_line;

/// One grammar and the state of one sequence in it.
pub struct Matcher {
    /// The parser at the start of the text; never advanced.
    fresh: Arc<Parser>,
    parser: Parser,
    /// The ids that `parser` has read.
    read: Vec<TokenId>,
    num_tokens: usize,
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("read", &self.read.len()).finish_non_exhaustive()
    }
}

impl Matcher {
    pub(crate) fn new(parser: Parser, num_tokens: usize) -> Self {
        Self { parser: parser.deep_clone(), fresh: Arc::new(parser), read: Vec::new(), num_tokens }
    }

    /// A matcher at the start of the text, for another sequence, without shared mutable state.
    pub fn fork(&self) -> Self {
        Self {
            fresh: Arc::clone(&self.fresh),
            parser: self.fresh.deep_clone(),
            read: Vec::new(),
            num_tokens: self.num_tokens,
        }
    }

    /// Returns the mask after `output`, then one after each leading id of `drafted` as far as later rows can
    /// be reached: the walk ends at an id that the grammar does not allow or that ends the sequence.
    pub fn masks(
        &mut self,
        output: &[TokenId],
        drafted: &[TokenId],
        stop_token_ids: &[TokenId],
    ) -> Result<Vec<TokenMask>, GrammarError> {
        self.move_to(output)?;
        let mut masks = vec![self.mask(stop_token_ids)?];
        for &id in drafted {
            let goes_on = masks.last().is_some_and(|mask| mask.allows(id)) && !stop_token_ids.contains(&id);
            // An error after a drafted id is caused by the draft: the masks end there.
            if !goes_on || self.read_on(&[id]).is_err() {
                break;
            }
            let Ok(mask) = self.mask(stop_token_ids) else { break };
            masks.push(mask);
        }
        Ok(masks)
    }

    /// Moves the parser to `output`.
    fn move_to(&mut self, output: &[TokenId]) -> Result<(), GrammarError> {
        let shared = self.read.iter().zip(output).take_while(|(read, id)| read == id).count();
        if self.parser.rollback(self.read.len() - shared).is_ok() {
            self.read.truncate(shared);
        } else {
            self.start_again();
        }
        let unread = output[self.read.len()..].to_vec();
        self.read_on(&unread)
    }

    fn read_on(&mut self, ids: &[TokenId]) -> Result<(), GrammarError> {
        for &id in ids {
            if let Err(error) = self.parser.consume_token(id) {
                let error = self.fault(&error.to_string());
                self.start_again();
                return Err(error);
            }
            self.read.push(id);
        }
        Ok(())
    }

    /// The tokens allowed after the ids read so far. If the text may end here, all stop tokens are allowed.
    fn mask(&mut self, stop_token_ids: &[TokenId]) -> Result<TokenMask, GrammarError> {
        let end = self.num_tokens as TokenId;
        let allowed = match self.parser.compute_mask_or_eos() {
            Ok(allowed) => allowed,
            Err(error) => {
                let error = self.fault(&error.to_string());
                self.start_again();
                return Err(error);
            }
        };
        let mut mask = TokenMask::new(allowed.as_slice(), self.num_tokens);
        if allowed.is_allowed(end) {
            stop_token_ids.iter().for_each(|&id| mask.allow(id));
        }
        Ok(mask)
    }

    fn fault(&self, reason: &str) -> GrammarError {
        GrammarError::Match { position: self.read.len(), reason: one_line(reason) }
    }

    fn start_again(&mut self) {
        self.parser = self.fresh.deep_clone();
        self.read.clear();
    }
}

#[cfg(test)]
mod tests;
