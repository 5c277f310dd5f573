//! Chooses leaves for a chain: siblings without a forward of their own. At each position the draft has scored
//! every token anyway, so the next best tokens cost the target one row each and the draft nothing.
//!
//! A leaf gains one token if the target draws it: the chain is accepted up to its parent, and the draw is the
//! leaf. Its probability follows from its margin: the amount by which its score, noise included, is below the
//! best. The target adds the same noise to its own logits, so the order can only change because the two
//! models' logits differ. Measured in logits, that difference is the same at every temperature.

use crate::{Draft, SamplingParams, TokenId};

/// Scale, in logits, of the margin at which a lower-scored token still overtakes: about the difference
/// between the bundled pair's logits, plus an increase per nat of the draft's surprise. Pairs that differ
/// less or more get trees of nearly the same shape.
const DEVIATION: f64 = 0.8;
const DEVIATION_PER_NAT: f64 = 0.15;

/// Exponent of the decay with the margin: the difference between two models has heavier tails than a logistic
/// distribution.
const POWER: i32 = 3;

/// Weight of draws that match none of the candidates, for a certain draft and per nat of its surprise; the
/// first candidate has weight 1.
pub(super) const OTHER_WEIGHT: f64 = 0.05;
const OTHER_WEIGHT_PER_NAT: f64 = 0.1;

/// Surprise is capped here; larger values add no information.
const MAX_SURPRISE: f64 = 6.0;

/// Best tokens of one position by logit plus noise.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Candidates {
    /// The ids, best first; the first is the chain's token.
    pub token_ids: Vec<TokenId>,
    /// For each id, its distance below the first in logits; ascending, the first is 0.
    pub margins: Vec<f64>,
    /// Surprise of the first token: `-ln` of its probability under the draft at temperature 1, in nats. The
    /// less certain a draft is, the more its target differs.
    pub surprise: f64,
}

impl Candidates {
    /// From ids and their scores, best first. A score is the logit divided by the temperature plus noise, or
    /// the logit if the sequence is greedy.
    pub fn from_scores(sampling: &SamplingParams, best: &[(TokenId, f64)], surprise: f32) -> Self {
        let scale = if sampling.is_greedy() { 1.0 } else { f64::from(sampling.temperature) };
        let first = best.first().map_or(0.0, |best| best.1);
        let (token_ids, margins) = best.iter().map(|&(id, score)| (id, (first - score) * scale)).unzip();
        Self { token_ids, margins, surprise: f64::from(surprise) }
    }

    /// Candidates that the target draws with about these probabilities, best first: the inverse of
    /// [`Candidates::chances`].
    pub fn from_chances(token_ids: Vec<TokenId>, chances: &[f64]) -> Self {
        let positive = |chance: &f64| chance.max(f64::MIN_POSITIVE);
        let first = chances.first().map_or(1.0, positive);
        let other = (1.0 - chances.iter().sum::<f64>()).max(0.0) / first;
        let surprise = ((other - OTHER_WEIGHT) / OTHER_WEIGHT_PER_NAT).clamp(0.0, MAX_SURPRISE);
        let deviation = DEVIATION + DEVIATION_PER_NAT * surprise;
        let margin =
            |chance: &f64| deviation * ((first / positive(chance)).powf(1.0 / f64::from(POWER)) - 1.0);
        let mut least = 0.0_f64;
        let margins = chances.iter().map(|chance| {
            least = least.max(margin(chance));
            least
        });
        Self { token_ids, margins: margins.collect(), surprise }
    }

    /// Probability that the target draws each candidate. Fitted to the bundled pair
    /// (docs/measurements/acceptance.md).
    pub(super) fn chances(&self) -> impl Iterator<Item = f64> {
        let surprise = self.surprise.clamp(0.0, MAX_SURPRISE);
        let deviation = DEVIATION + DEVIATION_PER_NAT * surprise;
        let other = OTHER_WEIGHT + OTHER_WEIGHT_PER_NAT * surprise;
        let weight = move |margin: &f64| (1.0 + margin / deviation).powi(-POWER);
        let sum: f64 = other + self.margins.iter().map(weight).sum::<f64>();
        self.margins.iter().map(move |margin| weight(margin) / sum)
    }
}

/// A token that the target may draw instead of the chain's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alternative {
    /// Index of the chain's token.
    pub position: usize,
    /// Rank among the candidates there; above 0.
    pub rank: usize,
    /// Probability that the target accepts the chain up to there and then draws this token.
    chance: f64,
}

