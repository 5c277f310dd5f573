//! What a worker's forwards take beyond what its profile says.

use crate::memory::MEMORY;

/// What was measured at twice the rows is worth this much: a machine that is slow is slow at any number of rows.
const ROWS_REACH: f64 = 0.7;

/// Powers of two that rows are told apart by.
pub(super) const ROWS_CLASSES: usize = 14;

/// By what factor measurements differ from predictions, by class of rows. What was measured in one class counts in its neighbours too,
/// the less the further off.
#[derive(Debug, Clone)]
pub(super) struct Residuals {
    entries: [Residual; ROWS_CLASSES],
    /// Weight of a measurement, by its distance in classes.
    reach: [f64; ROWS_CLASSES],
}

#[derive(Debug, Clone, Copy, Default)]
struct Residual {
    log: f64,
    weight: f64,
}

/// One measurement moves what is believed as if it were no further off than this: a stall, or a prompt in the same forward,
/// says little of other rounds. Where steps really changed by more, the next ones say so again.
const MAX_LOG_STEP: f64 = 0.7;

impl Residuals {
    /// Nothing measured: every factor is 1.
    pub(super) fn new() -> Self {
        let reach = std::array::from_fn(|distance| ROWS_REACH.powi(distance as i32));
        Self { entries: [Residual::default(); ROWS_CLASSES], reach }
    }

    /// At so many rows `measured` was seen where `predicted` was expected.
    pub(super) fn observe(&mut self, rows: f64, measured: f64, predicted: f64) {
        let entry = &mut self.entries[rows_class(rows)];
        let log = (measured / predicted).ln();
        if !log.is_finite() {
            return;
        }
        entry.weight = (entry.weight + 1.0).min(MEMORY);
        entry.log += (log - entry.log).clamp(-MAX_LOG_STEP, MAX_LOG_STEP) * (1.0 / entry.weight);
    }

    /// The factor at so many rows.
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

/// The class of so many rows.
pub(super) fn rows_class(rows: f64) -> usize {
    (rows.max(1.0).log2().round() as usize).min(ROWS_CLASSES - 1)
}
