//! How far drafts survive: for each position, the chance that it is accepted given that all before it were. First link of the
//! choice of k (survival, [`crate::cost`], [`crate::draft_length`]). It must never count what was not judged: a draft of k says nothing of
//! position k, and a span that ended early nothing of what stood behind its end.
//!
//! Counts are decayed exponentially, at two speeds. The slow ones are what is believed, so that chance does not move k; where the
//! fast ones say something that chance would hardly make of the slow ones, the text has changed and the slow ones are
//! dropped.

use crate::step::MAX_DRAFT_TOKENS;

/// Drafts that the slow counts remember, at least; more where many sequences share a lane.
const SLOW_DRAFTS: f64 = 128.0;

/// Rounds of a whole lane that the slow counts remember, at least.
const SLOW_LANE_ROUNDS: f64 = 8.0;

/// Drafts that the fast counts remember, at least, and rounds of a whole lane.
const FAST_DRAFTS: f64 = 16.0;
const FAST_LANE_ROUNDS: f64 = 1.0;

/// Judged positions that the fast counts need before they may overrule the slow ones.
const FAST_JUDGED_MIN: f64 = 8.0;

/// Standard deviations between fast and slow counts that are taken for a change of the text.
const CHANGE_DEVIATIONS: f64 = 3.5;

/// What the fast counts are worth once they overruled the slow ones.
const CHANGED_WEIGHT: f64 = 0.4;

/// Judged drafts that the prior, or the position before, is worth.
const PRIOR_WEIGHT: f64 = 4.0;

/// Survival by position of one lane.
#[derive(Debug, Clone)]
pub struct Survival {
    /// The rate at position 0 before anything was judged.
    prior: f64,
    slow: Counts,
    fast: Counts,
}

#[derive(Debug, Clone)]
struct Counts {
    judged: [f64; MAX_DRAFT_TOKENS],
    accepted: [f64; MAX_DRAFT_TOKENS],
}

impl Survival {
    /// Nothing judged yet: every position is believed to be accepted at the rate `prior`.
    pub fn new(prior: f64) -> Self {
        let counts = Counts { judged: [0.0; MAX_DRAFT_TOKENS], accepted: [0.0; MAX_DRAFT_TOKENS] };
        Self { prior, slow: counts.clone(), fast: counts }
    }

    /// A draft of which the first `judged` positions were judged and the first `accepted` accepted; `sequences` share the lane.
    pub fn observe(&mut self, judged: u32, accepted: u32, sequences: u32) {
        let sequences = f64::from(sequences);
        self.slow.observe(judged, accepted, SLOW_DRAFTS.max(SLOW_LANE_ROUNDS * sequences));
        self.fast.observe(judged, accepted, FAST_DRAFTS.max(FAST_LANE_ROUNDS * sequences));
        if self.has_changed() {
            // The fast counts remember some of what was before, too: they count for little.
            self.fast.scale(CHANGED_WEIGHT);
            self.slow = self.fast.clone();
        }
    }

    /// The chance of each of the first `depth` positions to be accepted, given that those before it were. Positions
    /// that were never judged go on at the rate of the last one that was.
    pub fn rates(&self, depth: u32) -> Vec<f64> {
        self.slow.rates(self.prior, depth)
    }

    /// The chance of each of the first `depth` positions to be reached and accepted.
    pub fn survival(&self, depth: u32) -> Vec<f64> {
        let mut reached = 1.0;
        self.rates(depth)
            .into_iter()
            .map(|rate| {
                reached *= rate;
                reached
            })
            .collect()
    }

    /// Judged positions that the estimate rests on.
    pub fn evidence(&self) -> f64 {
        self.slow.judged.iter().sum()
    }

