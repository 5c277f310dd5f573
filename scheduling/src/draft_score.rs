//! Score of a shadow draft compared with the serving draft: acceptance by position, and the accepted tokens
//! of both drafts at the same positions of the same sequences, cut to the length that both were asked for.

use serde::Serialize;
use speculation::sequence::{SHADOW_TOKENS, ShadowScore};

use crate::cluster_mean::ClusterMean;

/// Verified drafts, by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct DraftScore {
    /// Number of drafts.
    pub drafts: u64,
    /// By position, number of drafts judged there.
    pub judged: [u64; SHADOW_TOKENS as usize],
    /// By position, number of drafts accepted there.
    pub accepted: [u64; SHADOW_TOKENS as usize],
}

impl DraftScore {
    /// Records a draft with `judged` positions, of which the first `accepted` were accepted.
    pub fn observe(&mut self, judged: u32, accepted: u32) {
        self.drafts += 1;
        self.judged.iter_mut().take(judged as usize).for_each(|count| *count += 1);
        self.accepted.iter_mut().take(accepted as usize).for_each(|count| *count += 1);
    }

    /// Mean accepted tokens per draft.
    pub fn mean_accepted(&self) -> Option<f64> {
        (self.drafts > 0).then(|| self.accepted.iter().sum::<u64>() as f64 / self.drafts as f64)
    }
}

/// A round of the serving draft, to compare with the shadow's proposal at the same position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServedDraft {
    /// Position of its first token.
    pub start: u32,
    /// Number of tokens requested.
    pub asked: u32,
    /// Number of judged positions.
    pub judged: u32,
    /// Number of leading tokens that were committed.
    pub accepted: u32,
}

/// Both drafts at one position, cut to the same length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// Accepted tokens of the shadow draft.
    pub shadow: u32,
    /// Accepted tokens of the serving draft.
    pub serving: u32,
}

impl Pair {
    /// Creates a pair if both drafts start at the same position. The length follows from the requested
    /// lengths, never from acceptance, which would favour the draft that was cut less.
    pub fn of(scored: &ShadowScore, served: &ServedDraft) -> Option<Self> {
        let length = scored.asked.min(served.asked);
        let is_pair = scored.start == served.start && length > 0;
        is_pair.then(|| Self { shadow: scored.accepted.min(length), serving: served.accepted.min(length) })
    }
}

/// Pairs of one sequence: one cluster of a [`PairedScore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PairSums {
    /// Number of pairs.
    pub pairs: u64,
    /// Accepted tokens of the shadow draft.
    pub shadow: u64,
    /// Accepted tokens of the serving draft.
    pub serving: u64,
}

impl PairSums {
    /// Adds a pair.
    pub fn add(&mut self, pair: Pair) {
        self.pairs += 1;
        self.shadow += u64::from(pair.shadow);
        self.serving += u64::from(pair.serving);
    }
}

/// Pairs of many sequences.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PairedScore {
    difference: ClusterMean,
    serving: ClusterMean,
}

impl PairedScore {
    /// Adds a sequence that ended.
    pub fn add(&mut self, sums: &PairSums) {
        let pairs = sums.pairs as f64;
        self.difference.observe(pairs, sums.shadow as f64 - sums.serving as f64);
        self.serving.observe(pairs, sums.serving as f64);
    }

    /// The shadow's advantage in accepted tokens per draft.
    pub fn difference(&self) -> &ClusterMean {
        &self.difference
    }

    /// Accepted tokens per draft of the serving draft.
    pub fn serving(&self) -> &ClusterMean {
        &self.serving
    }

    /// Creates the report.
    pub fn report(&self) -> PairedReport {
        let mean = |mean: &ClusterMean| mean.mean().unwrap_or(0.0);
        PairedReport {
            drafts: self.difference.observations(),
            sequences: self.difference.clusters(),
            shadow_accepted: mean(&self.serving) + mean(&self.difference),
            serving_accepted: mean(&self.serving),
            difference: mean(&self.difference),
            standard_error: self.difference.error(),
        }
    }
}

/// Both drafts at the same positions, over sequences that ended.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct PairedReport {
    /// Number of positions with both drafts.
    pub drafts: u64,
    /// Number of sequences with such positions.
    pub sequences: u64,
    /// Accepted tokens per draft of the shadow draft.
    pub shadow_accepted: f64,
    /// Accepted tokens per draft of the serving draft.
    pub serving_accepted: f64,
    /// `shadow_accepted` minus `serving_accepted`.
    pub difference: f64,
    /// Standard error of the difference over sequences; absent with fewer than two sequences.
    pub standard_error: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_behind_a_miss_are_not_judged() {
        let mut score = DraftScore::default();
        assert_eq!(score.mean_accepted(), None);
        for (judged, accepted) in [(4, 4), (3, 2), (1, 0), (0, 0), (9, 9)] {
            score.observe(judged, accepted);
        }
        assert_eq!((score.judged, score.accepted), ([4, 3, 3, 2], [3, 3, 2, 2]));
        assert_eq!(score.mean_accepted(), Some(2.0));
    }

    #[test]
    fn a_pair_stands_at_one_place_and_is_cut_by_what_was_asked_for() {
        let scored = ShadowScore { start: 9, asked: 4, judged: 4, accepted: 4 };
        let served = ServedDraft { start: 9, asked: 2, judged: 2, accepted: 1 };
        assert_eq!(Pair::of(&scored, &served), Some(Pair { shadow: 2, serving: 1 }));
        assert_eq!(Pair::of(&scored, &ServedDraft { start: 8, ..served }), None);
        assert_eq!(
            Pair::of(&scored, &ServedDraft { asked: 0, ..served }),
            None,
            "the serving draft proposed nothing"
        );
        let longer = ServedDraft { asked: 8, accepted: 7, ..served };
        assert_eq!(Pair::of(&scored, &longer), Some(Pair { shadow: 4, serving: 4 }));
    }

    #[test]
    fn a_draft_beside_itself_is_no_better_and_without_any_error() {
        let mut score = PairedScore::default();
        for accepted in 0..40 {
            let mut sums = PairSums::default();
            sums.add(Pair { shadow: accepted % 5, serving: accepted % 5 });
            score.add(&sums);
        }
        let report = score.report();
        assert_eq!((report.drafts, report.sequences, report.difference), (40, 40, 0.0));
        assert_eq!((report.shadow_accepted, report.standard_error), (2.0, Some(0.0)));
    }
}
