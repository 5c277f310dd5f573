//! What a step costs: the step times that a worker profiled at its start, corrected by what its steps took since, and the wire to it.
//! Second link of the choice of k ([`crate::acceptance_by_position`], cost, [`crate::draft_length`]). It reads no clock: durations come in.
//!
//! A table says what a forward of so many rows takes. Tables have stairs and knees, and are only forced to be monotone; between points
//! they are interpolated, past the last one the slope goes on. KV is paid for beside it: some workers read a sequence's KV once for all of its
//! rows (GPUs), some once a row (CPUs), and how a profile grows with its context tells which.

use std::time::Duration;

use crate::drafted_ahead::DraftedAhead;
use crate::prompt_time::PromptTime;

/// One profiled forward: so many rows, all of one sequence that holds so many KV tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct StepTimePoint {
    /// Rows in the forward.
    pub rows: u32,
    /// KV tokens that the sequence held.
    pub kv_tokens: u64,
    /// How long it took.
    pub micros: u64,
}

/// What a forward is to the cost of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forward {
    /// Its rows.
    pub rows: f64,
    /// Sequences that bring them.
    pub sequences: f64,
    /// KV tokens that each of these holds.
    pub context: f64,
}

impl Forward {
    /// One row each.
    pub fn plain(sequences: f64, context: f64) -> Self {
        Self { rows: sequences, sequences, context }
    }

    /// A forward that ran: its KV tokens, each sequence counted once, divide among its sequences.
    pub fn measured(rows: u32, sequences: u32, kv_tokens: u64) -> Self {
        let context = kv_tokens as f64 / f64::from(sequences.max(1));
        Self { rows: rows.into(), sequences: sequences.into(), context }
    }
}

/// Step times by rows and KV.
#[derive(Debug, Clone, Default)]
pub struct StepTimes {
    /// At the shortest profiled context; nothing where there is no profile.
    curve: Option<Curve>,
    /// Microseconds for each KV token of a sequence, whatever its rows, and for each one that a row attends to.
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

/// Rows at which workers profile themselves; a worker for which the larger ones take too long leaves them out.
pub const PROFILED_ROWS: [u32; 12] = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512];

/// A target that did not profile itself: flat at first, then as steep as its rows. Only the shape matters, for what
/// steps take corrects it.
const ASSUMED: [(u32, u64); 3] = [(1, 10_000), (16, 12_000), (64, 30_000)];

impl StepTimes {
    /// From measured points, in any order; those of one `kv_tokens` are one curve. No points: steps are nearly free.
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

    /// For a target that did not profile itself.
    pub fn assumed() -> Self {
        Self::new(&ASSUMED.map(|(rows, micros)| StepTimePoint { rows, kv_tokens: 0, micros }))
    }

    /// The most rows that were profiled.
    fn max_rows(&self) -> f64 {
        self.curve.as_ref().map_or(0.0, |curve| curve.points[curve.points.len() - 1].0)
    }

    /// The least rows of a forward that computes at `share` of the rows a second of the largest that was profiled.
    pub fn rows_of_speed(&self, share: f64) -> u32 {
        let Some(curve) = &self.curve else { return 1 };
        let speed = |rows: f64| rows / curve.micros(rows);
        let wanted = share * speed(self.max_rows());
        (1..self.max_rows() as u32)
            .find(|rows| speed(f64::from(*rows)) >= wanted)
            .unwrap_or(self.max_rows() as u32)
    }

    /// Microseconds of a forward.
    pub fn micros(&self, forward: Forward) -> f64 {
        let Some(curve) = &self.curve else { return 0.0 };
        let micros = curve.micros(forward.rows);
        // Never less than half of what was seen: the KV part is a fit.
        (micros + self.kv_micros(forward)).max(micros / 2.0)
    }

    /// Microseconds a row where the table ends.
    fn last_slope(&self) -> f64 {
        self.curve
            .as_ref()
            .map_or(0.0, |curve| curve.micros(self.max_rows() + 1.0) - curve.micros(self.max_rows()))
    }

    /// What of it is KV, beyond that of the profiled forward of as many rows.
    fn kv_micros(&self, forward: Forward) -> f64 {
        let Some(curve) = &self.curve else { return 0.0 };
        let Forward { rows, sequences, context } = forward;
        let profiled = curve.context * (self.kv.per_sequence + self.kv.per_row * rows);
        context * (self.kv.per_sequence * sequences + self.kv.per_row * rows) - profiled
    }
}

