//! Cost of a step: the step times that a worker profiled at its start, corrected by measured times, and the
//! network time. Second part of the choice of k ([`crate::acceptance_by_position`], cost,
//! [`crate::draft_length`]). Reads no clock: durations are passed in.

mod kv_cost;
mod residuals;
mod step_times;

use std::time::Duration;

use crate::drafted_ahead::DraftedAhead;
use crate::prompt_time::PromptTime;
use crate::smoothing::{EWMA_WINDOW, LONG_EWMA_WINDOW, toward};
use residuals::{ROWS_CLASSES, Residuals, rows_class};
pub use step_times::{BatchTimePoint, ForwardShape, PROFILED_ROWS, StepTimePoint, StepTimes};

/// Maximum of a number of KV blocks, KV tokens or microseconds (71 minutes) that a worker may report; larger
/// numbers are clamped, so that no arithmetic on them overflows.
pub(crate) const MAX_REPORTED: u64 = u32::MAX as u64;

/// Assumed network round trip before any measurement.
const FIRST_WIRE_US: f64 = 300.0;

/// Number of first replies whose median is the network round trip. One measurement is already better than the
/// assumed value, and a reply that waited for a prompt does not distort the median.
const WIRE_FIRST_REPLIES: usize = 5;

/// Cost model of one worker.
#[derive(Debug, Clone)]
pub struct WorkerCost {
    times: StepTimes,
    residuals: Residuals,
    /// Forwards with more rows than were profiled, by class. The table ends there, so a correction factor
    /// would only scale an extrapolation.
    observed: [ObservedForwards; ROWS_CLASSES],
    wire_us: f64,
    wire_replies: f64,
    first_wires: [f64; WIRE_FIRST_REPLIES],
    /// Time that prompts add to its forwards.
    pub prompts: PromptTime,
    /// Tokens drafted ahead, for which rounds do not wait (draft workers).
    pub drafted_ahead: DraftedAhead,
}

#[derive(Debug, Clone, Copy, Default)]
struct ObservedForwards {
    rows: f64,
    /// Without the time for KV.
    micros: f64,
    weight: f64,
}

impl WorkerCost {
    /// Creates the cost of a worker from its table alone.
    pub fn new(times: StepTimes) -> Self {
        Self {
            times,
            residuals: Residuals::new(),
            observed: [ObservedForwards::default(); ROWS_CLASSES],
            wire_us: FIRST_WIRE_US,
            wire_replies: 0.0,
            first_wires: [0.0; WIRE_FIRST_REPLIES],
            prompts: PromptTime::default(),
            drafted_ahead: DraftedAhead::default(),
        }
    }

    /// Records the time of a forward of `rows` sequences with one row each, over `context` tokens each.
    #[cfg(test)]
    pub(crate) fn observe_step(&mut self, rows: u32, context: f64, took: Duration) {
        self.observe_forward(ForwardShape::plain(f64::from(rows), context), took);
    }

    /// Records the time of a forward.
    pub fn observe_forward(&mut self, forward: ForwardShape, took: Duration) {
        let (rows, took) = (forward.rows, micros(took));
        let predicted = self.times.micros(forward);
        if rows < 1.0 || predicted <= 0.0 {
            return;
        }
        if rows <= self.times.max_rows() {
            return self.residuals.observe(rows, took, predicted);
        }
        let observed = &mut self.observed[rows_class(rows)];
        observed.weight = (observed.weight + 1.0).min(EWMA_WINDOW);
        toward(&mut observed.rows, rows, observed.weight);
        toward(&mut observed.micros, took - self.times.kv_us(forward), observed.weight);
    }

    /// Records a reply that took `waited`, of which the worker was busy or had it in its queue for `worked`;
    /// the rest is network time.
    pub fn observe_wire(&mut self, waited: Duration, worked: Duration) {
        let wire = micros(waited) - micros(worked);
        let before = self.wire_replies as usize;
        self.wire_replies = (self.wire_replies + 1.0).min(LONG_EWMA_WINDOW);
        if before < WIRE_FIRST_REPLIES {
            self.first_wires[before] = wire;
            let mut sorted = self.first_wires[..=before].to_vec();
            sorted.sort_by(f64::total_cmp);
            self.wire_us = sorted[before / 2].max(0.0);
            return;
        }
        // A frame reports the mean queue time of its replies, so single values are too high or too low, even
        // negative. All count, but each is limited by the present estimate. A worker that was busy with a
        // prompt must not look like a slower network.
        let reach = self.wire_us + FIRST_WIRE_US;
        let error = (wire - self.wire_us).clamp(-reach, reach);
        self.wire_us = (self.wire_us + error / self.wire_replies).max(0.0);
    }

