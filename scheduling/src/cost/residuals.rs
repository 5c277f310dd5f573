//! Corrections of a worker's profiled forward times by measured ones.

use std::f64::consts::LN_2;

use crate::smoothing::EWMA_WINDOW;

/// Weight of a measurement at twice the rows: a machine that is slow is slow at any number of rows.
const ROWS_REACH: f64 = 0.7;

/// Number of row classes (powers of two).
pub(super) const ROWS_CLASSES: usize = 14;

/// Ratios of measured to predicted times, by class of rows. A measurement in one class also counts in other
/// classes, with less weight at a larger distance.
#[derive(Debug, Clone)]
pub(super) struct Residuals {
    entries: [Residual; ROWS_CLASSES],
    /// Weight of a measurement, by distance in classes.
    reach: [f64; ROWS_CLASSES],
    /// Correction factors, by class. A price reads dozens of them, so they are computed once per measurement.
    factors: [f64; ROWS_CLASSES],
}

#[derive(Debug, Clone, Copy, Default)]
struct Residual {
    log: f64,
    weight: f64,
}

impl Residuals {
    /// Creates corrections without measurements: every factor is 1.
    pub(super) fn new() -> Self {
        let reach = std::array::from_fn(|distance| ROWS_REACH.powi(distance as i32));
        Self { entries: [Residual::default(); ROWS_CLASSES], reach, factors: [1.0; ROWS_CLASSES] }
    }

    /// Records a measured and a predicted time for this number of rows.
    pub(super) fn observe(&mut self, rows: f64, measured: f64, predicted: f64) {
        let entry = &mut self.entries[rows_class(rows)];
        let log = (measured / predicted).ln();
        if !log.is_finite() {
            return;
        }
        entry.weight = (entry.weight + 1.0).min(EWMA_WINDOW);
        // A measurement deviates by no more than a factor of two: a stall, or a prompt in the same forward, tells
        // little about other rounds. If step times really changed by more, the next measurements show it again.
        entry.log += (log - entry.log).clamp(-LN_2, LN_2) * (1.0 / entry.weight);
        self.factors = std::array::from_fn(|class| self.mean_log(class).exp());
    }

    /// Mean logarithm of the ratio, as seen from a class; at least one class has a measurement.
    fn mean_log(&self, class: usize) -> f64 {
        let (mut sum, mut weights) = (0.0, 0.0);
        for (i, entry) in self.entries.iter().enumerate() {
            let weight = entry.weight * self.reach[i.abs_diff(class)];
            sum += weight * entry.log;
            weights += weight;
        }
        sum / weights
    }

    /// Correction factor at this number of rows.
    pub(super) fn factor(&self, rows: f64) -> f64 {
        self.factors[rows_class(rows)]
    }
}

/// Class of this number of rows: its logarithm to base 2, rounded.
pub(super) fn rows_class(rows: f64) -> usize {
    // The integer part of sqrt(2) * rows is at least 1, and has the rounded logarithm of `rows`.
    let scaled = (rows.max(1.0) * std::f64::consts::SQRT_2) as u32;
    (scaled.ilog2() as usize).min(ROWS_CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_the_rounded_logarithm() {
        for rows in 1..100_000 {
            for rows in [f64::from(rows), f64::from(rows) + 0.37] {
                assert_eq!(rows_class(rows), (rows.log2().round() as usize).min(ROWS_CLASSES - 1), "{rows}");
            }
        }
        assert_eq!((rows_class(0.0), rows_class(f64::INFINITY)), (0, ROWS_CLASSES - 1));
    }

    #[test]
    fn nearer_measurements_weigh_more() {
        let mut residuals = Residuals::new();
        assert_eq!(residuals.factor(8.0), 1.0, "nothing was measured");
        residuals.observe(8.0, 120.0, 100.0);
        assert!([1.0, 8.0, 512.0].iter().all(|rows| (residuals.factor(*rows) - 1.2).abs() < 1e-9));
        residuals.observe(128.0, 100.0, 100.0);
        let factors = [8.0, 32.0, 128.0].map(|rows| residuals.factor(rows));
        assert!(1.2 > factors[0] && factors[0] > factors[1] && factors[1] > factors[2] && factors[2] > 1.0);
    }
}
