//! How many siblings a chain's tokens get as leaves ([`speculation::tree`]): as many as promise more tokens per second than the chain
//! alone. It reads no clock and draws no randomness.
//!
//! A leaf costs the target a row and the draft worker nothing. It is worth one token where the chain came as far as its parent, the
//! target did not draw the chain's next token, and drew the leaf instead. The first two are acceptance by position; the third is learned
//! here, by rank: each verification tells of the position where it left the chain which sibling the target drew there, if any. Which
//! positions get how many is the draft worker's to say, who sees the margins; the choice is only how many there are.

use speculation::tree::Judged;

/// Ranks that are told apart; the first sibling of a chain's token is rank 1.
const MAX_RANK: usize = 7;

/// Before anything is known: of the positions where the bundled pair's chain is left, the share where the target draws the next best
/// token, and by what it falls from rank to rank.
const PRIOR_RATE: f64 = 0.3;
const PRIOR_FALL: f64 = 0.55;

/// Judged positions that the prior is worth, and that are remembered.
const PRIOR_WEIGHT: f64 = 8.0;
const MEMORY: f64 = 256.0;

/// Numbers of leaves that are compared; between them there is little to choose.
const SIZES: [u32; 9] = [1, 2, 3, 4, 6, 8, 12, 16, 24];

/// A tree has to promise so much more than a chain.
const GAIN_MIN: f64 = 1.02;

/// How often the target draws a sibling of the token at which it left the chain, by rank.
#[derive(Debug, Clone)]
pub struct SiblingRates {
    /// Decayed: positions at which there was a sibling of that rank, and those at which it was drawn.
    offered: [f64; MAX_RANK],
    drawn: [f64; MAX_RANK],
}

impl Default for SiblingRates {
    fn default() -> Self {
        Self { offered: [0.0; MAX_RANK], drawn: [0.0; MAX_RANK] }
    }
}

impl SiblingRates {
    /// A verification that left its draft's path of first children, if it did.
    pub fn observe(&mut self, judged: &Judged) {
        let Some(missed) = judged.missed else { return };
        let siblings = (missed.num_children as usize).saturating_sub(1).min(MAX_RANK);
        for rank in 0..siblings {
            let was_drawn = missed.rank == Some(rank as u32 + 1);
            self.offered[rank] += 1.0 - self.offered[rank] / MEMORY;
            self.drawn[rank] += f64::from(u8::from(was_drawn)) - self.drawn[rank] / MEMORY;
        }
    }

    /// The chance of each sibling, best first, to be drawn where the chain is left.
    pub fn rates(&self) -> [f64; MAX_RANK] {
        let mut prior = PRIOR_RATE;
        let mut left = 1.0_f64;
        std::array::from_fn(|rank| {
            let rate = (self.drawn[rank] + PRIOR_WEIGHT * prior) / (self.offered[rank] + PRIOR_WEIGHT);
            // All of them together are no more than certain.
            let rate = rate.min(left);
            left -= rate;
            prior = rate * PRIOR_FALL;
            rate
        })
    }

    /// What each leaf of a chain is worth in tokens, the best first. `reached[i]` is the chance that the chain is accepted as far as its
    /// token i.
    pub fn worth(&self, reached: &[f64]) -> Vec<f64> {
        let rates = self.rates();
        let before = std::iter::once(1.0).chain(reached.iter().copied());
        let left = before.zip(reached).map(|(before, reached)| (before - reached).max(0.0));
        let mut worth: Vec<f64> = left.flat_map(|left| rates.map(|rate| left * rate)).collect();
        worth.sort_by(|a, b| b.total_cmp(a));
        worth
    }
}

/// How many leaves promise the most tokens per time: the chain's round commits `tokens`, and `round_us(leaves)` says what a round with so
/// many takes. 0: a chain is as good.
pub fn num_leaves(tokens: f64, worth: &[f64], round_us: impl Fn(u32) -> f64) -> u32 {
    let pace = |leaves: u32| {
        let more: f64 = worth.iter().take(leaves as usize).sum();
        (tokens + more) / round_us(leaves).max(1.0)
    };
    let chain = pace(0) * GAIN_MIN;
    let sizes = SIZES.into_iter().filter(|&leaves| leaves as usize <= worth.len());
    let best =
        sizes.map(|leaves| (pace(leaves), leaves)).max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
    best.filter(|(pace, _)| *pace > chain).map_or(0, |(_, leaves)| leaves)
}

#[cfg(test)]
mod tests {
    use speculation::tree::Missed;

    use super::*;

    fn left_at(num_children: u32, rank: Option<u32>) -> Judged {
        Judged { num_positions: 4, num_first: 1, missed: Some(Missed { num_children, rank }) }
    }

    #[test]
    fn free_rows_are_used_and_dear_ones_are_not() {
        let worth = SiblingRates::default().worth(&[0.5, 0.25, 0.12, 0.06]);
        let leaves = |row_us: f64| num_leaves(1.93, &worth, |leaves| 1_000.0 + row_us * f64::from(leaves));
        assert_eq!(leaves(0.0), 24);
        assert!((4..16).contains(&leaves(5.0)), "{}", leaves(5.0));
        assert!((1..4).contains(&leaves(40.0)), "{}", leaves(40.0));
        assert_eq!(leaves(200.0), 0);
    }

    #[test]
    fn a_stair_of_the_table_is_filled_and_not_climbed() {
        let worth = SiblingRates::default().worth(&[0.5, 0.25, 0.12]);
        let round_us = |leaves: u32| if leaves <= 4 { 1_000.0 } else { 1_500.0 };
        assert_eq!(num_leaves(1.8, &worth, round_us), 4);
    }

    #[test]
    fn ranks_that_are_never_drawn_are_given_up_and_others_are_believed() {
        let (mut never, mut first) = (SiblingRates::default(), SiblingRates::default());
        for _ in 0..400 {
            never.observe(&left_at(4, None));
            first.observe(&left_at(4, Some(1)));
        }
        assert!(never.rates().iter().all(|&rate| rate < 0.02), "{:?}", never.rates());
        assert!(first.rates()[0] > 0.9 && first.rates()[1] < 0.05, "{:?}", first.rates());
        let round_us = |leaves: u32| 1_000.0 + 20.0 * f64::from(leaves);
        let leaves = |rates: &SiblingRates| num_leaves(1.75, &rates.worth(&[0.5, 0.25]), round_us);
        assert_eq!((leaves(&never), leaves(&first)), (0, 2));
    }

    #[test]
    fn chains_and_whole_acceptance_say_nothing_of_siblings() {
        let mut rates = SiblingRates::default();
        rates.observe(&Judged { num_positions: 4, num_first: 4, missed: None });
        rates.observe(&left_at(1, None));
        assert_eq!(rates.rates(), SiblingRates::default().rates());
        let sum: f64 = rates.rates().iter().sum();
        assert!(sum < 1.0, "{sum}");
    }
}
