//! Acceptance by position: for each position, the probability that it is accepted given that all earlier ones
//! were. First part of the choice of k (acceptance by position, [`crate::cost`], [`crate::draft_length`]).
//! Positions that were not judged must never count (they are censored): a draft of k tells nothing about
//! position k, and a span that ended early tells nothing about positions after its end.
//!
//! All drafts since the latest change of the text count equally: the more drafts, the smaller the random
//! error. To detect a change, the drafts after each of many points in time are compared with the drafts
//! before it. If chance hardly explains the difference, the older drafts are dropped (adaptive windowing:
//! Bifet, Gavaldà 2007, with one test over all positions).

use std::collections::VecDeque;
use std::ops::Range;

use crate::smoothing::PRIOR_WEIGHT;
use speculation::step::MAX_DRAFT_TOKENS;

/// Maximum buckets of one size; when one more is added, the two oldest merge into one of twice the size. So
/// recent points in time are compared at a finer resolution.
const BUCKETS_PER_SIZE: u32 = 4;

/// Parameters of learning and of change detection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AcceptanceRules {
    /// Weight of the prior, or of the rate at the previous position, in judged drafts.
    pub prior_weight: f64,
    /// Difference between newer and older drafts, in standard deviations, that counts as a change of the
    /// text. About 20 points are compared after each bucket; chance alone exceeds the threshold once in
    /// thousands of buckets.
    pub change_deviations: f64,
    /// Minimum number of drafts in the newest bucket of the window; lanes with many sequences use a share of
    /// these instead.
    pub bucket_drafts: f64,
}

/// For each position, the probability that it is reached and accepted.
pub(crate) fn cumulative(rates: &[f64]) -> impl Iterator<Item = f64> {
    rates.iter().scan(1.0, |reached, rate| {
        *reached *= rate;
        Some(*reached)
    })
}

impl Default for AcceptanceRules {
    fn default() -> Self {
        Self { prior_weight: PRIOR_WEIGHT, change_deviations: 3.5, bucket_drafts: 4.0 }
    }
}

/// Acceptance by position of one lane.
#[derive(Debug, Clone)]
pub struct AcceptanceByPosition {
    rules: AcceptanceRules,
    /// The rate at position 0 before any evidence.
    prior: f64,
    /// From new to old; the first is incomplete.
    buckets: VecDeque<Bucket>,
    /// Sum of all buckets.
    total: Counts,
    /// Length of the longest draft; there are no counts from this position on.
    depth: usize,
}

#[derive(Debug, Clone, Default)]
struct Bucket {
    /// Pieces of the same size have the same number; the next number means twice the size.
    size: u32,
    drafts: u32,
    counts: Counts,
}

#[derive(Debug, Clone)]
struct Counts {
    judged: [f64; MAX_DRAFT_TOKENS],
    accepted: [f64; MAX_DRAFT_TOKENS],
}

impl AcceptanceByPosition {
    /// Creates an estimate without evidence: `prior` at every position.
    pub fn new(prior: f64) -> Self {
        Self::with_rules(prior, AcceptanceRules::default())
    }

    /// Creates an estimate with other rules.
    pub fn with_rules(prior: f64, rules: AcceptanceRules) -> Self {
        let buckets = VecDeque::from([Bucket::default()]);
        Self { rules, prior, buckets, total: Counts::default(), depth: 0 }
    }

    /// Records one verified draft: positions below `accepted` were accepted, position `accepted` was
    /// rejected, later ones are unknown (censored). `positions` are those that were drafted; a range that
    /// does not begin at 0 continues an earlier draft. `sequences` is the number of sequences of the lane.
    pub fn observe(&mut self, positions: Range<u32>, accepted: u32, sequences: u32) {
        self.depth = self.depth.max(positions.end as usize).min(MAX_DRAFT_TOKENS);
        let newest = &mut self.buckets[0];
        newest.drafts += u32::from(positions.start == 0);
        newest.counts.add(positions.clone(), accepted);
        self.total.add(positions, accepted);
        // All buckets of the smallest size together span at least one lane round.
        let bucket_drafts = (self.rules.bucket_drafts as u32).max(sequences / BUCKETS_PER_SIZE);
        if newest.drafts >= bucket_drafts {
            self.drop_outdated();
            self.buckets.push_front(Bucket::default());
            self.merge_old_buckets();
        }
    }

    /// For each of the first `depth` positions, the probability of acceptance given that earlier ones were
    /// accepted. Positions without evidence continue with the last rate.
    pub fn rates(&self, depth: u32) -> Vec<f64> {
        self.total.rates((self.prior, self.rules.prior_weight), depth)
    }

    /// For each of the first `depth` positions, the probability that it is reached and accepted.
    pub fn cumulative(&self, depth: u32) -> Vec<f64> {
        cumulative(&self.rates(depth)).collect()
    }

    /// Number of judged positions in the estimate.
    pub fn evidence(&self) -> f64 {
        self.total.judged.iter().sum()
    }

    /// Drops the drafts before a change of the text, if one is detected.
    fn drop_outdated(&mut self) {
        let (mut newer, mut changed) = (Counts::default(), None);
        for (at, bucket) in self.buckets.iter().enumerate() {
            newer.merge(&bucket.counts, self.depth);
            let deviations = newer.deviations_within(&self.total, self.depth);
            if deviations > changed.map_or(self.rules.change_deviations, |(most, _)| most) {
                changed = Some((deviations, at + 1));
            }
        }
        if let Some((_, kept)) = changed {
            self.buckets.truncate(kept);
            self.recompute_total();
        }
    }

