//! Evidence that costs a target nothing: a draft worker that is fed committed tokens says of each whether it would have drawn it itself.
//!
//! Noise is shared (contract B), so that is exact: a draft begun before the first of them would have had its guesses accepted as far as it
//! agrees, and no further. Which position of a draft a token stands for follows from what came before it: the first after a
//! disagreement, or after a draft that was rejected, is the first of a draft; the one after a draft that was accepted whole, the next.

use std::ops::Range;

use speculation::step::MAX_DRAFT_TOKENS;

/// Where the next committed token of one sequence stands in the draft that it is evidence of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Agreement {
    position: u32,
    /// Of the first id of the next context nobody will tell: what would have been drawn behind a context that was fed earlier is forgotten.
    has_gap: bool,
}

impl Agreement {
    /// A verification judged `judged` drafted tokens and accepted the first `accepted`.
    pub fn judged(&mut self, judged: u32, accepted: u32) {
        if judged > 0 {
            let position = if accepted >= judged { judged % MAX_DRAFT_TOKENS as u32 } else { 0 };
            *self = Self { position, has_gap: false };
        }
    }

    /// A draft worker was sent committed tokens, and told of the last of them, oldest first, whether it would have drawn them: the positions that
    /// were judged by each, and as far as which they were accepted.
    pub fn told(&mut self, agreed: &[bool]) -> Vec<(Range<u32>, u32)> {
        if std::mem::replace(&mut self.has_gap, true) {
            self.position = 0;
        }
        agreed.iter().map(|agreed| self.next(*agreed)).collect()
    }

    /// The same of the next committed token.
    pub fn next(&mut self, agreed: bool) -> (Range<u32>, u32) {
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
        let told = agreement.told(&[true, true, false, false]);
        assert_eq!(told, [(0..1, 1), (1..2, 2), (2..3, 2), (0..1, 0)]);
        agreement.judged(3, 3);
        assert_eq!(agreement.told(&[true]), [(3..4, 4)], "the token behind a draft that was accepted whole");
        assert_eq!(agreement.told(&[true]), [(0..1, 1)], "one between them was not told of");
        agreement.judged(3, 1);
        assert_eq!(agreement.told(&[false]), [(0..1, 0)]);
        agreement.judged(0, 0);
        assert!(agreement.told(&[true; 64]).iter().all(|(at, _)| at.end <= MAX_DRAFT_TOKENS as u32));
    }
}
