//! Time of a forward: a table by rows with steps (stairs) and a knee, a term for the KV that is read, and a
//! rate for prompt rows.

use super::raw::RawStep;
use super::{MICROS_MAX, PROFILED_CONTEXTS, ProfileError, between, micros};
use crate::batch::MAX_ROUND_CONTEXT;
use crate::cost::{PROFILED_ROWS, StepTimePoint, StepTimes};

/// Contents of one forward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ForwardRows {
    /// Rows that are decoded, drafted or verified: k + 1 of a verify step, one of a decode step.
    pub rows: u32,
    /// Rows of prompts.
    pub prefill_rows: u32,
    /// KV tokens held by the forward's sequences, each sequence counted once.
    pub kv_tokens: u64,
    /// The same, each sequence counted once per row.
    pub row_kv_tokens: u64,
}

impl ForwardRows {
    /// Creates a forward of `sequences` with equal numbers of rows and equal context lengths.
    pub fn even(sequences: u32, rows_each: u32, context: u32) -> Self {
        let (rows, kv_tokens) = (sequences * rows_each, u64::from(sequences) * u64::from(context));
        Self { rows, prefill_rows: 0, kv_tokens, row_kv_tokens: kv_tokens * u64::from(rows_each) }
    }

    /// Adds a sequence with `context` context ids and `tail` rows after them; `holds` is its number of KV
    /// tokens afterwards.
    pub fn add(&mut self, (context, tail): (u32, u32), holds: u32) {
        if context > MAX_ROUND_CONTEXT {
            self.prefill_rows += context;
        } else {
            self.rows += context;
        }
        self.rows += tail;
        self.kv_tokens += u64::from(holds);
        self.row_kv_tokens += u64::from(context + tail) * u64::from(holds);
    }
}

/// Step times of one kind of worker.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCurve {
    /// (rows, microseconds), ascending in rows and never falling; at least one.
    points: Vec<(f64, f64)>,
    stair_rows: u32,
    kv_us_per_token: f64,
    kv_us_per_row_token: f64,
    prefill_us_per_row: f64,
}

impl StepCurve {
    /// Microseconds of a forward, without noise: `table(rows padded to the stair) + KV + prefill_rows /
    /// rate`, where rows and prompt take at least the time of one row.
    pub fn micros(&self, forward: ForwardRows) -> f64 {
        let rows = if forward.rows == 0 { 0.0 } else { self.by_rows(forward.rows) };
        let prompt = f64::from(forward.prefill_rows) * self.prefill_us_per_row;
        let kv = forward.kv_tokens as f64 * self.kv_us_per_token
            + forward.row_kv_tokens as f64 * self.kv_us_per_row_token;
        (rows + prompt).max(self.by_rows(1)) + kv
    }

    /// Microseconds per prompt row.
    pub fn prefill_us_per_row(&self) -> f64 {
        self.prefill_us_per_row
    }

    /// The step times that a worker with this curve profiles at its start, with different numbers of rows of
    /// one sequence.
    pub fn profiled(&self) -> Vec<StepTimePoint> {
        let point = |context: u32, rows: u32| StepTimePoint {
            rows,
            context: context.into(),
            micros: self.micros(ForwardRows::even(1, rows, context)) as u64,
        };
        PROFILED_CONTEXTS
            .iter()
            .flat_map(|&context| PROFILED_ROWS.iter().map(move |&rows| point(context, rows)))
            .collect()
    }

    /// The same in the router's form.
    pub fn profiled_times(&self) -> StepTimes {
        StepTimes::new(&self.profiled())
    }

    /// Looks up the table: linear between two points, and along the last line after the last point.
    fn by_rows(&self, rows: u32) -> f64 {
        let padded = f64::from(rows.next_multiple_of(self.stair_rows));
        let above = self.points.iter().position(|point| point.0 >= padded).unwrap_or(self.points.len());
        if above == 0 || self.points.len() == 1 {
            return self.points[above.min(self.points.len() - 1)].1;
        }
        let above = above.min(self.points.len() - 1);
        let (low, high) = (self.points[above - 1], self.points[above]);
        low.1 + (high.1 - low.1) * (padded - low.0) / (high.0 - low.0)
    }

    pub(super) fn check(role: &str, raw: RawStep) -> Result<Self, ProfileError> {
        let table = format!("{role}.step.micros_by_rows");
        if raw.micros_by_rows.is_empty() {
            return Err(ProfileError::value(table, "is empty, expected pairs of rows and microseconds"));
        }
        for (i, (rows, micros)) in raw.micros_by_rows.iter().enumerate() {
            let named = format!("{table}[{i}]");
            if *rows == 0 || !(*micros > 0.0 && *micros <= MICROS_MAX) {
                let fault = format!(
                    "is [{rows}, {micros}], expected at least one row and a time above 0, at most {MICROS_MAX}"
                );
                return Err(ProfileError::value(named, fault));
            }
            if i > 0 && (raw.micros_by_rows[i - 1].0 >= *rows || raw.micros_by_rows[i - 1].1 > *micros) {
                let fault = "must have more rows than the previous point, and at least its time";
                return Err(ProfileError::value(named, fault));
            }
        }
        between(&format!("{role}.step.stair_rows"), raw.stair_rows, (1, 4_096))?;
        micros(&format!("{role}.step.kv_us_per_token"), raw.kv_us_per_token)?;
        micros(&format!("{role}.step.kv_us_per_row_token"), raw.kv_us_per_row_token)?;
        let speed = raw.prefill_tokens_per_second;
        if !(speed.is_finite() && 1e6 / speed > 0.0 && 1e6 / speed <= MICROS_MAX) {
            let fault = format!("is {speed}, expected more than 0, and at least one token an hour");
            return Err(ProfileError::value(format!("{role}.step.prefill_tokens_per_second"), fault));
        }
        Ok(Self {
            points: raw.micros_by_rows.iter().map(|(rows, micros)| (f64::from(*rows), *micros)).collect(),
            stair_rows: raw.stair_rows,
            kv_us_per_token: raw.kv_us_per_token,
            kv_us_per_row_token: raw.kv_us_per_row_token,
            prefill_us_per_row: 1e6 / raw.prefill_tokens_per_second,
        })
    }
}
