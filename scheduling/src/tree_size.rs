//! Number of tokens that a tree has beside its chain ([`speculation::tree`]), here its leaves: the number
//! that promises the most tokens per second. Without a clock or randomness.
//!
//! A leaf costs the target one row and the draft worker nothing. A sibling is worth one token if the chain is
//! accepted up to its parent, the target does not draw the chain's next token, and draws the sibling instead.
//! The first two probabilities are acceptance by position. The third is learned here by rank: each
//! verification shows, at the position where it left the chain, which sibling the target drew there, if any.
//! If the draft worker grows branches, tokens after a sibling can be accepted too. How well, compared with
//! those of a chain, is learned as one share; a draft worker without branches has 0. The draft worker
//! distributes the leaves, because it has the margins; only their number is chosen here.

use crate::acceptance_by_position::cumulative;
use crate::draft_length::COMPARED_LENGTHS;
use crate::smoothing::{LONG_EWMA_WINDOW, PRIOR_WEIGHT, add_decayed};
use speculation::tree::{DraftOutcome, MAX_CANDIDATES};

/// Prior probability, from the bundled pair, that the target draws the next best token where it left the
/// chain; the same share of the remaining cases for each further rank.
const PRIOR_RATE: f64 = 0.3;

/// Prior acceptance after a sibling, as a share of a chain's: drafts of one token show nothing of it.
const PRIOR_CONTINUATION: f64 = 0.5;

/// Maximum number of leaves per draft.
pub(crate) const MAX_LEAVES: u32 = 48;

/// Probability that the target draws a sibling of the token at which it left the chain, by rank: the token is
/// the first of the candidates, its siblings are the others.
#[derive(Debug, Clone, Default)]
pub(crate) struct SiblingRates {
    /// Decayed: number of positions with a sibling of that rank, and number of those where it was drawn.
    offered: [f64; MAX_CANDIDATES - 1],
    drawn: [f64; MAX_CANDIDATES - 1],
    /// Tokens accepted after siblings that were drawn, and how many of them a chain would have had accepted
    /// from there on. Trees without branches have none.
    continued: f64,
    of_chains: f64,
}

impl SiblingRates {
    /// Records a verification; only one that left its draft's path of first children is evidence. `rates[i]`
    /// is the probability that token i of a chain is accepted if all before it are.
    pub(crate) fn observe(&mut self, judged: &DraftOutcome, rates: &[f64]) {
        let Some(mismatch) = judged.mismatch else { return };
        let siblings = (mismatch.num_children as usize).saturating_sub(1).min(self.offered.len());
        for rank in 0..siblings {
            let was_drawn = mismatch.rank == Some(rank as u32 + 1);
            add_decayed(&mut self.offered[rank], 1.0, LONG_EWMA_WINDOW);
            add_decayed(&mut self.drawn[rank], f64::from(u8::from(was_drawn)), LONG_EWMA_WINDOW);
        }
        if mismatch.rank.is_some_and(|rank| rank > 0) {
            let accepted = f64::from(mismatch.num_accepted.saturating_sub(1));
            let later = judged.num_first as usize + 1..(judged.num_positions as usize).min(rates.len());
            let of_chain: f64 = rates.get(later).map_or(0.0, |rates| cumulative(rates).sum());
            add_decayed(&mut self.continued, accepted, LONG_EWMA_WINDOW);
            add_decayed(&mut self.of_chains, of_chain, LONG_EWMA_WINDOW);
        }
    }

    /// Acceptance after a sibling that was drawn, as a share of a chain's.
    pub(crate) fn continuation(&self) -> f64 {
        let prior = PRIOR_CONTINUATION * PRIOR_WEIGHT;
        ((self.continued + prior) / (self.of_chains + PRIOR_WEIGHT)).min(1.0)
    }

    /// Probability of each sibling, best first, to be drawn where the chain is left.
    pub(crate) fn rates(&self) -> [f64; MAX_CANDIDATES - 1] {
        let mut prior = PRIOR_RATE;
        let mut left = 1.0_f64;
        std::array::from_fn(|rank| {
            let rate = (self.drawn[rank] + PRIOR_WEIGHT * prior) / (self.offered[rank] + PRIOR_WEIGHT);
            // Probabilities add up to at most 1.
            let rate = rate.min(left);
            left -= rate;
            prior = rate * (1.0 - PRIOR_RATE);
            rate
        })
    }

