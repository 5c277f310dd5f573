//! Forward times from a worker's profile. Tables have steps (stairs) and knees and are only forced to be
//! monotone. They are interpolated between points, and continue with the last slope after the last one. The
//! cost of KV is separate: some workers read a sequence's KV once for all of its rows (GPUs), some once per
//! row (CPUs). How the profiled times grow with context shows which.

/// One profiled forward: a number of rows, all of one sequence with this number of KV tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct StepTimePoint {
    /// Number of rows in the forward.
    pub rows: u32,
    /// Number of KV tokens of the sequence.
    pub kv_tokens: u64,
    /// Measured time.
    pub micros: u64,
}

/// The properties of a forward that determine its cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForwardShape {
    /// Number of rows.
    pub rows: f64,
    /// Number of sequences.
    pub sequences: f64,
    /// KV tokens per sequence.
    pub context: f64,
}

impl ForwardShape {
    /// A forward with one row per sequence.
    pub fn plain(sequences: f64, context: f64) -> Self {
        Self { rows: sequences, sequences, context }
    }

    /// A forward that ran; its KV tokens, each sequence counted once, are divided among its sequences.
    pub fn measured(rows: u32, sequences: u32, kv_tokens: u64) -> Self {
        let context = kv_tokens as f64 / f64::from(sequences.max(1));
        Self { rows: rows.into(), sequences: sequences.into(), context }
    }
}

/// Step times by rows and KV.
#[derive(Debug, Clone, Default)]
pub struct StepTimes {
    /// Times at the shortest profiled context; absent without a profile.
    curve: Option<Curve>,
    /// Microseconds per KV token of a sequence, regardless of its rows, and per KV token that a row attends
    /// to.
    kv: KvCost,
}

#[derive(Debug, Clone, Copy, Default)]
struct KvCost {
    per_sequence: f64,
    per_row: f64,
}

#[derive(Debug, Clone)]
struct Curve {
    context: f64,
    /// (rows, micros), both ascending; never empty.
    points: Vec<(f64, f64)>,
}

/// Row counts at which workers profile themselves; a worker leaves out those that take too long.
pub const PROFILED_ROWS: [u32; 13] = [1, 2, 4, 8, 12, 16, 32, 64, 128, 192, 256, 384, 512];

/// Assumed times of a target without a profile: flat at first, then proportional to the rows. Only the shape
/// matters, because measured times correct it.
const ASSUMED: [(u32, u64); 3] = [(1, 10_000), (16, 12_000), (64, 30_000)];

impl StepTimes {
    /// Builds step times from measured points, in any order; points with the same `kv_tokens` form one curve.
    /// Without points, steps are nearly free.
    pub fn new(points: &[StepTimePoint]) -> Self {
        let mut sorted = points.to_vec();
        sorted.sort_by_key(|point| (point.kv_tokens, point.rows));
        let mut curves: Vec<Curve> = Vec::new();
        for point in sorted {
            let (rows, micros) = (f64::from(point.rows), point.micros as f64);
            match curves.last_mut() {
                Some(curve) if curve.context == point.kv_tokens as f64 => {
                    let floor = curve.points.last().map_or(0.0, |last| last.1);
                    curve.points.push((rows, micros.max(floor)));
                }
                _ => curves.push(Curve { context: point.kv_tokens as f64, points: vec![(rows, micros)] }),
            }
        }
        let kv = match (curves.first(), curves.last()) {
            (Some(short), Some(long)) => KvCost::between(short, long),
            _ => KvCost::default(),
        };
        Self { curve: curves.into_iter().next(), kv }
    }

    /// Assumed step times of a target without a profile.
    pub fn assumed() -> Self {
        Self::new(&ASSUMED.map(|(rows, micros)| StepTimePoint { rows, kv_tokens: 0, micros }))
    }

    /// Largest number of rows that was profiled.
    pub(super) fn max_rows(&self) -> f64 {
        self.curve.as_ref().map_or(0.0, |curve| curve.points[curve.points.len() - 1].0)
    }

    /// Smallest number of rows at which a forward reaches `share` of the rows per second of the largest
    /// profiled one.
    pub fn rows_at_speed(&self, share: f64) -> u32 {
        let Some(curve) = &self.curve else { return 1 };
        let speed = |rows: f64| rows / curve.micros(rows);
        let wanted = share * speed(self.max_rows());
        (1..self.max_rows() as u32)
            .find(|rows| speed(f64::from(*rows)) >= wanted)
            .unwrap_or(self.max_rows() as u32)
    }

    /// Microseconds of a forward.
    pub fn micros(&self, forward: ForwardShape) -> f64 {
        let Some(curve) = &self.curve else { return 0.0 };
        let micros = curve.micros(forward.rows);
        // At least half of the measured time, because the KV part is a fit.
        (micros + self.kv_us(forward)).max(micros / 2.0)
    }

    /// Microseconds per row at the end of the table.
    pub(super) fn last_slope(&self) -> f64 {
        self.curve
            .as_ref()
            .map_or(0.0, |curve| curve.micros(self.max_rows() + 1.0) - curve.micros(self.max_rows()))
    }

    /// KV time of a forward, minus that in the profiled forward with the same rows.
    pub(super) fn kv_us(&self, forward: ForwardShape) -> f64 {
        let Some(curve) = &self.curve else { return 0.0 };
        let ForwardShape { rows, sequences, context } = forward;
        let profiled = curve.context * (self.kv.per_sequence + self.kv.per_row * rows);
        context * (self.kv.per_sequence * sequences + self.kv.per_row * rows) - profiled
    }
}

