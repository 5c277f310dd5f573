//! Draft-ahead: how much of a proposal already exists when it is requested, because the draft worker drafted
//! it while the previous proposal was verified. A round does not wait for these tokens.

use crate::smoothing::{EWMA_WINDOW, toward};

/// By position, the share of proposals whose token there was drafted ahead. Pure.
#[derive(Debug, Clone, Default)]
pub struct DraftedAhead {
    shares: Vec<f64>,
}

impl DraftedAhead {
    /// Records a proposal of `asked` positions, the first `num_ahead` of which were drafted ahead.
    pub fn observe(&mut self, num_ahead: u32, asked: u32) {
        // New positions start from the share at the previous one.
        for position in 0..asked {
            let was_there = f64::from(u8::from(position < num_ahead));
            if self.shares.len() == position as usize {
                self.shares.push(self.shares.last().copied().unwrap_or(0.0));
            }
            toward(&mut self.shares[position as usize], was_there, EWMA_WINDOW);
        }
        // Positions that are no longer requested follow the last one that is: with an old, low share they would
        // never be requested again.
        let Some((requested, others)) = self.shares.split_at_mut_checked(asked as usize) else { return };
        if let Some(&mut last) = requested.last_mut() {
            others.iter_mut().for_each(|share| toward(share, last, EWMA_WINDOW));
        }
    }

    /// Share by position; absent for positions that were never requested.
    pub fn shares(&self) -> &[f64] {
        &self.shares
    }

    /// Mean number of forward passes that a round waits for with a proposal of `k` tokens. Positions that
    /// were never requested use the share of the last one that was.
    pub fn forwards(&self, k: u32) -> f64 {
        let Some(&last) = self.shares.last() else { return f64::from(k) };
        let share = |position: u32| self.shares.get(position as usize).copied().unwrap_or(last);
        (0..k).map(|position| 1.0 - share(position)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_guess_is_a_forward_until_some_come_sooner() {
        let mut ahead = DraftedAhead::default();
        assert_eq!(ahead.forwards(4), 4.0);
        (0..100).for_each(|_| ahead.observe(0, 4));
        assert_eq!(ahead.forwards(4), 4.0);
    }

    #[test]
    fn positions_are_told_apart_and_the_rest_is_taken_to_be_like_the_last() {
        let mut ahead = DraftedAhead::default();
        (0..400).for_each(|round| ahead.observe(if round % 2 == 0 { 2 } else { 0 }, 3));
        // Two of three are drafted ahead in half of the proposals.
        assert!((ahead.forwards(1) - 0.5).abs() < 0.02, "{}", ahead.forwards(1));
        assert!((ahead.forwards(3) - 2.0).abs() < 0.04, "{}", ahead.forwards(3));
        assert!((ahead.forwards(8) - 7.0).abs() < 0.04, "{}", ahead.forwards(8));
    }

    #[test]
    fn positions_that_are_no_longer_requested_follow_the_last_that_is() {
        let mut ahead = DraftedAhead::default();
        (0..400).for_each(|_| ahead.observe(0, 6));
        assert_eq!(ahead.forwards(6), 6.0);
        (0..400).for_each(|_| ahead.observe(2, 2));
        assert!(ahead.forwards(6) < 0.1, "{}", ahead.forwards(6));
        (0..400).for_each(|_| ahead.observe(0, 0));
        assert!(ahead.forwards(6) < 0.1, "a proposal of no position tells nothing");
    }

    #[test]
    fn what_a_worker_claims_beyond_what_was_asked_counts_for_nothing() {
        let mut ahead = DraftedAhead::default();
        (0..400).for_each(|_| ahead.observe(u32::MAX, 2));
        assert!(ahead.forwards(2) < 0.01 && ahead.forwards(0) == 0.0);
    }
}
