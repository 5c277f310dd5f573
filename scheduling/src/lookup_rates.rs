//! Accuracy of lookup sources by match length ([`speculation::lookup`]): the expected value of their drafts
//! before they are tried.
//!
//! A source predicts every committed token, and its accuracy is recorded whether or not the token was
//! drafted. So an inaccurate source is given up without a rejected draft, and an accurate one is used again
//! without a trial. Reads no clock.

use crate::smoothing::{LONG_EWMA_WINDOW, PRIOR_WEIGHT, add_decayed};
use serde::Serialize;
use speculation::lookup::CheckedPrediction;

/// Source of a lookup draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LookupSource {
    /// Text that the client predicts.
    Prediction,
    /// The sequence itself.
    Suffix,
}

impl LookupSource {
    /// All sources.
    pub const ALL: [Self; 2] = [Self::Prediction, Self::Suffix];

    /// Name used in metrics and explanations.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prediction => "prediction",
            Self::Suffix => "suffix",
        }
    }

    /// Prior probability, by class of match length, that the source is right. Lower than measured on the edit
    /// set in docs/measurements/acceptance.md, because not every text repeats itself and not every prediction
    /// is right.
    fn prior(self) -> ByClass {
        match self {
            Self::Prediction => [0.3, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95],
            Self::Suffix => [0.0, 0.0, 0.3, 0.35, 0.4, 0.5, 0.6, 0.75, 0.85, 0.9],
        }
    }
}

/// Classes of match lengths, by the first length of each class.
const FIRST_OF_CLASS: [u32; 10] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 32];

/// A number per class.
type ByClass = [f64; FIRST_OF_CLASS.len()];

/// Weight of the prior for a lane, in judged tokens. A lane's rates have the weight [`PRIOR_WEIGHT`] for a
/// sequence.
const LANE_PRIOR_WEIGHT: f64 = 8.0;

/// Memory of a sequence, in judged tokens per class.
const SEQUENCE_EWMA_WINDOW: f64 = 32.0;

/// Accuracy of one source for a lane or a sequence.
#[derive(Debug, Clone)]
pub struct LookupRates {
    window: f64,
    /// By class, decayed.
    judged: ByClass,
    right: ByClass,
}

impl LookupRates {
    /// Creates the rates of a lane.
    pub fn of_lane() -> Self {
        Self { window: LONG_EWMA_WINDOW, judged: ByClass::default(), right: ByClass::default() }
    }

    /// Creates the rates of a sequence.
    pub fn of_sequence() -> Self {
        Self { window: SEQUENCE_EWMA_WINDOW, ..Self::of_lane() }
    }

    /// Records the prediction for a committed token.
    pub fn observe(&mut self, expected: CheckedPrediction) {
        let class = class_of(expected.match_len);
        add_decayed(&mut self.judged[class], 1.0, self.window);
        add_decayed(&mut self.right[class], f64::from(u8::from(expected.is_correct)), self.window);
    }

    /// Decayed number of judged tokens, and of those that were right.
    pub fn evidence(&self) -> (f64, f64) {
        (self.judged.iter().sum(), self.right.iter().sum())
    }

    fn rate(&self, class: usize, (prior, weight): (f64, f64)) -> f64 {
        (self.right[class] + weight * prior) / (self.judged[class] + weight)
    }
}

/// For each of the next `num_tokens` predicted tokens after a match of `match_len`, the probability that it
/// and all before it are right. The match grows with each right token.
pub fn reach_probabilities(
    source: LookupSource,
    (lane, sequence): (&LookupRates, &LookupRates),
    (match_len, num_tokens): (u32, usize),
) -> Vec<f64> {
    let prior = source.prior();
    let mut reached = 1.0;
    let chance = |position: usize| {
        let class = class_of(match_len.saturating_add(position as u32));
        let of_lane = lane.rate(class, (prior[class], LANE_PRIOR_WEIGHT));
        reached *= sequence.rate(class, (of_lane, PRIOR_WEIGHT));
        reached
    };
    (0..num_tokens).map(chance).collect()
}

fn class_of(match_len: u32) -> usize {
    FIRST_OF_CLASS.partition_point(|first| *first <= match_len) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fed((match_len, is_correct, times): (u32, bool, u32), mut rates: LookupRates) -> LookupRates {
        for _ in 0..times {
            rates.observe(CheckedPrediction { match_len, is_correct });
        }
        rates
    }

    fn first_chance(lane: &LookupRates, sequence: &LookupRates, match_len: u32) -> f64 {
        reach_probabilities(LookupSource::Suffix, (lane, sequence), (match_len, 1))[0]
    }

    #[test]
    fn match_lengths_fall_into_classes() {
        for (match_len, class) in [(0, 0), (1, 1), (4, 4), (5, 4), (31, 8), (32, 9), (u32::MAX, 9)] {
            assert_eq!(class_of(match_len), class, "{match_len}");
        }
    }

    #[test]
    fn a_sequence_begins_as_its_lane_is_and_soon_goes_by_its_own() {
        let fresh = LookupRates::of_sequence();
        let good_lane = fed((8, true, 400), LookupRates::of_lane());
        assert!(first_chance(&good_lane, &fresh, 8) > 0.95);
        let bad = fed((8, false, 12), LookupRates::of_sequence());
        assert!(first_chance(&good_lane, &bad, 8) < 0.3, "{}", first_chance(&good_lane, &bad, 8));
        let bad_lane = fed((8, false, 400), LookupRates::of_lane());
        assert!(first_chance(&bad_lane, &fresh, 8) < 0.05);
        let good = fed((8, true, 12), LookupRates::of_sequence());
        assert!(first_chance(&bad_lane, &good, 8) > 0.7);
        assert!(
            first_chance(&bad_lane, &fresh, 16) > 0.8,
            "evidence of one match length does not apply to others"
        );
    }

    #[test]
    fn the_chance_of_a_draft_falls_with_each_position_and_its_match_grows() {
        let (lane, fresh) = (LookupRates::of_lane(), LookupRates::of_sequence());
        let reached = reach_probabilities(LookupSource::Suffix, (&lane, &fresh), (2, 12));
        assert!(reached.windows(2).all(|pair| pair[1] < pair[0]));
        let ratios: Vec<f64> = reached.windows(2).map(|pair| pair[1] / pair[0]).collect();
        assert!(ratios.windows(2).all(|pair| pair[1] >= pair[0] - 1e-9), "{ratios:?}");
        assert_eq!(reach_probabilities(LookupSource::Suffix, (&lane, &fresh), (0, 2)), [0.0, 0.0]);
    }
}