impl KvCost {
    /// Fits the line `per_sequence + rows * per_row` to the measured cost of a KV token at each number of
    /// rows, by least squares.
    fn between(short: &Curve, long: &Curve) -> Self {
        let span = long.context - short.context;
        let slopes: Vec<(f64, f64)> = long
            .points
            .iter()
            .filter(|(rows, _)| span > 0.0 && short.points.iter().any(|point| point.0 == *rows))
            .map(|&(rows, micros)| (rows, (micros - short.micros(rows)) / span))
            .collect();
        let count = slopes.len() as f64;
        if slopes.is_empty() {
            return Self::default();
        }
        let (mean_rows, mean) = (
            slopes.iter().map(|slope| slope.0).sum::<f64>() / count,
            slopes.iter().map(|slope| slope.1).sum::<f64>() / count,
        );
        let spread: f64 = slopes.iter().map(|slope| (slope.0 - mean_rows).powi(2)).sum();
        let both: f64 = slopes.iter().map(|slope| (slope.0 - mean_rows) * (slope.1 - mean)).sum();
        let per_row =
            if spread > 0.0 { (both / spread).clamp(0.0, (mean / mean_rows).max(0.0)) } else { 0.0 };
        Self { per_sequence: (mean - per_row * mean_rows).max(0.0), per_row }
    }
}

impl Curve {
    fn micros(&self, rows: f64) -> f64 {
        let points = &self.points;
        let (first, last) = (points[0], points[points.len() - 1]);
        if rows <= first.0 {
            return first.1;
        }
        match points.iter().position(|point| point.0 >= rows) {
            Some(at) => between(points[at - 1], points[at], rows),
            // Use the slope over the last two segments; a single step of the stairs would distort it.
            None => between(points[points.len().saturating_sub(3)], last, rows).max(last.1),
        }
    }
}

/// Value at `x` of the line through two points.
fn between(a: (f64, f64), b: (f64, f64), x: f64) -> f64 {
    if b.0 <= a.0 { b.1 } else { b.1 + (b.1 - a.1) * (x - b.0) / (b.0 - a.0) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn point(rows: u32, kv_tokens: u64, micros: u64) -> StepTimePoint {
        StepTimePoint { rows, kv_tokens, micros }
    }

    #[test]
    fn times_are_interpolated_in_rows_and_go_on_past_the_end() {
        let times = StepTimes::new(&[point(8, 0, 200), point(1, 0, 100), point(16, 0, 300)]);
        for (rows, micros) in [
            (1.0, 100.0),
            (0.5, 100.0),
            (4.5, 150.0),
            (12.0, 250.0),
            (31.0, 500.0), // 300 + 15 rows at (300 - 100) / 15 a row
        ] {
            let got = times.micros(ForwardShape::plain(rows, 0.0));
            assert!((got - micros).abs() < 1e-9, "{rows}: {got}");
        }
        assert_eq!(StepTimes::new(&[]).micros(ForwardShape::plain(9.0, 9.0)), 0.0);
    }

    #[test]
    fn few_rows_are_as_fast_as_many_where_each_costs_its_own_time() {
        let of = |points: &[StepTimePoint]| StepTimes::new(points).rows_at_speed(0.87);
        assert_eq!(of(&[point(1, 0, 100), point(64, 0, 6_400)]), 1);
        assert_eq!(of(&[point(1, 0, 1_000), point(64, 0, 1_000)]), 56, "87% of 64 rows take the same time");
        assert_eq!(of(&[]), 1);
    }

    #[test]
    fn a_profile_tells_whether_kv_is_read_once_a_sequence_or_once_a_row() {
        // 0.5 us per KV token: once per sequence on the GPU, once per row on the CPU. Rows also cost 10 us
        // each.
        let profile = |micros: fn(u32, u64) -> u64| {
            let points = [16, 256].map(|kv| [1, 2, 8, 64].map(|rows| point(rows, kv, micros(rows, kv))));
            StepTimes::new(points.as_flattened())
        };
        let gpu = profile(|rows, kv| 1_000 + 10 * u64::from(rows) + kv / 2);
        let cpu = profile(|rows, kv| 1_000 + 10 * u64::from(rows) + u64::from(rows) * kv / 2);
        // 8 sequences of 400 tokens with 5 rows each.
        let forward = ForwardShape { rows: 40.0, sequences: 8.0, context: 400.0 };
        let (on_gpu, on_cpu) = (gpu.micros(forward), cpu.micros(forward));
        assert!((on_gpu - (1_400.0 + 8.0 * 200.0)).abs() < 5.0, "{on_gpu}");
        assert!((on_cpu - (1_400.0 + 40.0 * 200.0)).abs() < 5.0, "{on_cpu}");
    }

    proptest! {
        #[test]
        fn times_never_fall_with_rows_or_context(
            points in proptest::collection::vec((1u32..600, 0u64..4, 1u64..100_000), 1..20),
            (rows, more_rows, context, more_context) in (0.0..700.0, 0.0..700.0, 0.0..4_000.0, 0.0..4_000.0)
        ) {
            let points: Vec<_> = points.into_iter().map(|(rows, kv, micros)| point(rows, kv * 500, micros)).collect();
            let times = StepTimes::new(&points);
            let longest = points.iter().map(|point| point.kv_tokens as f64).fold(0.0, f64::max);
            let context = f64::min(context, longest);
            let at = times.micros(ForwardShape::plain(rows, context));
            prop_assert!(at > 0.0 && times.micros(ForwardShape::plain(rows + more_rows, context)) + 1e-6 >= at);
            prop_assert!(times.micros(ForwardShape::plain(rows, context + more_context)) >= 0.0);
        }
    }
}
