//! Static trees: each candidate has the average probability of its rank, so every step has the same tree.

use speculation::tree::{Candidates, MAX_CANDIDATES};

/// How often the target draws the draft's candidate of each rank.
pub(crate) type DrawnByRank = [f64; MAX_CANDIDATES];

/// The same candidates with the average probabilities of their ranks.
pub(crate) fn by_rank(candidates: Candidates, rates: &DrawnByRank) -> Candidates {
    Candidates::new(candidates.token_ids, *rates)
}