    /// Predicted microseconds of a forward of `rows` sequences with one row each, over `context` tokens each.
    pub fn step_us(&self, rows: f64, context: f64) -> f64 {
        self.forward_us(ForwardShape::plain(rows, context))
    }

    /// Predicted microseconds that a draft takes longer if its request brings `rows` committed ids, more than
    /// a round with `k` drafted tokens commits.
    pub fn catch_up_us(&self, rows: u32, k: u32, (sequences, context): (u32, f64)) -> f64 {
        let missed = f64::from(rows.saturating_sub(k + 1));
        let step = ForwardShape::plain(f64::from(sequences.max(1)), context);
        let longer = ForwardShape { rows: step.rows + missed, ..step };
        (self.forward_us(longer) - self.forward_us(step)).max(0.0)
    }

    /// Predicted microseconds of a forward.
    pub fn forward_us(&self, forward: ForwardShape) -> f64 {
        let (rows, max_rows) = (forward.rows, self.times.max_rows());
        if rows <= max_rows || self.observed.iter().all(|observed| observed.weight == 0.0) {
            return self.times.micros(forward) * self.residuals.factor(rows.min(max_rows));
        }
        // Interpolate through the end of the table and the observations beyond it, and continue the last
        // slope.
        let last = ForwardShape { rows: max_rows, sequences: forward.sequences * max_rows / rows, ..forward };
        let end_micros = self.times.micros(last) * self.residuals.factor(max_rows);
        let end = (max_rows, end_micros - self.times.kv_us(last));
        let kv = self.times.kv_us(forward);
        let (mut low, mut high) = (end, end);
        for observed in self.observed.iter().filter(|observed| observed.weight > 0.0) {
            (low, high) = (high, (observed.rows, observed.micros.max(high.1)));
            if observed.rows >= rows {
                break;
            }
        }
        if rows >= high.0 {
            // Forwards with nearly the same rows differ by chance, so the slope needs an observation of a
            // class beyond the table.
            let slope = if rows_class(high.0) > rows_class(max_rows) {
                (high.1 - end.1) / (high.0 - end.0)
            } else {
                self.times.last_slope()
            };
            return high.1 + slope * (rows - high.0) + kv;
        }
        // Between observations assume the cost per row of the next larger forward. Optimistic on purpose: an
        // optimistic estimate gets tested, a pessimistic one never does.
        low.1.max(high.1 * rows / high.0) + kv
    }

    /// Predicted microseconds by which `larger` takes longer than `forward`, which it extends. Both get the
    /// same correction: corrections of different numbers of rows differ by noise, which must not count as a
    /// difference between the two.
    pub fn added_us(&self, forward: ForwardShape, larger: ForwardShape) -> f64 {
        if larger.rows > self.times.max_rows() {
            return (self.forward_us(larger) - self.forward_us(forward)).max(0.0);
        }
        let added_us = self.times.micros(larger) - self.times.micros(forward);
        added_us.max(0.0) * self.residuals.factor(forward.rows)
    }

    /// Network round trip in microseconds.
    pub fn wire_us(&self) -> f64 {
        self.wire_us
    }
}

