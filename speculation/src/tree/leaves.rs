//! Which siblings a chain gets as leaves, that is without a forward of their own: at each position the draft has scored every token
//! anyway, and the next best of them cost the target a row each and the draft nothing.
//!
//! A leaf is worth one token if the target draws it: the chain came as far as its parent, and the draw is the leaf. How likely that
//! is follows from margins: by how much a score, noise included, is below the best. The target adds the same noise to its own
//! logits, so that the order changes only by what the two models' logits differ, and that is the same at every temperature when
//! it is told in logits.

use crate::{Draft, TokenId};

/// The scale, in logits, on which a token is overtaken by one with a lower score: by what the bundled pair's logits differ, about; and by
/// how much more for each nat of the draft's own surprise. A pair that differs less or more gets trees of nearly the same shape.
const DEVIATION: f64 = 0.8;
const DEVIATION_PER_NAT: f64 = 0.15;

/// By which power of the margin that becomes rarer: what two models differ by has heavier tails than a logistic's.
const POWER: i32 = 3;

/// The weight of the draws that are none of the candidates, of a draft that is sure and for each nat of its surprise; the first candidate's
/// weight is 1.
pub(super) const NOBODY: f64 = 0.05;
const NOBODY_PER_NAT: f64 = 0.1;

/// A larger surprise says no more.
const MAX_SURPRISE: f64 = 6.0;

/// The best tokens of one position by logit and noise.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidates {
    /// The ids, best first; the first is the chain's.
    pub token_ids: Vec<TokenId>,
    /// By how many logits each is below the first; as many, ascending, the first 0.
    pub margins: Vec<f64>,
    /// How improbable the draft finds the first at temperature 1: `-ln` of it, in nats. The less sure a draft is, the more its target differs.
    pub surprise: f64,
}

impl Candidates {
    /// How likely the target is to draw each. Fitted to the bundled pair (docs/measurements/acceptance.md).
    pub(super) fn chances(&self) -> impl Iterator<Item = f64> {
        let surprise = self.surprise.clamp(0.0, MAX_SURPRISE);
        let deviation = DEVIATION + DEVIATION_PER_NAT * surprise;
        let nobody = NOBODY + NOBODY_PER_NAT * surprise;
        let weight = move |margin: &f64| (1.0 + margin / deviation).powi(-POWER);
        let sum: f64 = nobody + self.margins.iter().map(weight).sum::<f64>();
        self.margins.iter().map(move |margin| weight(margin) / sum)
    }
}

/// A token that the target may draw in place of a chain's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rival {
    /// Index of the chain's token.
    pub position: usize,
    /// Its place among the candidates there; above 0.
    pub rank: usize,
    /// How likely it is that the target accepts the chain up to there and then draws this one.
    chance: f64,
}

/// Where and by which tokens the target may leave the chain of everybody's first candidates, the likeliest first.
pub fn rivals(positions: &[Candidates]) -> Vec<Rival> {
    let mut rivals: Vec<Rival> = Vec::new();
    let mut reached = 1.0;
    for (position, candidates) in positions.iter().enumerate() {
        let mut of_first = 1.0;
        for (rank, chance) in candidates.chances().enumerate() {
            match rank {
                0 => of_first = chance,
                _ => rivals.push(Rival { position, rank, chance: reached * chance }),
            }
        }
        reached *= of_first;
    }
    // Among equals the earlier position, then the better rank.
    let place = |rival: &Rival| (rival.position, rival.rank);
    rivals.sort_by(|a, b| b.chance.total_cmp(&a.chance).then(place(a).cmp(&place(b))));
    rivals
}

/// The chain of everybody's first candidates, and the likeliest of the others as leaves, `num_tokens` ids in all.
pub fn with_leaves(positions: &[Candidates], num_tokens: usize) -> Draft {
    let mut leaves = rivals(positions);
    leaves.truncate(num_tokens.saturating_sub(positions.len()));
    let mut draft = Draft::default();
    let mut parent = 0;
    for (position, candidates) in positions.iter().enumerate() {
        let row = draft.token_ids.len() as u32 + 1;
        draft.token_ids.push(candidates.token_ids[0]);
        draft.parents.push(parent);
        // A better rank is at least as likely, so that those that are in are the first ones.
        let num_leaves = leaves.iter().filter(|leaf| leaf.position == position).count();
        let ids = candidates.token_ids.iter().skip(1).take(num_leaves);
        draft.token_ids.extend(ids);
        draft.parents.resize(draft.token_ids.len(), parent);
        parent = row;
    }
    draft.forget_needless_parents();
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
