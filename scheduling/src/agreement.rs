//! Evidence at no cost for the target: a draft worker that is fed committed tokens reports for each whether
//! it would have drawn it itself.
//!
//! Noise is shared (contract B), so this evidence is exact: a draft that began before the first of these
//! tokens would have been accepted up to the first disagreement. The position of a token in such a draft
//! follows from the tokens before it. The first token after a disagreement, or after a draft with a
//! rejection, is the first of a draft. The token after a fully accepted draft is at the next position of that
//! draft.

use std::ops::Range;

use speculation::step::MAX_DRAFT_TOKENS;

/// Position of a sequence's next committed token in the draft for which it is evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Agreement {
    position: u32,
    /// Whether the next context's first id lacks evidence. The worker cannot compare it, because the logits
    /// before it were discarded.
    has_gap: bool,
}

impl Agreement {
    /// Records a verification that judged `judged` drafted tokens and accepted the first `accepted`.
    pub(crate) fn on_verified(&mut self, judged: u32, accepted: u32) {
        if judged > 0 {
            let position = if accepted >= judged { judged % MAX_DRAFT_TOKENS as u32 } else { 0 };
            *self = Self { position, has_gap: false };
        }
    }

    /// Converts a report about the latest committed tokens that a draft worker was fed, oldest first. Returns
    /// for each the judged position, and the number of accepted positions up to it.
    pub(crate) fn observe_reported(&mut self, agreed: &[bool]) -> Vec<(Range<u32>, u32)> {
        if std::mem::replace(&mut self.has_gap, true) {
            self.position = 0;
        }
        agreed.iter().map(|agreed| self.advance(*agreed)).collect()
    }

    /// The same for the next committed token.
    pub(crate) fn advance(&mut self, agreed: bool) -> (Range<u32>, u32) {
        let at = self.position;
        self.position = if agreed { (at + 1) % MAX_DRAFT_TOKENS as u32 } else { 0 };
        (at..at + 1, at + u32::from(agreed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_told_to_the_positions_that_a_draft_would_have_had() {
        let mut agreement = Agreement::default();
        let told = agreement.observe_reported(&[true, true, false, false]);
        assert_eq!(told, [(0..1, 1), (1..2, 2), (2..3, 2), (0..1, 0)]);
        agreement.on_verified(3, 3);
        assert_eq!(
            agreement.observe_reported(&[true]),
            [(3..4, 4)],
            "the token after a fully accepted draft"
        );
        assert_eq!(agreement.observe_reported(&[true]), [(0..1, 1)], "a token in between was not reported");
        agreement.on_verified(3, 1);
        assert_eq!(agreement.observe_reported(&[false]), [(0..1, 0)]);
        agreement.on_verified(0, 0);
        assert!(
            agreement.observe_reported(&[true; 64]).iter().all(|(at, _)| at.end <= MAX_DRAFT_TOKENS as u32)
        );
    }
}