/// Microseconds, with fraction.
pub fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// A duration of this many microseconds, between 0 and [`MAX_REPORTED`]: predictions multiply what workers
/// report, which may be any number.
pub fn duration_of_micros(micros: f64) -> Duration {
    // In this order NaN becomes 0.
    Duration::from_secs_f64(micros.max(0.0).min(MAX_REPORTED as f64) / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(rows: u32, context: u64, micros: u64) -> StepTimePoint {
        StepTimePoint { rows, context, micros }
    }

    #[test]
    fn predicted_durations_are_bounded() {
        let longest = Duration::from_micros(MAX_REPORTED);
        let found = [1.5, -1.0, f64::NAN, 1e300, f64::INFINITY].map(duration_of_micros);
        assert_eq!(found, [Duration::from_nanos(1_500), Duration::ZERO, Duration::ZERO, longest, longest]);
    }

    #[test]
    fn a_slow_machine_is_believed_slow_at_other_rows_too() {
        let mut cost = WorkerCost::new(StepTimes::assumed());
        let before = cost.step_us(64.0, 0.0);
        for _ in 0..30 {
            cost.observe_step(8, 0.0, Duration::from_micros(22_000));
        }
        assert!((cost.step_us(8.0, 0.0) - 22_000.0).abs() < 1_500.0, "{}", cost.step_us(8.0, 0.0));
        assert!(cost.step_us(64.0, 0.0) > 1.5 * before);
    }

    #[test]
    fn more_rows_never_look_faster_because_the_machine_was() {
        let flat = |rows| point(rows, 0, if rows < 32 { 20_000 } else { 40_000 });
        let mut cost = WorkerCost::new(StepTimes::new(&[1, 16, 32, 64].map(flat)));
        for _ in 0..30 {
            cost.observe_step(8, 0.0, Duration::from_micros(24_000));
            cost.observe_step(16, 0.0, Duration::from_micros(18_000));
        }
        let shape = |rows| ForwardShape::plain(rows, 0.0);
        assert!(cost.step_us(16.0, 0.0) < cost.step_us(8.0, 0.0));
        assert_eq!(cost.added_us(shape(8.0), shape(16.0)), 0.0);
        let knee_us = cost.added_us(shape(8.0), shape(32.0));
        assert!((knee_us - cost.step_us(8.0, 0.0)).abs() < 1.0, "the table's knee counts: {knee_us}");
    }

    #[test]
    fn ids_beyond_those_of_a_round_take_time_of_their_own() {
        let cost = WorkerCost::new(StepTimes::new(&[point(1, 0, 1_000), point(64, 0, 64_000)]));
        let catch_up = |rows, k| cost.catch_up_us(rows, k, (4, 0.0));
        assert_eq!([0, 1, 3].map(|rows| catch_up(rows, 2)), [0.0; 3]);
        assert_eq!((catch_up(4, 2).round(), catch_up(60, 1).round()), (1_000.0, 58_000.0));
    }

    #[test]
    fn a_wire_is_believed_at_once_and_no_single_reply_for_long() {
        let mut cost = WorkerCost::new(StepTimes::assumed());
        let mut told = |wires_us: &[u64]| {
            for wire_us in wires_us {
                cost.observe_wire(Duration::from_micros(wire_us + 7_000), Duration::from_micros(7_000));
            }
            cost.wire_us().round()
        };
        assert_eq!(told(&[10_000]), 10_000.0);
        assert_eq!(told(&[250_000, 10_000]), 10_000.0, "the 250 ms reply waited for a prompt");
        assert_eq!(told(&[10_100, 10_200]), 10_100.0);
        assert!(told(&[10_100; 50]) < 10_101.0);
        assert!(told(&[250_000]) < 10_500.0);
    }

    #[test]
    fn a_knee_that_no_profile_reached_is_learned_from_what_was_seen() {
        let mut cost = WorkerCost::new(StepTimes::new(&[point(1, 0, 20_000), point(64, 0, 20_000)]));
        assert_eq!(cost.step_us(512.0, 0.0), 20_000.0);
        cost.observe_step(512, 0.0, Duration::from_micros(40_000));
        assert!((cost.step_us(512.0, 0.0) - 40_000.0).abs() < 1.0);
        assert!(cost.step_us(1_024.0, 0.0) > 60_000.0, "the slope continues");
        cost.observe_step(1_024, 0.0, Duration::from_micros(80_000));
        assert!((cost.step_us(768.0, 0.0) - 60_000.0).abs() < 1.0);
        assert!((cost.step_us(256.0, 0.0) - 20_000.0).abs() < 1.0, "optimistic between observations");
        assert_eq!(cost.step_us(8.0, 0.0), 20_000.0, "the table holds at profiled rows");
    }
}