impl KvCost {
    /// The line `per_sequence + rows * per_row` through what a KV token more cost at each number of rows, by least squares.
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
            // One step of a stair says little: the slope over the last two segments goes on.
            None => between(points[points.len().saturating_sub(3)], last, rows).max(last.1),
        }
    }
}

/// The line through two points, at `x`.
fn between(a: (f64, f64), b: (f64, f64), x: f64) -> f64 {
    if b.0 <= a.0 { b.1 } else { b.1 + (b.1 - a.1) * (x - b.0) / (b.0 - a.0) }
}

/// By what factor measurements differ from predictions, by class of rows. What was measured in one class counts in its neighbours too,
/// the less the further off.
#[derive(Debug, Clone)]
struct Residuals {
    entries: [Residual; ROWS_CLASSES],
    /// Weight of a measurement, by its distance in classes.
    reach: [f64; ROWS_CLASSES],
}

#[derive(Debug, Clone, Copy, Default)]
struct Residual {
    log: f64,
    weight: f64,
}

/// Measurements that a residual remembers.
const RESIDUAL_MEMORY: f64 = 48.0;

/// Measurements that a profiled table is worth: it was measured on this very worker, but at another time.
const TABLE_TRUST: f64 = 0.5;

/// One measurement moves what is believed as if it were no further off than this: a stall, or a prompt in the same forward,
/// says little of other rounds. Where steps really changed by more, the next ones say so again.
const MAX_LOG_STEP: f64 = 0.7;

impl Residuals {
    /// Nothing measured: every factor is 1.
    fn new() -> Self {
        let reach = std::array::from_fn(|distance| ROWS_REACH.powi(distance as i32));
        Self { entries: [Residual::default(); ROWS_CLASSES], reach }
    }

    /// In `class`, `measured` was seen where `predicted` was expected.
    fn observe(&mut self, class: usize, measured: f64, predicted: f64) {
        let entry = &mut self.entries[class];
        let log = (measured / predicted).ln();
        if !log.is_finite() {
            return;
        }
        entry.weight = (entry.weight + 1.0).min(RESIDUAL_MEMORY);
        entry.log += (log - entry.log).clamp(-MAX_LOG_STEP, MAX_LOG_STEP) * (1.0 / entry.weight);
    }

    /// The factor in `class`.
    fn factor(&self, class: usize) -> f64 {
        let (mut sum, mut weights) = (0.0, TABLE_TRUST);
        for (i, entry) in self.entries.iter().enumerate() {
            let weight = entry.weight * self.reach[i.abs_diff(class)];
            sum += weight * entry.log;
            weights += weight;
        }
        (sum / weights).exp()
    }
}

/// What was measured at twice the rows is worth this much: a machine that is slow is slow at any number of rows.
const ROWS_REACH: f64 = 0.7;

/// Powers of two that rows are told apart by.
const ROWS_CLASSES: usize = 14;

/// The wire before anything was sent.
const FIRST_WIRE_MICROS: f64 = 300.0;

/// The median of so many first replies is the wire: the first of them already says more than a guess, and one that met a prompt says nothing.
const WIRE_FIRST_REPLIES: usize = 5;

/// Replies that the estimate of the wire remembers later.
const WIRE_MEMORY: f64 = 512.0;

/// Classes of rows per doubling by which forwards larger than any profiled one are remembered.
const SEEN_CLASSES_PER_DOUBLING: f64 = 4.0;
const SEEN_CLASSES: usize = 60;

/// By this factor more rows than were profiled a forward says how steep the table goes on.
const FAR_BEYOND: f64 = 1.4;

/// Forwards that each of these classes remembers.
const SEEN_MEMORY: f64 = 16.0;

/// What one worker costs.
#[derive(Debug, Clone)]
pub struct WorkerCost {
    times: StepTimes,
    residuals: Residuals,
    /// Forwards of more rows than were profiled, by class: there the table ends, and a factor would only bend a guess.
    seen: Vec<Seen>,
    wire_micros: f64,
    wire_replies: f64,
    first_wires: [f64; WIRE_FIRST_REPLIES],
    /// What prompts add to its forwards.
    pub prompts: PromptTime,
    /// At draft workers: which of a proposal's guesses are not waited for.
    pub drafted_ahead: DraftedAhead,
}

#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    rows: f64,
    /// Without its KV.
    micros: f64,
    weight: f64,
}

impl WorkerCost {
    /// A worker of which only its table is known.
    pub fn new(times: StepTimes) -> Self {
        Self {
            times,
            residuals: Residuals::new(),
            seen: vec![Seen::default(); SEEN_CLASSES],
            wire_micros: FIRST_WIRE_MICROS,
            wire_replies: 0.0,
            first_wires: [0.0; WIRE_FIRST_REPLIES],
            prompts: PromptTime::default(),
            drafted_ahead: DraftedAhead::default(),
        }
    }

