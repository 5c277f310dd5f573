//! Rate limit on replayed ids. Pure: time is passed in. The scheduler keeps one [`ReplayBudget`] per model.
//!
//! A sequence that lost its target is run again from its ids. If many targets are lost at once or in
//! succession, these prompts would fill all remaining targets and stall the sequences there. So replays share
//! the targets with new sequences through a token bucket. It holds the ids of one second, refills steadily,
//! and may be overdrawn by one sequence, so that a long sequence is never refused. Replays over the budget
//! wait; they do not fail.

use std::time::Duration;

/// A token bucket of ids. See the module documentation.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReplayBudget {
    /// Ids that were replayed and are not refilled yet.
    used: f64,
    /// Time at which `used` was computed.
    at: Duration,
}

impl ReplayBudget {
    /// Returns when the next sequence may be replayed at `ids_per_second`: `now` or later.
    pub(crate) fn next_at(&self, now: Duration, ids_per_second: f64) -> Duration {
        let excess = self.used_at(now, ids_per_second) - ids_per_second;
        if excess < 0.0 || ids_per_second <= 0.0 {
            return now;
        }
        // Round up to the next microsecond; otherwise a wakeup could be too early again and again.
        now + Duration::from_micros((excess / ids_per_second * 1e6) as u64 + 1)
    }

    /// Records the replay of a sequence with this number of ids.
    pub(crate) fn take(&mut self, now: Duration, ids: u32, ids_per_second: f64) {
        self.used = self.used_at(now, ids_per_second) + f64::from(ids);
        self.at = now;
    }

    fn used_at(&self, now: Duration, ids_per_second: f64) -> f64 {
        let refilled = now.saturating_sub(self.at).as_secs_f64() * ids_per_second;
        (self.used - refilled).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: f64 = 1_000.0;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_second_is_worth_at_once_and_the_rest_is_waited_for() {
        let mut budget = ReplayBudget::default();
        for _ in 0..10 {
            assert_eq!(budget.next_at(ms(0), RATE), ms(0));
            budget.take(ms(0), 100, RATE);
        }
        let next = budget.next_at(ms(0), RATE);
        assert!(next > ms(0) && next < ms(1), "the bucket is empty, not overdrawn: {next:?}");
        assert_eq!(budget.next_at(next, RATE), next, "the next replay may start then");
        budget.take(ms(1), 100, RATE);
        assert!((ms(100)..=ms(101)).contains(&budget.next_at(ms(1), RATE)));
        assert_eq!(budget.next_at(ms(500), RATE), ms(500));
    }

    #[test]
    fn a_long_sequence_overdraws_and_no_rate_is_no_limit() {
        let mut budget = ReplayBudget::default();
        budget.take(ms(0), 5_000, RATE);
        let next = budget.next_at(ms(0), RATE);
        assert!((ms(4_000)..=ms(4_001)).contains(&next), "{next:?}");
        assert_eq!(budget.next_at(ms(0), 0.0), ms(0));
    }

    proptest::proptest! {
        /// In any period the replayed ids are at most those of the period, of one more second and of one more
        /// sequence.
        #[test]
        fn the_rate_is_kept(lens in proptest::collection::vec(1_u32..3_000, 1..200)) {
            let (mut budget, mut now, mut sum) = (ReplayBudget::default(), ms(0), 0.0);
            for len in lens {
                now = budget.next_at(now, RATE);
                let allowed = RATE * (now.as_secs_f64() + 1.0);
                proptest::prop_assert!(sum <= allowed + 1.0, "{} at {:?}", sum, now);
                budget.take(now, len, RATE);
                sum += f64::from(len);
            }
        }
    }
}
