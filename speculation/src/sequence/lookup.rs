//! A round whose draft was looked up ([`crate::lookup`]): it is verified at once, and no draft worker is asked.

use super::*;
use crate::ngram::certain;

impl Sequence {
    /// Begins a round with these drafted ids, as far as they exist and fit.
    pub(super) fn begin_with(&mut self, now: Duration, mut token_ids: Vec<TokenId>) {
        if self.phase != Phase::Ready {
            return;
        }
        let room = self.spec.max_len.saturating_sub(self.committed.len() + 1) as usize;
        let exist = token_ids.iter().position(|id| *id >= self.limits.vocab_size).unwrap_or(token_ids.len());
        token_ids.truncate(exist.min(room).min(MAX_DRAFT_TOKENS));
        // The draft worker is kept near, as beside plain rounds: it is asked again once nothing is looked up any more.
        let is_behind = self.committed.len() - self.draft_have() >= IDLE_FEED_LAG;
        if self.draft.assigned && is_behind && self.draft_is_free(now) {
            self.feed_draft(now, Duration::ZERO);
        }
        let q = match self.spec.acceptance {
            AcceptanceMode::Rejection => certain(&token_ids),
            AcceptanceMode::Coupled | AcceptanceMode::Typical => Vec::new(),
        };
        self.verify(now, Draft { q, ..Draft::chain(token_ids) });
    }
}