    /// A forward of `rows` of as many sequences, each over `context` tokens, took this long.
    pub fn observe_step(&mut self, rows: u32, context: f64, took: Duration) {
        self.observe_forward(Forward::plain(f64::from(rows), context), took);
    }

    /// A forward took this long.
    pub fn observe_forward(&mut self, forward: Forward, took: Duration) {
        let (rows, took) = (forward.rows, micros(took));
        let predicted = self.times.micros(forward);
        if rows < 1.0 || predicted <= 0.0 {
            return;
        }
        if rows <= self.times.max_rows() {
            return self.residuals.observe(rows_class(rows), took, predicted);
        }
        let seen = &mut self.seen
            [((rows.log2() * SEEN_CLASSES_PER_DOUBLING).round() as usize).min(SEEN_CLASSES - 1)];
        seen.weight = (seen.weight + 1.0).min(SEEN_MEMORY);
        seen.rows += (rows - seen.rows) / seen.weight;
        seen.micros += (took - self.times.kv_micros(forward) - seen.micros) / seen.weight;
    }

    /// A reply was `waited` for, and the worker was busy with it, its queue included, for `worked`: the rest was the wire.
    pub fn observe_wire(&mut self, waited: Duration, worked: Duration) {
        let wire = micros(waited) - micros(worked);
        let before = self.wire_replies as usize;
        self.wire_replies = (self.wire_replies + 1.0).min(WIRE_MEMORY);
        if before < WIRE_FIRST_REPLIES {
            self.first_wires[before] = wire;
            let mut sorted = self.first_wires[..=before].to_vec();
            sorted.sort_by(f64::total_cmp);
            self.wire_micros = sorted[before / 2].max(0.0);
            return;
        }
        // A frame tells the mean queue of its replies, so that one says too much and another too little, which may be less than nothing: both
        // count, and neither for more than the wire itself. A worker that was busy with a prompt is not a longer wire.
        let reach = self.wire_micros + FIRST_WIRE_MICROS;
        let error = (wire - self.wire_micros).clamp(-reach, reach);
        self.wire_micros = (self.wire_micros + error / self.wire_replies).max(0.0);
    }

    /// Microseconds of a forward of `rows` of as many sequences, each over `context` tokens, as this worker is now.
    pub fn step_micros(&self, rows: f64, context: f64) -> f64 {
        self.forward_micros(Forward::plain(rows, context))
    }

    /// Microseconds of a forward, as this worker is now.
    pub fn forward_micros(&self, forward: Forward) -> f64 {
        let (rows, max_rows) = (forward.rows, self.times.max_rows());
        if rows <= max_rows || self.seen.iter().all(|seen| seen.weight == 0.0) {
            return self.times.micros(forward) * self.residuals.factor(rows_class(rows.min(max_rows)));
        }
        // Through the end of the table and what was seen beyond it; the last slope goes on.
        let last = Forward { rows: max_rows, sequences: forward.sequences * max_rows / rows, ..forward };
        let end_micros = self.times.micros(last) * self.residuals.factor(rows_class(max_rows));
        let end = (max_rows, end_micros - self.times.kv_micros(last));
        let kv = self.times.kv_micros(forward);
        let (mut low, mut high) = (end, end);
        for seen in self.seen.iter().filter(|seen| seen.weight > 0.0) {
            (low, high) = (high, (seen.rows, seen.micros.max(high.1)));
            if seen.rows >= rows {
                break;
            }
        }
        if rows >= high.0 {
            // Forwards of nearly as many rows differ by chance: only one that is well beyond the table says how steep it goes on.
            let slope = if high.0 >= FAR_BEYOND * max_rows {
                (high.1 - end.1) / (high.0 - end.0)
            } else {
                self.times.last_slope()
            };
            return high.1 + slope * (rows - high.0) + kv;
        }
        // In the gap no forward costs less a row than a larger one does. That is the hopeful side, on purpose: what
        // looks too good is tried and seen, what looks too bad never is.
        low.1.max(high.1 * rows / high.0) + kv
    }

    /// Microseconds there and back.
    pub fn wire_micros(&self) -> f64 {
        self.wire_micros
    }
}

fn rows_class(rows: f64) -> usize {
    (rows.max(1.0).log2().round() as usize).min(ROWS_CLASSES - 1)
}

