//! Excess of round times over their price, by k and as a share of the price: a Kalman filter over the vector
//! (measured / priced - 1). It averages times, not their logarithms: speed is tokens over mean time. If some
//! rounds wait for a prompt and most do not, a mean of logarithms is too small, and more so the fewer
//! forwards a round waits for. It is independent of the chosen k.
//!
//! Delays at the present k, mainly by prompts, also affect every other k: this component is common to all.
//! The rest is specific to each k (stairs, knees, rounds that wait for the forwards of other lanes).
//! Neighbouring k share most of it, and it lasts. So a measurement at one k corrects the other k by the
//! appropriate amount.

/// Smallest ratio of measured to priced time.
const MIN_FACTOR: f64 = 0.1;

/// Uncertainty of prices, relative to the price.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResidualRules {
    /// Prior standard deviation of the component common to all k, and of that of each k > 0. These are as
    /// large, because drafted rounds wait for forwards of other lanes, and plain rounds run in step with them.
    pub deviation: f64,
    /// Correlation of the component of neighbouring k. k = 0 is independent of the others, because plain
    /// rounds do not wait as drafted ones do.
    pub neighbour: f64,
    /// Standard deviation of the mean time in a lane round; forwards are noisy.
    pub lane_round_noise: f64,
    /// Lane rounds after which a residual has decayed towards the prior by the factor e.
    pub memory: f64,
}

impl Default for ResidualRules {
    fn default() -> Self {
        Self { deviation: 0.2, neighbour: 0.8, lane_round_noise: 0.04, memory: 2_048.0 }
    }
}

/// The filter of one lane.
#[derive(Debug, Clone)]
pub(super) struct ResidualFilter {
    rules: ResidualRules,
    /// By k.
    mean: Vec<f64>,
    /// By pairs of k.
    covariance: Vec<Vec<f64>>,
    /// The covariance without measurements.
    prior: Vec<Vec<f64>>,
}

impl ResidualFilter {
    /// Creates the filter for k in 0..=max_k from the prior: every price is approximately right.
    pub(super) fn new(max_k: u32, rules: ResidualRules) -> Self {
        let variance = rules.deviation * rules.deviation;
        let shared = |i: u32, j: u32| match (i, j) {
            (0, 0) => variance / 4.0,
            (0, _) | (_, 0) => 0.0,
            _ => variance * rules.neighbour.powi(i.abs_diff(j) as i32),
        };
        let row = |i: u32| (0..=max_k).map(|j| variance + shared(i, j)).collect();
        let prior: Vec<Vec<f64>> = (0..=max_k).map(row).collect();
        Self { rules, mean: vec![0.0; prior.len()], covariance: prior.clone(), prior }
    }

    /// Ages the estimate by one lane round.
    pub(super) fn age(&mut self) {
        let keep = (-1.0 / self.rules.memory).exp();
        self.mean.iter_mut().for_each(|mean| *mean *= keep);
        for (row, prior) in self.covariance.iter_mut().zip(&self.prior) {
            for (at, prior) in row.iter_mut().zip(prior) {
                *at = keep * keep * *at + (1.0 - keep * keep) * prior;
            }
        }
    }

    /// Records that rounds at `k` exceeded their price by the share `excess`; `part` is the share of the
    /// lane's sequences measured.
    pub(super) fn observe(&mut self, k: u32, excess: f64, part: f64) {
        let k = k as usize;
        if k >= self.mean.len() || !excess.is_finite() || part <= 0.0 {
            return;
        }
        let noise = self.rules.lane_round_noise.powi(2) / part.min(1.0);
        let column: Vec<f64> = self.covariance[k].clone();
        let spread = column[k] + noise;
        // A stall tells little about other rounds. If round times really changed by more, the next
        // measurements show it again.
        let surprise = (excess - self.mean[k]).clamp(-3.0 * spread.sqrt(), 3.0 * spread.sqrt());
        for (i, gain) in column.iter().map(|shared| shared / spread).enumerate() {
            self.mean[i] += gain * surprise;
            for (j, shared) in column.iter().enumerate() {
                self.covariance[i][j] -= gain * shared;
            }
        }
    }

    /// Ratio of round times at `k` to their price.
    pub(super) fn factor(&self, k: u32) -> f64 {
        (1.0 + self.mean[k as usize]).max(MIN_FACTOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_common_moves_all_and_what_is_its_own_moves_neighbours() {
        let mut filter = ResidualFilter::new(10, ResidualRules::default());
        for _ in 0..50 {
            filter.age();
            filter.observe(4, 0.5, 1.0);
        }
        let excess = |k| filter.factor(k) - 1.0;
        assert!((excess(4) - 0.5).abs() < 0.03, "{}", excess(4));
        assert!(
            excess(0) > 0.2 && excess(10) > excess(0),
            "half of the excess is common to all k: {} {}",
            excess(0),
            excess(10)
        );
        assert!(excess(5) > 0.4 && excess(5) > excess(10), "{} {}", excess(5), excess(10));
        // Then rounds are as fast as priced again, at every k.
        for _ in 0..50 {
            filter.age();
            filter.observe(4, 0.0, 1.0);
        }
        assert!((0..=10).all(|k| (filter.factor(k) - 1.0).abs() < 0.08));
    }

    #[test]
    fn what_was_measured_is_forgotten_in_time() {
        let mut filter = ResidualFilter::new(4, ResidualRules::default());
        for _ in 0..20 {
            filter.age();
            filter.observe(2, 0.5, 1.0);
        }
        assert!(filter.factor(2) > 1.4);
        (0..20_000).for_each(|_| filter.age());
        assert!(filter.factor(2) < 1.01);
        // The uncertainty is as before: one lane round changes the mean as far as the first one did.
        let mut fresh = ResidualFilter::new(4, ResidualRules::default());
        for filter in [&mut filter, &mut fresh] {
            filter.observe(2, 0.5, 1.0);
        }
        assert!((filter.factor(2) / fresh.factor(2) - 1.0).abs() < 0.02);
    }
}
