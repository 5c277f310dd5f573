//! Corrections of a worker's profiled forward times by measured ones.

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
}

#[derive(Debug, Clone, Copy, Default)]
struct Residual {
    log: f64,
    weight: f64,
}

/// Maximum deviation of one measurement, as the logarithm of the ratio: a stall, or a prompt in the same
/// forward, tells little about other rounds. If step times really changed by more, the next measurements show
/// it again.
const MAX_LOG_STEP: f64 = 0.7;

impl Residuals {
    /// Creates corrections without measurements: every factor is 1.
    pub(super) fn new() -> Self {
        let reach = std::array::from_fn(|distance| ROWS_REACH.powi(distance as i32));
        Self { entries: [Residual::default(); ROWS_CLASSES], reach }
    }

    /// Records a measured and a predicted time for this number of rows.
    pub(super) fn observe(&mut self, rows: f64, measured: f64, predicted: f64) {
        let entry = &mut self.entries[rows_class(rows)];
        let log = (measured / predicted).ln();
        if !log.is_finite() {
            return;
        }
        entry.weight = (entry.weight + 1.0).min(EWMA_WINDOW);
        entry.log += (log - entry.log).clamp(-MAX_LOG_STEP, MAX_LOG_STEP) * (1.0 / entry.weight);
    }

    /// Correction factor at this number of rows.
    pub(super) fn factor(&self, rows: f64) -> f64 {
        let class = rows_class(rows);
        let (mut sum, mut weights) = (0.0, 0.0);
        for (i, entry) in self.entries.iter().enumerate() {
            let weight = entry.weight * self.reach[i.abs_diff(class)];
            sum += weight * entry.log;
            weights += weight;
        }
        if weights > 0.0 { (sum / weights).exp() } else { 1.0 }
    }
}

/// Class of this number of rows.
pub(super) fn rows_class(rows: f64) -> usize {
    (rows.max(1.0).log2().round() as usize).min(ROWS_CLASSES - 1)
}