/// Microseconds, with their fraction.
pub fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
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
            let got = times.micros(Forward::plain(rows, 0.0));
            assert!((got - micros).abs() < 1e-9, "{rows}: {got}");
        }
        assert_eq!(StepTimes::new(&[]).micros(Forward::plain(9.0, 9.0)), 0.0);
    }

    #[test]
    fn few_rows_are_as_fast_as_many_where_each_costs_its_own_time() {
        let of = |points: &[StepTimePoint]| StepTimes::new(points).rows_of_speed(0.87);
        assert_eq!(of(&[point(1, 0, 100), point(64, 0, 6_400)]), 1);
        assert_eq!(of(&[point(1, 0, 1_000), point(64, 0, 1_000)]), 56, "87% of 64 rows in the same time");
        assert_eq!(of(&[]), 1);
    }

    #[test]
    fn a_profile_tells_whether_kv_is_read_once_a_sequence_or_once_a_row() {
        // 0.5 us a KV token: of a sequence on the one, of each row on the other. Rows cost 10 us beside.
        let profile = |micros: fn(u32, u64) -> u64| {
            let points = [16, 256].map(|kv| [1, 2, 8, 64].map(|rows| point(rows, kv, micros(rows, kv))));
            StepTimes::new(points.as_flattened())
        };
        let gpu = profile(|rows, kv| 1_000 + 10 * u64::from(rows) + kv / 2);
        let cpu = profile(|rows, kv| 1_000 + 10 * u64::from(rows) + u64::from(rows) * kv / 2);
        // 8 sequences of 400 tokens with 5 rows each.
        let forward = Forward { rows: 40.0, sequences: 8.0, context: 400.0 };
        let (on_gpu, on_cpu) = (gpu.micros(forward), cpu.micros(forward));
        assert!((on_gpu - (1_400.0 + 8.0 * 200.0)).abs() < 5.0, "{on_gpu}");
        assert!((on_cpu - (1_400.0 + 40.0 * 200.0)).abs() < 5.0, "{on_cpu}");
    }

    #[test]
    fn a_slow_machine_is_believed_slow_at_other_rows_too() {
        let mut cost = WorkerCost::new(StepTimes::assumed());
        let before = cost.step_micros(64.0, 0.0);
        for _ in 0..30 {
            cost.observe_step(8, 0.0, Duration::from_micros(22_000));
        }
        assert!((cost.step_micros(8.0, 0.0) - 22_000.0).abs() < 1_500.0, "{}", cost.step_micros(8.0, 0.0));
        assert!(cost.step_micros(64.0, 0.0) > 1.5 * before);
    }

    #[test]
    fn a_wire_is_believed_at_once_and_no_single_reply_for_long() {
        let mut cost = WorkerCost::new(StepTimes::assumed());
        let mut told = |wires_us: &[u64]| {
            for wire_us in wires_us {
                cost.observe_wire(Duration::from_micros(wire_us + 7_000), Duration::from_micros(7_000));
            }
            cost.wire_micros().round()
        };
        assert_eq!(told(&[10_000]), 10_000.0);
        assert_eq!(told(&[250_000, 10_000]), 10_000.0, "the second one met a prompt");
        assert_eq!(told(&[10_100, 10_200]), 10_100.0);
        assert!(told(&[10_100; 50]) < 10_101.0);
        assert!(told(&[250_000]) < 10_500.0);
    }

    #[test]
    fn a_knee_that_no_profile_reached_is_learned_from_what_was_seen() {
        let mut cost = WorkerCost::new(StepTimes::new(&[point(1, 0, 20_000), point(64, 0, 20_000)]));
        assert_eq!(cost.step_micros(512.0, 0.0), 20_000.0);
        cost.observe_step(512, 0.0, Duration::from_micros(40_000));
        assert!((cost.step_micros(512.0, 0.0) - 40_000.0).abs() < 1.0);
        assert!(cost.step_micros(1_024.0, 0.0) > 60_000.0, "the slope goes on");
        cost.observe_step(1_024, 0.0, Duration::from_micros(80_000));
        assert!((cost.step_micros(768.0, 0.0) - 60_000.0).abs() < 1.0);
        assert!((cost.step_micros(256.0, 0.0) - 20_000.0).abs() < 1.0, "the hopeful side of the gap");
        assert_eq!(cost.step_micros(8.0, 0.0), 20_000.0, "the table stands where it was profiled");
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
            let at = times.micros(Forward::plain(rows, context));
            prop_assert!(at > 0.0 && times.micros(Forward::plain(rows + more_rows, context)) + 1e-6 >= at);
            prop_assert!(times.micros(Forward::plain(rows, context + more_context)) >= 0.0);
        }
    }
}
