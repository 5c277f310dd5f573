//! Forward times from a worker's profile. Tables have steps (stairs) and knees and are only forced to be
//! monotone. They are interpolated between points, and continue with the last slope after the last one. The
//! cost of KV is separate ([`super::kv_cost`]): some workers read a sequence's KV once for all of its rows
//! (GPUs), some once per row (CPUs). How the profiled times grow with context shows which. One sequence does
//! not keep a GPU busy, so GPUs also profile batches of several, which refine the cost of KV and nothing
//! else.

use super::kv_cost::{KvCost, KvSample};

/// One profiled forward: a number of rows, all of one sequence with this number of KV tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct StepTimePoint {
    /// Number of rows in the forward.
    pub rows: u32,
    /// Number of KV tokens of the sequence.
    #[serde(rename = "kv_tokens")]
    pub context: u64,
    /// Measured time.
    pub micros: u64,
}

/// One profiled forward of several sequences, which have equal numbers of rows and of KV tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchTimePoint {
    /// Number of sequences.
    pub sequences: u32,
    /// Number of rows in the forward, over all sequences.
    pub rows: u32,
    /// Number of KV tokens of each sequence.
    pub context: u64,
    /// Measured time.
    pub micros: u64,
}

impl BatchTimePoint {
    /// Whether such a forward exists: each of its sequences has a row.
    pub(crate) fn is_possible(&self) -> bool {
        self.sequences > 0 && self.rows >= self.sequences
    }

    /// The forward that was measured.
    pub fn forward(&self) -> ForwardShape {
        let Self { sequences, rows, context, .. } = *self;
        ForwardShape { rows: rows.into(), sequences: sequences.into(), context: context as f64 }
    }
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
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepTimes {
    /// Times at the shortest profiled context; absent without a profile.
    curve: Option<Curve>,
    kv: KvCost,
}

#[derive(Debug, Clone, PartialEq)]
struct Curve {
    context: f64,
    /// (rows, micros), both ascending; never empty.
    points: Vec<(f64, f64)>,
}

/// Row counts at which workers profile themselves; a worker leaves out those that take too long. Each of the
/// first eight, because kernels of CPUs have tiles of four or six rows: one row more may take half as long
/// again, and with few sequences that decides the size of a draft.
pub const PROFILED_ROWS: [u32; 17] = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128, 192, 256, 384, 512];

/// Assumed times of a target without a profile: flat at first, then proportional to the rows. Only the shape
/// matters, because measured times correct it.
const ASSUMED: [(u32, u64); 3] = [(1, 10_000), (16, 12_000), (64, 30_000)];

impl StepTimes {
    /// Builds step times from measured points, in any order; points with the same context form one curve.
    /// Without points, steps are nearly free.
    pub fn new(points: &[StepTimePoint]) -> Self {
        Self::with_batches(points, &[])
    }

    /// The same, with measured batches of several sequences. A batch with more rows than any point, or with a
    /// context that is not longer than the shortest, is ignored: its KV is not told apart from its rows.
    pub fn with_batches(points: &[StepTimePoint], batches: &[BatchTimePoint]) -> Self {
        let curves = Curve::of_each_context(points);
        let (Some(short), Some(long)) = (curves.first(), curves.last()) else { return Self::default() };
        let of_one = long
            .points
            .iter()
            .filter(|(rows, _)| short.points.iter().any(|point| point.0 == *rows))
            .map(|&(rows, micros)| {
                let forward = ForwardShape { rows, sequences: 1.0, context: long.context };
                short.sample(forward, micros)
            })
            .filter(KvSample::has_longer_context);
        let of_batches = batches
            .iter()
            .filter(|batch| batch.is_possible())
            .map(|batch| short.sample(batch.forward(), batch.micros as f64))
            .filter(|sample| sample.has_longer_context() && sample.forward.rows <= short.max_rows());
        let mut samples: Vec<KvSample> = of_one.collect();
        let num_of_one = samples.len();
        samples.extend(of_batches);
        let kv = if samples.len() == num_of_one {
            KvCost::of_one_sequence(&samples)
        } else {
            KvCost::of_batches(&samples)
        };
        Self { curve: curves.into_iter().next(), kv }
    }

