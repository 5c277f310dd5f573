//! [`Matcher`]: which tokens a grammar allows behind an output.
//!
//! What it answers is a function of the grammar and the output's ids alone. The parser's state is a cache: it is brought to
//! the ids that are asked about, by rolling back what differs and reading what is new, however the last question went.

use std::sync::Arc;

use llguidance::Matcher as Parser;
use speculation::TokenId;
use speculation::logits::TokenMask;

use crate::GrammarError;
use crate::compiler::one_line;

/// One grammar, and how far one sequence has come in it.
pub struct Matcher {
    /// At the start of the text; never moved.
    fresh: Arc<Parser>,
    parser: Parser,
    /// What `parser` has read.
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

    /// One at the start of the text, for another sequence. They share nothing that either changes.
    pub fn fork(&self) -> Self {
        Self {
            fresh: Arc::clone(&self.fresh),
            parser: self.fresh.deep_clone(),
            read: Vec::new(),
            num_tokens: self.num_tokens,
        }
    }

    /// The mask behind `output`, then the one behind each leading id of `drafted` that the grammar goes on from: as many
    /// as can matter. An id that it does not allow, or that ends the sequence, is the last one asked about.
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
            // What fails behind a drafted id is the draft's fault: it is cut there.
            if !goes_on || self.read_on(&[id]).is_err() {
                break;
            }
            let Ok(mask) = self.mask(stop_token_ids) else { break };
            masks.push(mask);
        }
        Ok(masks)
    }

    /// Brings the parser to `output`.
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

    /// The tokens that may stand behind what was read. Where the text may end, every stop token is one of them.
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