    /// Maximum worth of all leaves of a chain of `k` tokens that the target leaves with probability `left`.
    pub(crate) fn worth_limit(&self, k: u32, left: f64) -> f64 {
        let after = self.continuation() * f64::from(k.saturating_sub(1));
        left * self.rates().iter().sum::<f64>() * (1.0 + after)
    }

    /// The leaves that a chain may get, best first: siblings of its tokens, and first children after them.
    /// `reached[i]` is the probability that the chain is accepted up to token i.
    pub(crate) fn leaves(&self, reached: &[f64]) -> Vec<Leaf> {
        let (rates, continuation) = (self.rates(), self.continuation());
        let mut leaves = Vec::new();
        let mut before = 1.0;
        for (position, &at) in reached.iter().enumerate() {
            let left = (before - at).max(0.0);
            before = at;
            // Probability of the sibling and of each token after it, if the sibling is drawn.
            let after = reached[position + 1..].iter().map(|later| continuation * later / at.max(1e-9));
            let accepted: Vec<f64> = std::iter::once(1.0).chain(after).collect();
            for rate in rates {
                let tokens = (position as u32..).zip(&accepted);
                leaves
                    .extend(tokens.map(|(position, chance)| Leaf { position, worth: left * rate * chance }));
            }
        }
        leaves.sort_by(|a, b| b.worth.total_cmp(&a.worth));
        leaves
    }
}

/// A token of a tree beside its chain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Leaf {
    /// Its position in the draft.
    pub(crate) position: u32,
    /// Expected additional tokens per round.
    pub(crate) worth: f64,
}

/// Number of leaves, and the expected tokens of a round with them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TreeSize {
    /// 0: a chain is as good.
    pub(crate) num_leaves: u32,
    /// Including the chain's tokens.
    pub(crate) expected_tokens: f64,
}