    /// Whether chance would hardly make the fast counts of the slow ones' rates.
    fn has_changed(&self) -> bool {
        let rates = self.slow.rates(self.prior, MAX_DRAFT_TOKENS as u32);
        let (mut surplus, mut variance, mut judged) = (0.0, 0.0, 0.0);
        for (i, rate) in rates.into_iter().enumerate() {
            // A rate of 0 or 1 allows no chance at all, and is never known so well.
            let rate = rate.clamp(0.02, 0.98);
            judged += self.fast.judged[i];
            surplus += self.fast.accepted[i] - rate * self.fast.judged[i];
            variance += rate * (1.0 - rate) * self.fast.judged[i];
        }
        // Decayed by (1 - 1/m), a sum of independent chances has half the variance that its weight suggests.
        judged >= FAST_JUDGED_MIN && surplus.abs() > CHANGE_DEVIATIONS * (variance / 2.0).sqrt()
    }
}

impl Counts {
    fn observe(&mut self, judged: u32, accepted: u32, memory: f64) {
        let keep = 1.0 - 1.0 / memory;
        self.scale(keep);
        // The first position that was not accepted is judged, those behind it are not.
        let reached = judged.min(accepted + 1).min(MAX_DRAFT_TOKENS as u32);
        for position in 0..reached {
            self.judged[position as usize] += 1.0;
            self.accepted[position as usize] += f64::from(u8::from(position < accepted));
        }
    }

    fn scale(&mut self, factor: f64) {
        self.judged.iter_mut().chain(&mut self.accepted).for_each(|count| *count *= factor);
    }

    fn rates(&self, prior: f64, depth: u32) -> Vec<f64> {
        let mut before = prior;
        (0..depth.min(MAX_DRAFT_TOKENS as u32) as usize)
            .map(|i| {
                before = (self.accepted[i] + PRIOR_WEIGHT * before) / (self.judged[i] + PRIOR_WEIGHT);
                before
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Drafts of `k` whose every position is accepted at `rate`, by a fixed sequence of chances.
    fn feed(survival: &mut Survival, (k, rate, drafts): (u32, f64, u32), sequences: u32) {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        for _ in 0..drafts {
            let accepted = (0..k)
                .take_while(|_| {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    ((state >> 11) as f64) / ((1_u64 << 53) as f64) < rate
                })
                .count();
            survival.observe(k, accepted as u32, sequences);
        }
    }

    #[test]
    fn a_fresh_lane_believes_its_prior_at_every_position() {
        assert_eq!(Survival::new(0.5).survival(3), [0.5, 0.25, 0.125]);
    }

    #[test]
    fn positions_behind_the_first_rejected_one_are_not_judged() {
        let mut survival = Survival::new(0.5);
        for _ in 0..2_000 {
            survival.observe(4, 1, 1);
        }
        let rates = survival.rates(4);
        assert!(rates[0] > 0.95 && rates[1] < 0.05, "{rates:?}");
        assert!((rates[2] - rates[1]).abs() < 1e-9 && (rates[3] - rates[1]).abs() < 1e-9, "{rates:?}");
    }

    #[test]
    fn short_drafts_are_censored_and_not_taken_for_rejections() {
        let mut survival = Survival::new(0.5);
        feed(&mut survival, (2, 0.8, 3_000), 1);
        let rates = survival.rates(6);
        for rate in &rates {
            assert!((rate - 0.8).abs() < 0.1, "{rates:?}");
        }
    }

    #[test]
    fn a_change_of_the_text_is_believed_within_twenty_drafts() {
        for (before, after) in [(0.8, 0.3), (0.3, 0.8), (0.9, 0.5)] {
            let mut survival = Survival::new(0.6);
            feed(&mut survival, (3, before, 1_000), 1);
            feed(&mut survival, (3, after, 20), 1);
            let rate = survival.rates(1)[0];
            assert!((rate - after).abs() < 0.2, "{before} to {after}: {rate}");
        }
    }

    proptest! {
        #[test]
        fn survival_falls_with_position_and_stays_a_chance(
            drafts in proptest::collection::vec((0u32..=32, 0u32..=32, 1u32..600), 0..300)
        ) {
            let mut survival = Survival::new(0.6);
            for (judged, accepted, sequences) in drafts {
                survival.observe(judged, accepted.min(judged), sequences);
            }
            let reached = survival.survival(32);
            prop_assert!(reached.iter().all(|chance| (0.0..=1.0).contains(chance)));
            prop_assert!(reached.windows(2).all(|pair| pair[1] <= pair[0]));
        }
    }
}
