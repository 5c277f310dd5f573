//! A round with a lookup draft ([`crate::lookup`]): it is verified at once, without asking a draft worker.

use super::*;
use crate::ngram::point_distributions;

impl Sequence {
    /// Begins a round with these drafted ids, cut at the first invalid id and to the remaining length.
    pub(super) fn begin_lookup_round(
        &mut self,
        now: Duration,
        mut token_ids: Vec<TokenId>,
        feed_draft: bool,
    ) {
        if self.phase != Phase::Ready {
            return;
        }
        let room = self.spec.max_len.saturating_sub(self.committed.len() + 1) as usize;
        let exist = token_ids.iter().position(|id| *id >= self.config.vocab_size).unwrap_or(token_ids.len());
        token_ids.truncate(exist.min(room).min(MAX_DRAFT_TOKENS));
        if feed_draft && self.draft_lag() > 0 && self.draft.assigned && self.try_free_draft(now) {
            self.feed_draft(now, Duration::ZERO);
        }
        let q = match effective_mode(&self.spec) {
            AcceptanceMode::Rejection => point_distributions(&token_ids),
            AcceptanceMode::Coupled | AcceptanceMode::Typical => Vec::new(),
        };
        self.verify(now, Draft { q, ..Draft::chain(token_ids) });
    }
}
