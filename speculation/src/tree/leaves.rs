//! Chooses leaves for a chain: siblings without a forward of their own. At each position the draft has scored
//! every token anyway, so the next best tokens cost the target one row each and the draft nothing.
//!
//! A leaf gains one token if the target draws it: the chain is accepted up to its parent, and the draw is the
//! leaf. Its probability follows from its margin: the amount by which its score, noise included, is below the
//! best. The target adds the same noise to its own logits, so the order can only change because the two
//! models' logits differ. Measured in logits, that difference is the same at every temperature.

use super::MAX_CANDIDATES;
use crate::{Draft, SamplingParams, TokenId};

/// Scale, in logits, of the margin at which a lower-scored token still overtakes: about the difference
/// between the bundled pair's logits, plus an increase per nat of the draft's surprise. The numbers down to
/// `TAIL` are fitted to that pair's draws at T = 0, 0.7 and 1 (docs/adr/0119). Pairs that differ less or more
/// get trees of nearly the same shape.
const DEVIATION: f64 = 1.1;
const DEVIATION_PER_NAT: f64 = 0.2;

/// Exponent of the decay with the margin: the difference between two models has heavier tails than a logistic
/// distribution.
const POWER: i32 = 4;

/// Weight of all draws that are none of the candidates, as a multiple of the last candidate's: they are less
/// likely than it, and many.
const TAIL: f64 = 5.0;

/// The same where a filter left no other tokens to the draft, as a multiple of the first candidate's: the
/// target may have some.
const UNLISTED: f64 = 0.05;

/// Surprise is capped here; larger values add no information.
const MAX_SURPRISE: f64 = 6.0;

/// Best tokens of one position by logit plus noise.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Candidates {
    /// The ids, best first; the first is the chain's token.
    pub token_ids: Vec<TokenId>,
    /// For each id, the probability that the target draws it; never more than that of the one before.
    chances: Vec<f64>,
}

impl Candidates {
    /// Creates candidates that the target draws with these probabilities, best first. None counts as likelier
    /// than the one before it.
    pub fn new(token_ids: Vec<TokenId>, chances: impl IntoIterator<Item = f64>) -> Self {
        let mut most = 1.0_f64;
        let chances = chances.into_iter().take(token_ids.len()).map(|chance| {
            most = most.min(chance);
            most
        });
        let chances = chances.collect();
        Self { token_ids, chances }
    }

    /// From ids and their scores, best first. A score is the logit divided by the temperature plus noise, or
    /// the logit if the sequence is greedy. `surprise` is `-ln` of the first token's probability under the draft
    /// at temperature 1, in nats: the less certain a draft is, the more its target differs.
    pub fn from_scores(sampling: &SamplingParams, best: &[(TokenId, f64)], surprise: f32) -> Self {
        let scale = if sampling.is_greedy() { 1.0 } else { f64::from(sampling.temperature) };
        let deviation = DEVIATION + DEVIATION_PER_NAT * f64::from(surprise).clamp(0.0, MAX_SURPRISE);
        let first = best.first().map_or(0.0, |best| best.1);
        let weight = |score: f64| (1.0 + (first - score) * scale / deviation).powi(-POWER);
        let weights: Vec<f64> = best.iter().map(|&(_, score)| weight(score)).collect();
        let other = match weights.last() {
            Some(last) if weights.len() >= MAX_CANDIDATES => TAIL * last,
            _ => UNLISTED,
        };
        let sum: f64 = other + weights.iter().sum::<f64>();
        Self::new(best.iter().map(|best| best.0).collect(), weights.into_iter().map(|weight| weight / sum))
    }

    /// For each candidate, the probability that the target draws it.
    pub fn chances(&self) -> &[f64] {
        &self.chances
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
        for (rank, &chance) in candidates.chances.iter().enumerate() {
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
        let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let best: Vec<(TokenId, f64)> =
            token_ids.iter().zip(margins).map(|(&id, margin)| (id, -margin)).collect();
        Candidates::from_scores(&greedy, &best, 0.5)
    }

    fn positions() -> [Candidates; 3] {
        [
            position(&[5, 6, 7], &[0.0, 3.0, 9.0]),
            position(&[8, 9, 10], &[0.0, 0.5, 1.0]),
            position(&[11, 12, 13], &[0.0, 0.4, 9.0]),
        ]
    }

    #[test]
    fn chances_fall_with_the_margin_and_leave_some_for_other_tokens() {
        let chances = |margins: &[f64], surprise: f32, temperature: f32| {
            let sampling = SamplingParams { temperature, ..SamplingParams::default() };
            let best: Vec<(TokenId, f64)> = (1..).zip(margins).map(|(id, margin)| (id, -margin)).collect();
            Candidates::from_scores(&sampling, &best, surprise).chances().to_vec()
        };
        let full = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        let of_full = chances(&full, 0.5, 0.0);
        assert!(of_full.is_sorted_by(|a, b| a > b) && of_full.iter().sum::<f64>() < 1.0);
        let other = 1.0 - of_full.iter().sum::<f64>();
        assert!((other / of_full[7] - TAIL).abs() < 1e-9, "the rest of the vocabulary");
        // The same difference in logits at half the temperature.
        assert_eq!(chances(&full.map(|margin| 2.0 * margin), 0.5, 0.5), of_full);
        assert!(chances(&full, 3.0, 0.0)[0] < of_full[0], "a draft that is less certain");
        // A filter left one token to the draft.
        assert!(chances(&[0.0], 0.0, 0.0)[0] > 0.95);
    }

    #[test]
    fn no_candidate_counts_as_likelier_than_a_better_one() {
        assert_eq!(Candidates::new(vec![4, 5, 6], [0.2, 0.3, 0.1]).chances(), [0.2, 0.2, 0.1]);
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