/// The alternatives to the chain of first candidates, most likely first.
pub fn ranked_alternatives(positions: &[Candidates]) -> Vec<Alternative> {
    let mut alternatives: Vec<Alternative> = Vec::new();
    let mut reached = 1.0;
    for (position, candidates) in positions.iter().enumerate() {
        let mut of_first = 1.0;
        for (rank, chance) in candidates.chances().enumerate() {
            match rank {
                0 => of_first = chance,
                _ => alternatives.push(Alternative { position, rank, chance: reached * chance }),
            }
        }
        reached *= of_first;
    }
    // Among equals the earlier position first, then the better rank.
    let place = |alternative: &Alternative| (alternative.position, alternative.rank);
    alternatives.sort_by(|a, b| b.chance.total_cmp(&a.chance).then(place(a).cmp(&place(b))));
    alternatives
}

/// The chain of first candidates with the likeliest alternatives as leaves, `num_tokens` ids in all.
pub fn with_leaves(positions: &[Candidates], num_tokens: usize) -> Draft {
    let mut leaves = ranked_alternatives(positions);
    leaves.truncate(num_tokens.saturating_sub(positions.len()));
    let mut draft = Draft::default();
    let mut parent = 0;
    for (position, candidates) in positions.iter().enumerate() {
        let row = draft.token_ids.len() as u32 + 1;
        draft.token_ids.push(candidates.token_ids[0]);
        draft.parents.push(parent);
        // A better rank is at least as likely, so the selected leaves are the first ones.
        let num_leaves = leaves.iter().filter(|leaf| leaf.position == position).count();
        let ids = candidates.token_ids.iter().skip(1).take(num_leaves);
        draft.token_ids.extend(ids);
        draft.parents.resize(draft.token_ids.len(), parent);
        parent = row;
    }
    draft.clear_chain_parents();
    draft
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(token_ids: &[TokenId], margins: &[f64]) -> Candidates {
        Candidates { token_ids: token_ids.to_vec(), margins: margins.to_vec(), surprise: 0.5 }
    }

    fn positions() -> [Candidates; 3] {
        [
            position(&[5, 6, 7], &[0.0, 3.0, 9.0]),
            position(&[8, 9, 10], &[0.0, 0.5, 1.0]),
            position(&[11, 12, 13], &[0.0, 0.4, 9.0]),
        ]
    }

    #[test]
    fn candidates_have_the_chances_that_they_were_made_from() {
        for chances in [[0.8, 0.07, 0.03, 0.01], [0.556, 0.15, 0.07, 0.04], [0.4, 0.2, 0.15, 0.0]] {
            let candidates = Candidates::from_chances(vec![5, 6, 7, 8], &chances);
            for (found, expected) in candidates.chances().zip(chances) {
                assert!((found - expected).abs() < 0.01, "{candidates:?}: {found} for {expected}");
            }
        }
        // No chance is 0 and none above 1, and the first is always the best.
        for chances in [[1.0, 0.0], [0.0, 0.3], [0.0, 0.0]] {
            let candidates = Candidates::from_chances(vec![5, 6], &chances);
            assert!(candidates.margins.is_sorted() && candidates.margins[0] == 0.0, "{candidates:?}");
            assert!(candidates.chances().all(|chance| (0.0..1.0).contains(&chance)), "{candidates:?}");
        }
    }

    #[test]
    fn the_closest_rivals_become_leaves() {
        assert_eq!(with_leaves(&positions(), 3), Draft::chain(vec![5, 8, 11]));
        let four = with_leaves(&positions(), 4);
        assert_eq!((four.token_ids, four.parents), (vec![5, 8, 9, 11], vec![0, 1, 1, 2]));
        let six = with_leaves(&positions(), 6);
        assert_eq!(six.token_ids, [5, 8, 9, 10, 11, 12]);
        assert_eq!((six.parents.clone(), six.check_shape()), (vec![0, 1, 1, 1, 2, 2], Ok(())));
    }

    #[test]
    fn the_chain_is_never_cut_and_nothing_is_invented() {
        assert_eq!(with_leaves(&positions(), 0).token_ids, [5, 8, 11]);
        assert_eq!(with_leaves(&positions(), 40).token_ids.len(), 9);
        assert_eq!(with_leaves(&[], 40), Draft::default());
        assert_eq!(with_leaves(&positions(), 9).first_path(), [5, 8, 11]);
    }
}
