//! Time that prompts add to a target's forwards. A round waits for its target's forwards, and those with
//! prompt rows take longer than the step times of the other rows.

use crate::smoothing::{EWMA_WINDOW, toward};

/// Prompt times of one worker: decayed means over its forwards with rows of rounds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PromptTime {
    share: f64,
    added_us: f64,
    rounds_us: f64,
    forwards: u64,
}

impl PromptTime {
    /// Records a forward: the microseconds that rows of rounds take in it, and those that prompts added;
    /// `None`: it had no prompts. If the rows take no time, as a worker may report, nothing is compared.
    pub fn observe(&mut self, rounds_us: f64, added_us: Option<f64>) {
        self.forwards += u64::from(added_us.is_some());
        if rounds_us <= 0.0 {
            return;
        }
        let (share, added_us) = added_us.map_or((0.0, 0.0), |added_us| (1.0, added_us.max(0.0)));
        toward(&mut self.share, share, EWMA_WINDOW);
        toward(&mut self.added_us, added_us, EWMA_WINDOW);
        toward(&mut self.rounds_us, rounds_us, EWMA_WINDOW);
    }

    /// Records a forward of prompts alone. It adds nothing to the time of other rows, but rounds may have
    /// waited for its end.
    pub fn observe_alone(&mut self) {
        self.forwards += 1;
    }

    /// Number of forwards with prompts so far, those of prompts alone included.
    pub fn forwards(&self) -> u64 {
        self.forwards
    }

    /// Share of forwards with prompts.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// Time of forwards over the time that rows of rounds take in them, 1 or more. Prompts take time of the
    /// target at the rate at which they arrive, however many forwards it runs meanwhile.
    pub fn stretch(&self) -> f64 {
        if self.rounds_us > 0.0 { 1.0 + self.added_us / self.rounds_us } else { 1.0 }
    }

    /// Mean microseconds that prompts add to a forward with prompts.
    pub fn added_where_present_us(&self) -> f64 {
        if self.share > 0.0 { self.added_us / self.share } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_forwards_hold_a_prompt_that_takes_eight_milliseconds() {
        let mut prompts = PromptTime::default();
        assert_eq!(
            (prompts.added_where_present_us(), prompts.stretch()),
            (0.0, 1.0),
            "no forward was observed"
        );
        for forward in 0..4_000 {
            prompts.observe(10_000.0, (forward % 4 == 0).then_some(8_000.0));
        }
        assert_eq!(prompts.forwards(), 1_000);
        assert!((prompts.share() - 0.25).abs() < 0.01, "{}", prompts.share());
        assert!((prompts.stretch() - 1.2).abs() < 0.01, "{}", prompts.stretch());
        assert!((prompts.added_where_present_us() - 8_000.0).abs() < 1.0);
        let means = |prompts: &PromptTime| (prompts.share(), prompts.stretch());
        let before = means(&prompts);
        prompts.observe_alone();
        assert_eq!((prompts.forwards(), means(&prompts)), (1_001, before));
    }

    #[test]
    fn rows_that_take_no_time_make_no_forward_infinitely_longer() {
        let mut prompts = PromptTime::default();
        prompts.observe(10_000.0, None);
        (0..100_000).for_each(|_| prompts.observe(0.0, Some(8_000.0)));
        assert_eq!((prompts.forwards(), prompts.stretch()), (100_000, 1.0));
    }
}
