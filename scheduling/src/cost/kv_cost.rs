//! The cost of a forward's KV: microseconds per KV token of a sequence, regardless of its rows, plus
//! microseconds per KV token that a row attends to. Both are fitted to measured forwards and never negative.

use super::step_times::ForwardShape;

/// Determinant of the normal equations, relative to its largest possible value, below which the samples do
/// not tell the two costs apart.
const MIN_DETERMINANT: f64 = 1e-6;

/// Microseconds per KV token: counted once per sequence, and once per row that attends to it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct KvCost {
    pub(super) per_sequence: f64,
    pub(super) per_row: f64,
}

/// A measured forward, compared with one of as many rows of one sequence with a shorter context.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvSample {
    pub(super) forward: ForwardShape,
    /// Context of the shorter forward; shorter than this one's.
    pub(super) short_context: f64,
    /// Time of this forward, and how much longer it took than the shorter one.
    pub(super) micros: f64,
    pub(super) added_micros: f64,
}

impl KvSample {
    /// Whether the comparison says anything about KV.
    pub(super) fn has_longer_context(&self) -> bool {
        self.forward.context > self.short_context
    }

    /// KV tokens more than in the shorter forward, each sequence counted once.
    fn tokens(&self) -> f64 {
        self.forward.sequences * self.forward.context - self.short_context
    }

    /// The same, counted once per row.
    fn row_tokens(&self) -> f64 {
        self.forward.rows * (self.forward.context - self.short_context)
    }
}

impl KvCost {
    /// Fits the line `per_sequence + rows * per_row` to the measured cost of a KV token at each number of
    /// rows of one sequence, by least squares.
    pub(super) fn of_one_sequence(samples: &[KvSample]) -> Self {
        if samples.is_empty() {
            return Self::default();
        }
        let count = samples.len() as f64;
        let slope = |sample: &KvSample| (sample.forward.rows, sample.added_micros / sample.tokens());
        let slopes = || samples.iter().map(slope);
        let mean_rows = slopes().map(|(rows, _)| rows).sum::<f64>() / count;
        let mean = slopes().map(|(_, slope)| slope).sum::<f64>() / count;
        let spread: f64 = slopes().map(|(rows, _)| (rows - mean_rows).powi(2)).sum();
        let both: f64 = slopes().map(|(rows, slope)| (rows - mean_rows) * (slope - mean)).sum();
        let per_row =
            if spread > 0.0 { (both / spread).clamp(0.0, (mean / mean_rows).max(0.0)) } else { 0.0 };
        Self { per_sequence: (mean - per_row * mean_rows).max(0.0), per_row }
    }

    /// Fits both costs to forwards of one and of several sequences, by least squares of the relative errors
    /// of their times. The forwards whose time is largely KV count most: batches with long contexts.
    pub(super) fn of_batches(samples: &[KvSample]) -> Self {
        // The normal equations, with a = per_sequence and b = per_row: xx a + xy b = xt and xy a + yy b = yt.
        let (mut xx, mut xy, mut yy, mut xt, mut yt) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for sample in samples {
            let [x, y, t] = [sample.tokens(), sample.row_tokens(), sample.added_micros]
                .map(|part| part / sample.micros.max(1.0));
            xx += x * x;
            xy += x * y;
            yy += y * y;
            xt += x * t;
            yt += y * t;
        }
        let determinant = xx * yy - xy * xy;
        if determinant > MIN_DETERMINANT * xx * yy {
            let (per_sequence, per_row) =
                ((xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant);
            if per_sequence >= 0.0 && per_row >= 0.0 {
                return Self { per_sequence, per_row };
            }
        }
        // One of the two alone, whichever explains more of the times.
        let (per_sequence, per_row) = ((xt / xx).max(0.0), (yt / yy).max(0.0));
        if per_sequence * xt >= per_row * yt {
            Self { per_sequence, per_row: 0.0 }
        } else {
            Self { per_sequence: 0.0, per_row }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forward of sequences with `rows` rows and `context` tokens each that costs a microsecond, plus
    /// `costs` beyond a context of 10.
    fn sample((sequences, rows, context): (f64, f64, f64), costs: (f64, f64)) -> KvSample {
        let forward = ForwardShape { rows: sequences * rows, sequences, context };
        let sample = KvSample { forward, short_context: 10.0, micros: 0.0, added_micros: 0.0 };
        let added_micros = costs.0 * sample.tokens() + costs.1 * sample.row_tokens();
        KvSample { micros: 1.0 + added_micros, added_micros, ..sample }
    }

    fn fitted(shapes: &[(f64, f64, f64)], costs: (f64, f64)) -> (f64, f64) {
        let samples: Vec<KvSample> = shapes.iter().map(|shape| sample(*shape, costs)).collect();
        let KvCost { per_sequence, per_row } = KvCost::of_batches(&samples);
        (per_sequence, per_row)
    }

    #[test]
    fn both_costs_of_batches_are_found_and_never_negative() {
        let shapes = [(1.0, 1.0, 1_000.0), (8.0, 1.0, 2_000.0), (8.0, 5.0, 2_000.0), (32.0, 5.0, 8_000.0)];
        for costs in [(0.5, 0.25), (0.5, 0.0), (0.0, 0.25)] {
            let found = fitted(&shapes, costs);
            assert!((found.0 - costs.0).abs() < 1e-6 && (found.1 - costs.1).abs() < 1e-6, "{found:?}");
        }
        // Rows that make a forward shorter, or a context that does, count as free.
        let falling = fitted(&shapes, (0.5, -0.05));
        assert!(falling.0 > 0.0 && falling.1 == 0.0, "{falling:?}");
        assert_eq!(fitted(&shapes[1..2], (-1e-6, -1e-6)), (0.0, 0.0));
    }

    #[test]
    fn batches_that_do_not_tell_the_costs_apart_leave_one() {
        let found = fitted(&[(1.0, 1.0, 1_000.0), (1.0, 1.0, 2_000.0)], (0.5, 0.25));
        assert!((found.0 - 0.75).abs() < 1e-6 && found.1 == 0.0, "{found:?}");
    }
}
