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

/// Maximum forced tokens that [`Matcher::check_start`] follows. A limit of the parser may be reached behind
/// the brace that begins an object.
const FORCED_MAX: usize = 16;

/// The parser's reason where nothing can follow.
const NO_CHOICE: &str = "NoExtension";

/// One grammar and the state of one sequence in it.
pub struct Matcher {
    /// The parser at the start of the text; never advanced.
    initial: Arc<Parser>,
    parser: Parser,
    /// The ids that `parser` has read.
    consumed: Vec<TokenId>,
    num_tokens: usize,
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("consumed", &self.consumed.len()).finish_non_exhaustive()
    }
}

impl Matcher {
    pub(crate) fn new(parser: Parser, num_tokens: usize) -> Self {
        Self { parser: parser.deep_clone(), initial: Arc::new(parser), consumed: Vec::new(), num_tokens }
    }

    /// A matcher at the start of the text, for another sequence, without shared mutable state.
    pub fn fork(&self) -> Self {
        Self {
            initial: Arc::clone(&self.initial),
            parser: self.initial.deep_clone(),
            consumed: Vec::new(),
            num_tokens: self.num_tokens,
        }
    }

    /// Returns the mask after `output`, then one after each leading id of `drafted` as far as later rows can
    /// be reached: the walk ends at an id that the grammar does not allow or that ends the sequence. Behind a
    /// stop token in `output`, where only drafts go on, every token is allowed.
    pub fn masks(
        &mut self,
        output: &[TokenId],
        drafted: &[TokenId],
        stop_token_ids: &[TokenId],
    ) -> Result<Vec<TokenMask>, GrammarError> {
        if stop_token_ids.iter().any(|id| output.contains(id)) {
            let words = vec![u32::MAX; self.num_tokens.div_ceil(32)];
            return Ok(vec![TokenMask::new(&words, self.num_tokens)]);
        }
        let mut ids = output.to_vec();
        let mut masks = vec![self.mask_after(&ids, stop_token_ids)?];
        for &id in drafted {
            if stop_token_ids.contains(&id) || !masks.last().is_some_and(|mask| mask.allows(id)) {
                break;
            }
            ids.push(id);
            // These ids fail without a draft as well. The masks end there; the row may not be reached.
            let Ok(mask) = self.mask_after(&ids, stop_token_ids) else { break };
            masks.push(mask);
        }
        Ok(masks)
    }

    /// The mask after `ids`. The parser's limits include what it keeps of other ids that it has read, such as
    /// lexer states. After an error it therefore reads these ids again from the start.
    fn mask_after(&mut self, ids: &[TokenId], stop_token_ids: &[TokenId]) -> Result<TokenMask, GrammarError> {
        self.try_mask_after(ids, stop_token_ids).or_else(|_| self.try_mask_after(ids, stop_token_ids))
    }

    /// As [`Self::mask_after`], once. Every error resets the parser.
    fn try_mask_after(
        &mut self,
        ids: &[TokenId],
        stop_token_ids: &[TokenId],
    ) -> Result<TokenMask, GrammarError> {
        self.rewind_and_consume(ids)?;
        self.mask(stop_token_ids)
    }

    /// Checks that the grammar allows an output, as far as its first choice.
    pub(crate) fn check_start(&mut self) -> Result<(), GrammarError> {
        // Any id stands for the end.
        let end = 0;
        let mut output = Vec::new();
        while output.len() < FORCED_MAX {
            let mask = self.masks(&output, &[], &[end]).map_err(|error| match error {
                GrammarError::Match { reason, .. } if reason.contains(NO_CHOICE) => no_output(),
                error => error,
            })?;
            let mask = &mask[0];
            let mut allowed = (0..self.num_tokens as TokenId).filter(|&id| mask.allows(id));
            match (allowed.next(), allowed.next()) {
                (None, _) => return Err(no_output()),
                (Some(forced), None) if forced != end => output.push(forced),
                _ => return Ok(()),
            }
        }
        Ok(())
    }

    /// Moves the parser to `output`.
    fn rewind_and_consume(&mut self, output: &[TokenId]) -> Result<(), GrammarError> {
        let shared = self.consumed.iter().zip(output).take_while(|(read, id)| read == id).count();
        let num_dropped = self.consumed.len() - shared;
        if self.parser.rollback(num_dropped).is_ok() {
            self.consumed.truncate(shared);
            if num_dropped > 0 {
                // The parser knows its last mask by the lexer's state and the row's index. After a rollback
                // another row may have the same index.
                self.parser.invalidate_bias_cache();
            }
        } else {
            self.reset();
        }
        let unread = output[self.consumed.len()..].to_vec();
        self.consume(&unread)
    }

    fn consume(&mut self, ids: &[TokenId]) -> Result<(), GrammarError> {
        for &id in ids {
            if let Err(error) = self.parser.consume_token(id) {
                let error = self.fault(&error.to_string());
                self.reset();
                return Err(error);
            }
            self.consumed.push(id);
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
                self.reset();
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
        GrammarError::Match { position: self.consumed.len(), reason: one_line(reason) }
    }

    fn reset(&mut self) {
        self.parser = self.initial.deep_clone();
        self.consumed.clear();
    }
}

fn no_output() -> GrammarError {
    GrammarError::Compile("no output matches the grammar".to_owned())
}

#[cfg(test)]
mod tests;
