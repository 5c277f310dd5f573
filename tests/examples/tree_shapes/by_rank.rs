//! Static trees: each candidate has the average probability of its rank, so every step has the same tree.

use speculation::tree::{Candidates, MAX_CANDIDATES};

/// Divisor of margins in `speculation::tree` when the draft's surprise is one nat.
const DEVIATION_AT_ONE_NAT: f64 = 0.95;

/// How often the target draws the draft's candidate of each rank.
pub(crate) type DrawnByRank = [f64; MAX_CANDIDATES];

/// Replaces the margins so that the candidates' probabilities are the average of their ranks.
pub(crate) fn by_rank(candidates: Candidates, rates: &DrawnByRank) -> Candidates {
    let margin = |rate: f64| ((rates[0] / rate).cbrt() - 1.0) * DEVIATION_AT_ONE_NAT;
    let margins = rates.iter().take(candidates.token_ids.len()).map(|&rate| margin(rate)).collect();
    // With a surprise of 1, draws that are not candidates weigh 0.05 + 0.1: about their rate of 0.1 divided
    // by the first candidate's 0.6.
    Candidates { margins, surprise: 1.0, ..candidates }
}