    fn merge_old_buckets(&mut self) {
        for size in 0.. {
            let of_size = |bucket: &&Bucket| bucket.size == size;
            if self.buckets.iter().filter(of_size).count() <= BUCKETS_PER_SIZE as usize {
                break;
            }
            let oldest = self
                .buckets
                .iter()
                .rposition(|bucket| bucket.size == size)
                .expect("more buckets of this size exist than are kept");
            let old = self.buckets.remove(oldest).expect("rposition found this index");
            let into = &mut self.buckets[oldest - 1];
            into.counts.merge(&old.counts, self.depth);
            into.size += 1;
        }
    }

    fn recompute_total(&mut self) {
        self.total = Counts::default();
        for bucket in &self.buckets {
            self.total.merge(&bucket.counts, self.depth);
        }
    }
}

impl Default for Counts {
    fn default() -> Self {
        Self { judged: [0.0; MAX_DRAFT_TOKENS], accepted: [0.0; MAX_DRAFT_TOKENS] }
    }
}

impl Counts {
    /// Difference in acceptance between these drafts and the older ones in `total`, over all `depth`
    /// positions, in standard deviations.
    fn deviations_within(&self, total: &Self, depth: usize) -> f64 {
        let (mut surplus, mut variance) = (0.0, 0.0);
        for i in 0..depth {
            let (new, old) = (self.judged[i], total.judged[i] - self.judged[i]);
            if new <= 0.0 || old <= 0.0 {
                continue;
            }
            let accepted_before = total.accepted[i] - self.accepted[i];
            let rate = accepted_before / old;
            let both = (self.accepted[i] + accepted_before) / (new + old);
            surplus += self.accepted[i] - rate * new;
            variance += both * (1.0 - both) * new * (1.0 + new / old);
        }
        // The + 1 allows for a single draft: at rates near 0 or 1 it alone would be several deviations.
        surplus.abs() / (variance + 1.0).sqrt()
    }

    /// Adds the counts of the first `depth` positions.
    fn merge(&mut self, other: &Self, depth: usize) {
        for i in 0..depth {
            self.judged[i] += other.judged[i];
            self.accepted[i] += other.accepted[i];
        }
    }

    fn add(&mut self, positions: Range<u32>, accepted: u32) {
        // The first rejected position is judged; positions after it are not.
        let reached = positions.end.min(accepted + 1).min(MAX_DRAFT_TOKENS as u32);
        for position in positions.start..reached {
            self.judged[position as usize] += 1.0;
            self.accepted[position as usize] += f64::from(u8::from(position < accepted));
        }
    }

    fn rates(&self, (prior, weight): (f64, f64), depth: u32) -> Vec<f64> {
        let mut before = prior;
        (0..depth.min(MAX_DRAFT_TOKENS as u32) as usize)
            .map(|i| {
                before = (self.accepted[i] + weight * before) / (self.judged[i] + weight);
                before
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Observes drafts of length `k` with acceptance `rate` at every position, from a fixed pseudorandom
    /// sequence.
    fn feed(acceptance: &mut AcceptanceByPosition, (k, rate, drafts): (u32, f64, u32), sequences: u32) {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        for _ in 0..drafts {
            let accepted = (0..k)
                .take_while(|_| {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    ((state >> 11) as f64) / ((1_u64 << 53) as f64) < rate
                })
                .count();
            acceptance.observe(0..k, accepted as u32, sequences);
        }
    }

    #[test]
    fn a_fresh_lane_believes_its_prior_at_every_position() {
        assert_eq!(AcceptanceByPosition::new(0.5).cumulative(3), [0.5, 0.25, 0.125]);
    }

    #[test]
    fn positions_behind_the_first_rejected_one_are_not_judged() {
        let mut acceptance = AcceptanceByPosition::new(0.5);
        for _ in 0..2_000 {
            acceptance.observe(0..4, 1, 1);
        }
        let rates = acceptance.rates(4);
        assert!(rates[0] > 0.95 && rates[1] < 0.05, "{rates:?}");
        assert!((rates[2] - rates[1]).abs() < 1e-9 && (rates[3] - rates[1]).abs() < 1e-9, "{rates:?}");
    }

    #[test]
    fn short_drafts_are_censored_and_not_taken_for_rejections() {
        let mut acceptance = AcceptanceByPosition::new(0.5);
        feed(&mut acceptance, (2, 0.8, 3_000), 1);
        let rates = acceptance.rates(6);
        for rate in &rates {
            assert!((rate - 0.8).abs() < 0.1, "{rates:?}");
        }
    }

    #[test]
    fn a_change_of_the_text_is_believed_within_twenty_drafts() {
        for (before, after) in [(0.8, 0.3), (0.3, 0.8), (0.9, 0.5)] {
            let mut acceptance = AcceptanceByPosition::new(0.6);
            feed(&mut acceptance, (3, before, 1_000), 1);
            feed(&mut acceptance, (3, after, 20), 1);
            let rate = acceptance.rates(1)[0];
            assert!((rate - after).abs() < 0.2, "{before} to {after}: {rate}");
        }
    }

    proptest! {
        #[test]
        fn acceptance_falls_with_position_and_stays_a_chance(
            drafts in proptest::collection::vec((0u32..=32, 0u32..=32, 1u32..600), 0..300)
        ) {
            let mut acceptance = AcceptanceByPosition::new(0.6);
            for (judged, accepted, sequences) in drafts {
                acceptance.observe(0..judged, accepted.min(judged), sequences);
            }
            let reached = acceptance.cumulative(32);
            prop_assert!(reached.iter().all(|chance| (0.0..=1.0).contains(chance)));
            prop_assert!(reached.windows(2).all(|pair| pair[1] <= pair[0]));
        }
    }
}
