//! What rounds of each k take beyond their price, and how well that is known: a Gaussian belief over the logarithm of measured / priced
//! time by k, kept by a Kalman filter. It knows no k that is chosen and chooses none.
//!
//! What is in the way of rounds at the present k, prompts above all, is in the way of every other k, too: that part is common to all and moves
//! soon. What is left is a k's own (stairs, knees, rounds that run into each other); neighbours share most of it, and it lasts. So a
//! measurement at one k corrects all others as far as it should, and each k knows how far it may still be wrong: the reason to try it.

/// Standard deviation of what all k have in common, before anything was measured.
const COMMON: f64 = 0.2;

/// Of what is a k's own.
const OWN: f64 = 0.05;

/// How much of what is its own a k shares with its neighbour. Plain rounds do not run into each other as drafted ones do: they share nothing.
const NEIGHBOUR: f64 = 0.8;

/// Of the logarithm of the mean time of a lane round: forwards are noisy.
const LANE_ROUND_NOISE: f64 = 0.04;

/// How far what is common moves in a lane round.
const COMMON_DRIFT: f64 = 0.005;

/// Lane rounds after which what is a k's own is forgotten.
const OWN_MEMORY: f64 = 2_048.0;

/// A load that is so many times as large or small ages what is known by [`OWN_MEMORY`] once for each factor e.
const LOAD_AGES: f64 = 256.0;

/// How much is believed how firmly: the constants above, each beside what it is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeliefRules {
    /// Doubt of what all k have in common.
    pub common: f64,
    /// Doubt of what is a k's own.
    pub own: f64,
    /// How much of that a k shares with its neighbour.
    pub neighbour: f64,
    /// Noise of a lane round.
    pub lane_round_noise: f64,
    /// How far what is common moves in a lane round.
    pub common_drift: f64,
    /// Lane rounds for which what is a k's own lasts.
    pub own_memory: f64,
    /// So many times that for a load that is e times another.
    pub load_ages: f64,
}

impl Default for BeliefRules {
    fn default() -> Self {
        Self {
            common: COMMON,
            own: OWN,
            neighbour: NEIGHBOUR,
            lane_round_noise: LANE_ROUND_NOISE,
            common_drift: COMMON_DRIFT,
            own_memory: OWN_MEMORY,
            load_ages: LOAD_AGES,
        }
    }
}

/// The belief of one lane.
#[derive(Debug, Clone)]
pub(super) struct Belief {
    rules: BeliefRules,
    /// By k.
    mean: Vec<f64>,
    /// By k and k.
    covariance: Vec<Vec<f64>>,
    /// What the covariance goes back to while nothing is measured.
    prior: Vec<Vec<f64>>,
}

impl Belief {
    /// For k in 0..=max_k: every price is right, more or less.
    pub(super) fn new(max_k: u32, rules: BeliefRules) -> Self {
        let BeliefRules { common, own, neighbour, .. } = rules;
        let shared = |i: u32, j: u32| match (i, j) {
            (0, 0) => own * own / 4.0,
            (0, _) | (_, 0) => 0.0,
            _ => own * own * neighbour.powi(i.abs_diff(j) as i32),
        };
        let row = |i: u32| (0..=max_k).map(|j| common * common + shared(i, j)).collect();
        let prior: Vec<Vec<f64>> = (0..=max_k).map(row).collect();
        Self { rules, mean: vec![0.0; prior.len()], covariance: prior.clone(), prior }
    }

    /// A lane round went by, and the load changed by so much (logarithm of the ratio).
    pub(super) fn age(&mut self, load_change: f64) {
        let BeliefRules { load_ages, own_memory, common_drift, .. } = self.rules;
        let keep = (-(1.0 + load_ages * load_change.abs()) / own_memory).exp();
        self.mean.iter_mut().for_each(|mean| *mean *= keep);
        for (row, prior) in self.covariance.iter_mut().zip(&self.prior) {
            for (at, prior) in row.iter_mut().zip(prior) {
                *at = keep * keep * *at + (1.0 - keep * keep) * prior + common_drift * common_drift;
            }
        }
    }

    /// Rounds at `k` took `log_ratio` (logarithm) beyond their price; `part` of the lane's sequences said so.
    pub(super) fn observe(&mut self, k: u32, log_ratio: f64, part: f64) {
        let k = k as usize;
        if k >= self.mean.len() || !log_ratio.is_finite() || part <= 0.0 {
            return;
        }
        let noise = self.rules.lane_round_noise.powi(2) / part.min(1.0);
        let column: Vec<f64> = self.covariance[k].clone();
        let spread = column[k] + noise;
        // A stall says little of other rounds; where rounds really changed by more, the next ones say so again.
        let surprise = (log_ratio - self.mean[k]).clamp(-3.0 * spread.sqrt(), 3.0 * spread.sqrt());
        for (i, gain) in column.iter().map(|shared| shared / spread).enumerate() {
            self.mean[i] += gain * surprise;
            for (j, shared) in column.iter().enumerate() {
                self.covariance[i][j] -= gain * shared;
            }
        }
    }

    /// By how many times rounds at `k` take longer than their price.
    pub(super) fn factor(&self, k: u32) -> f64 {
        self.mean[k as usize].exp()
    }

    /// Standard deviation of the logarithm of how the times of two k compare.
    pub(super) fn doubt(&self, k: u32, other: u32) -> f64 {
        let at = |i: u32, j: u32| self.covariance[i as usize][j as usize];
        (at(k, k) + at(other, other) - 2.0 * at(k, other)).max(0.0).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_common_moves_all_and_what_is_its_own_moves_neighbours() {
        let mut belief = Belief::new(10, BeliefRules::default());
        for _ in 0..50 {
            belief.age(0.0);
            belief.observe(4, 0.5, 1.0);
        }
        assert!((belief.factor(4).ln() - 0.5).abs() < 0.03, "{}", belief.factor(4).ln());
        let log = |k| belief.factor(k).ln();
        assert!(log(0) > 0.3 && log(5) > 0.4 && log(5) > log(10), "{} {} {}", log(0), log(5), log(10));
        // Then it is as fast as priced again: all are.
        for _ in 0..50 {
            belief.age(0.0);
            belief.observe(4, 0.0, 1.0);
        }
        assert!((0..=10).all(|k| belief.factor(k).ln().abs() < 0.08));
    }

    #[test]
    fn doubt_shrinks_where_both_were_measured_and_comes_back() {
        let mut belief = Belief::new(4, BeliefRules::default());
        let before = belief.doubt(0, 2);
        for _ in 0..20 {
            for k in [0, 2] {
                belief.age(0.0);
                belief.observe(k, 0.0, 1.0);
            }
        }
        let after = belief.doubt(0, 2);
        assert!(after < 0.3 * before, "{before} {after}");
        assert!(belief.doubt(0, 3) < before && belief.doubt(0, 3) > after);
        belief.age(3.0);
        assert!(belief.doubt(0, 2) > 1.5 * after, "another load");
        (0..10_000).for_each(|_| belief.age(0.0));
        assert!((belief.doubt(0, 2) / before - 1.0).abs() < 0.01);
    }
}