/// Chooses the number of a chain's best leaves, worth `worth` each, with the most tokens per time. The
/// chain's round commits `tokens` in `chain_us`. `round_us(leaves)` is the time of a round with that many
/// leaves, or `None` if they are not allowed, and neither are more.
pub(crate) fn tree_size(
    (tokens, chain_us): (f64, f64),
    worth: impl IntoIterator<Item = f64>,
    round_us: impl Fn(u32) -> Option<f64>,
) -> TreeSize {
    let chain = TreeSize { num_leaves: 0, expected_tokens: tokens };
    let mut most = tokens / chain_us.max(1.0);
    let (mut best, mut with) = (chain, chain);
    let mut worth = worth.into_iter().take(MAX_LEAVES as usize).peekable();
    while let Some(of_leaf) = worth.next() {
        with = TreeSize { num_leaves: with.num_leaves + 1, expected_tokens: with.expected_tokens + of_leaf };
        if !COMPARED_LENGTHS.contains(&with.num_leaves) && worth.peek().is_some() {
            continue;
        }
        let Some(us) = round_us(with.num_leaves) else { break };
        let pace = with.expected_tokens / us.max(1.0);
        if pace > most {
            (most, best) = (pace, with);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use speculation::tree::Mismatch;

    use super::*;

    fn left_at(num_children: u32, rank: Option<u32>) -> DraftOutcome {
        DraftOutcome {
            num_positions: 4,
            num_first: 1,
            mismatch: Some(Mismatch { num_children, rank, num_accepted: u32::from(rank.is_some()) }),
        }
    }

    /// Acceptance of a chain by position.
    const RATES: [f64; 4] = [0.5; 4];

    fn size(tokens: f64, leaves: &[Leaf], round_us: impl Fn(u32) -> Option<f64>) -> u32 {
        tree_size((tokens, round_us(0).unwrap()), leaves.iter().map(|leaf| leaf.worth), round_us).num_leaves
    }

    #[test]
    fn free_rows_are_used_and_dear_ones_are_not() {
        let leaves = |row_us: f64| {
            let leaves = SiblingRates::default().leaves(&[0.5, 0.25, 0.12, 0.06]);
            size(1.93, &leaves, |leaves| Some(1_000.0 + row_us * f64::from(leaves)))
        };
        assert_eq!(leaves(0.0), MAX_LEAVES);
        assert!((4..MAX_LEAVES).contains(&leaves(5.0)), "{}", leaves(5.0));
        assert!((1..4).contains(&leaves(40.0)), "{}", leaves(40.0));
        assert_eq!(leaves(200.0), 0);
    }

    #[test]
    fn a_stair_of_the_table_is_filled_and_not_climbed() {
        let leaves = SiblingRates::default().leaves(&[0.5, 0.25, 0.12]);
        let round_us = |leaves: u32| Some(if leaves <= 4 { 1_000.0 } else { 1_500.0 });
        assert_eq!(size(1.8, &leaves, round_us), 4);
        assert_eq!(
            size(1.8, &leaves, |leaves| (leaves <= 3).then_some(1_000.0)),
            3,
            "more leaves are not allowed"
        );
        let size = tree_size((1.8, 1_000.0), [0.2, 0.1], |_| Some(1_000.0));
        assert!(size.num_leaves == 2 && (size.expected_tokens - 2.1).abs() < 1e-9, "{size:?}");
    }

    #[test]
    fn ranks_that_are_never_drawn_are_given_up_and_others_are_believed() {
        let (mut never, mut first) = (SiblingRates::default(), SiblingRates::default());
        for _ in 0..400 {
            never.observe(&left_at(4, None), &RATES);
            first.observe(&left_at(4, Some(1)), &RATES);
        }
        assert!(never.rates().iter().all(|&rate| rate < 0.02), "{:?}", never.rates());
        assert!(first.rates()[0] > 0.9 && first.rates()[1] < 0.05, "{:?}", first.rates());
        let round_us = |leaves: u32| Some(1_000.0 + 20.0 * f64::from(leaves));
        let leaves = |rates: &SiblingRates| size(1.75, &rates.leaves(&[0.5, 0.25]), round_us);
        assert_eq!((leaves(&never), leaves(&first)), (0, 2));
    }

    #[test]
    fn tokens_after_siblings_are_worth_what_they_were_accepted() {
        let learned = |num_accepted: u32| {
            let mut rates = SiblingRates::default();
            let mismatch = Mismatch { num_children: 3, rank: Some(1), num_accepted };
            let judged = DraftOutcome { num_positions: 4, num_first: 0, mismatch: Some(mismatch) };
            (0..400).for_each(|_| rates.observe(&judged, &RATES));
            rates
        };
        // A chain would have had 0.875 tokens accepted after the first.
        let (leaves_only, branches) = (learned(1), learned(2));
        assert!(leaves_only.continuation() < 0.02 && branches.continuation() == 1.0);
        let worth =
            |rates: &SiblingRates| rates.leaves(&[0.5, 0.25]).iter().map(|leaf| leaf.worth).sum::<f64>();
        let siblings = |rates: &SiblingRates| rates.rates().iter().sum::<f64>() * 0.75;
        assert!((worth(&leaves_only) / siblings(&leaves_only) - 1.0).abs() < 0.01);
        // Where the first position was left, half of the second tokens are accepted.
        assert!((worth(&branches) / siblings(&branches) - 1.0 / 0.75).abs() < 1e-9);
        // A draft of one token shows nothing.
        let mut rates = SiblingRates::default();
        let mismatch = Some(Mismatch { num_children: 3, rank: Some(1), num_accepted: 1 });
        (0..400).for_each(|_| {
            rates.observe(&DraftOutcome { num_positions: 1, num_first: 0, mismatch }, &RATES);
        });
        assert_eq!(rates.continuation(), PRIOR_CONTINUATION);
    }

    #[test]
    fn chains_and_whole_acceptance_say_nothing_of_siblings() {
        let mut rates = SiblingRates::default();
        rates.observe(&DraftOutcome { num_positions: 4, num_first: 4, mismatch: None }, &RATES);
        rates.observe(&left_at(1, None), &RATES);
        assert_eq!(rates.rates(), SiblingRates::default().rates());
        let sum: f64 = rates.rates().iter().sum();
        assert!(sum < 1.0, "{sum}");
    }
}