    /// Step times that do not depend on KV, from (rows, microseconds).
    pub(crate) fn of_rows(points: &[(u32, u64)]) -> Self {
        let point = |&(rows, micros): &(u32, u64)| StepTimePoint { rows, context: 0, micros };
        Self::new(&points.iter().map(point).collect::<Vec<_>>())
    }

    /// Assumed step times of a target without a profile.
    pub fn assumed() -> Self {
        Self::of_rows(&ASSUMED)
    }

    /// Largest number of rows that was profiled.
    pub(super) fn max_rows(&self) -> f64 {
        self.curve.as_ref().map_or(0.0, Curve::max_rows)
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

impl Curve {
    /// One curve per context length, the shortest first; times never fall with rows.
    fn of_each_context(points: &[StepTimePoint]) -> Vec<Self> {
        let mut sorted = points.to_vec();
        sorted.sort_by_key(|point| (point.context, point.rows));
        let mut curves: Vec<Self> = Vec::new();
        for point in sorted {
            let (rows, micros) = (f64::from(point.rows), point.micros as f64);
            match curves.last_mut() {
                Some(curve) if curve.context == point.context as f64 => {
                    let floor = curve.points.last().map_or(0.0, |last| last.1);
                    curve.points.push((rows, micros.max(floor)));
                }
                _ => curves.push(Self { context: point.context as f64, points: vec![(rows, micros)] }),
            }
        }
        curves
    }

    /// Compares a measured forward with this curve.
    fn sample(&self, forward: ForwardShape, micros: f64) -> KvSample {
        let added_micros = micros - self.micros(forward.rows);
        KvSample { forward, short_context: self.context, micros, added_micros }
    }

    fn max_rows(&self) -> f64 {
        self.points[self.points.len() - 1].0
    }

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
    use crate::profile::{PROFILED_BATCH_ROWS, PROFILED_BATCHES};

    fn point(rows: u32, context: u64, micros: u64) -> StepTimePoint {
        StepTimePoint { rows, context, micros }
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

    fn batch(sequences: u32, rows: u32, context: u64, micros: u64) -> BatchTimePoint {
        BatchTimePoint { sequences, rows, context, micros }
    }

    #[test]
    fn batches_tell_what_kv_costs_where_one_sequence_does_not_keep_the_device_busy() {
        // 0.2 us per KV token of one sequence, 0.055 us of 32.
        let machine = |sequences: f64, rows: f64, context: f64| {
            1_000.0 + 10.0 * rows + (0.05 + 0.15 / sequences) * sequences * context
        };
        let measured = |sequences: u32, rows: u32, context: u32| {
            machine(f64::from(sequences), f64::from(rows), f64::from(context)) as u64
        };
        let points: Vec<StepTimePoint> = [16, 2_048]
            .into_iter()
            .flat_map(|kv| PROFILED_ROWS.map(|rows| point(rows, kv.into(), measured(1, rows, kv))))
            .collect();
        let of_each = |(sequences, kv): (u32, u32)| {
            PROFILED_BATCH_ROWS.map(|each| {
                let rows = sequences * each;
                batch(sequences, rows, kv.into(), measured(sequences, rows, kv))
            })
        };
        let batches: Vec<BatchTimePoint> = PROFILED_BATCHES.into_iter().flat_map(of_each).collect();
        let (without, with) = (StepTimes::new(&points), StepTimes::with_batches(&points, &batches));
        for (sequences, rows, context) in
            [(16.0, 48.0, 4_000.0), (32.0, 32.0, 6_000.0), (24.0, 96.0, 3_000.0), (8.0, 40.0, 2_048.0)]
        {
            let took = machine(sequences, rows, context);
            let error = |times: &StepTimes| {
                (times.micros(ForwardShape { rows, sequences, context }) / took - 1.0).abs()
            };
            let (without, with) = (error(&without), error(&with));
            assert!(without > 0.5 && with < 0.1, "{sequences} x {context}: {without} without, {with} with");
        }
        assert_eq!(with.curve, without.curve);
    }

    #[test]
    fn batches_that_tell_nothing_about_kv_change_nothing() {
        let points = [16, 256].map(|kv| [1, 8, 64].map(|rows| point(rows, kv, 1_000 + u64::from(rows) * kv)));
        let points = points.as_flattened();
        let useless = [
            batch(0, 8, 2_048, 9_000),
            batch(8, 0, 2_048, 9_000),
            batch(8, 7, 2_048, 9_000),
            batch(8, 65, 2_048, 9_000),
            batch(8, 40, 16, 9_000),
        ];
        assert_eq!(StepTimes::with_batches(points, &useless), StepTimes::new(points));
        assert_eq!(StepTimes::with_batches(&[], &[batch(8, 40, 2_048, 9_000)]), StepTimes::new(&[]));
        assert_ne!(StepTimes::with_batches(points, &[batch(8, 40, 2_048, 9_000)]), StepTimes::new(points));
    }

    proptest! {
        #[test]
        fn times_with_batches_never_fall_with_rows_sequences_or_context(
            points in proptest::collection::vec((1u32..600, 0u64..4, 1u64..100_000), 1..20),
            batches in proptest::collection::vec((1u32..40, 1u32..6, 0u64..10, 1u64..100_000), 1..10),
            (rows, sequences, context) in (1.0..700.0f64, 1.0..40.0f64, 0.0..4_000.0f64),
            (more_rows, more_sequences, more_context) in (0.0..700.0f64, 0.0..40.0f64, 0.0..4_000.0f64)
        ) {
            let points: Vec<_> =
                points.into_iter().map(|(rows, kv, micros)| point(rows, kv * 500, micros)).collect();
            let batches: Vec<_> = batches
                .into_iter()
                .map(|(sequences, each, kv, micros)| batch(sequences, sequences * each, kv * 500, micros))
                .collect();
            let times = StepTimes::with_batches(&points, &batches);
            let shortest = points.iter().map(|point| point.context as f64).fold(f64::INFINITY, f64::min);
            let forward = ForwardShape { rows, sequences, context: shortest + context };
            let at = times.micros(forward);
            prop_assert!(at > 0.0);
            for larger in [
                ForwardShape { rows: rows + more_rows, ..forward },
                ForwardShape { sequences: sequences + more_sequences, ..forward },
                ForwardShape { context: forward.context + more_context, ..forward },
            ] {
                prop_assert!(times.micros(larger) + 1e-6 >= at, "{larger:?}");
            }
        }

        #[test]
        fn times_never_fall_with_rows_or_context(
            points in proptest::collection::vec((1u32..600, 0u64..4, 1u64..100_000), 1..20),
            (rows, more_rows, context, more_context) in (0.0..700.0, 0.0..700.0, 0.0..4_000.0, 0.0..4_000.0)
        ) {
            let points: Vec<_> = points.into_iter().map(|(rows, kv, micros)| point(rows, kv * 500, micros)).collect();
            let times = StepTimes::new(&points);
            let longest = points.iter().map(|point| point.context as f64).fold(0.0, f64::max);
            let context = f64::min(context, longest);
            let at = times.micros(ForwardShape::plain(rows, context));
            prop_assert!(at > 0.0 && times.micros(ForwardShape::plain(rows + more_rows, context)) + 1e-6 >= at);
            prop_assert!(times.micros(ForwardShape::plain(rows, context + more_context)) >= 0.0);
        }
    }
}
