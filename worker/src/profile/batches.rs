//! The part of the step profile that runs several sequences behind long contexts, as in serving. It is for
//! devices that draw, which are GPUs: one sequence does not keep them busy, and many rows of one sequence
//! cost what those of a prompt do. A CPU reads KV once per row, which one sequence shows as well, and there
//! the contexts would take memory that serving may never need.
//!
//! The contexts are never computed, because that would take many seconds: the time of a forward does not
//! depend on what its KV contains.

use std::time::{Duration, Instant};

use engine::{Engine, EngineError, SlotId};
use scheduling::cost::{BatchTimePoint, StepTimePoint, StepTimes, duration_of_micros};
use scheduling::profile::PROFILED_BATCH_ROWS;

use super::{RUNS, forward};

/// A profile in progress.
struct BatchProfile<'a> {
    engine: &'a mut Engine,
    step_times: &'a [StepTimePoint],
    deadline: Instant,
    measured: Vec<BatchTimePoint>,
}

/// Profiles `batches`, each a number of sequences and the tokens that each of them has, at an engine whose
/// step times are known. In a small window contexts are shorter. Forwards that would need more blocks, rows
/// or time than there are, are left out.
pub(super) fn profile_batches(
    engine: &mut Engine,
    step_times: &[StepTimePoint],
    batches: &[(u32, u32)],
    budget: Duration,
) -> Vec<BatchTimePoint> {
    let began = Instant::now();
    let mut profile = BatchProfile { engine, step_times, deadline: began + budget, measured: Vec::new() };
    for &(sequences, context) in batches {
        profile.add(sequences, context);
    }
    let measured = profile.measured;
    tracing::info!(points = measured.len(), took = ?began.elapsed(), "measured step times of batches");
    for BatchTimePoint { sequences, rows, context, micros } in &measured {
        tracing::debug!(sequences, rows, kv_tokens = context, micros, "measured step time of a batch");
    }
    measured
}

impl BatchProfile<'_> {
    fn add(&mut self, sequences: u32, context: u32) {
        let info = self.engine.info();
        let most_rows = PROFILED_BATCH_ROWS.into_iter().max().unwrap_or_default();
        let context = context.min(info.max_model_len.saturating_sub(most_rows));
        let blocks_each = u64::from(context + most_rows).div_ceil(u64::from(info.kv_block_size));
        let has_blocks = u64::from(sequences) * blocks_each <= self.engine.free_blocks();
        let is_measured = self
            .measured
            .iter()
            .any(|point| (point.sequences, point.context) == (sequences, u64::from(context)));
        if is_measured || !has_blocks {
            return;
        }
        let mut slots = Vec::new();
        let measured = self.measure(&mut slots, (sequences, context));
        slots.into_iter().for_each(|slot| self.engine.close(slot));
        if let Err(error) = measured {
            tracing::warn!(sequences, context, %error, "cannot measure step times of this batch: routers get none for it");
        }
    }

    /// Opens the sequences and runs them, as long as there is time.
    fn measure(
        &mut self,
        slots: &mut Vec<SlotId>,
        (sequences, context): (u32, u32),
    ) -> Result<(), EngineError> {
        for _ in 0..sequences {
            slots.push(self.engine.open_unwritten(context)?);
        }
        for rows_each in PROFILED_BATCH_ROWS {
            let rows = sequences * rows_each;
            let mut point = BatchTimePoint { sequences, rows, context: context.into(), micros: 0 };
            let times = StepTimes::with_batches(self.step_times, &self.measured);
            let expected = duration_of_micros(times.micros(point.forward()));
            // Without such rows in the table, neither this time nor the cost of KV could be told.
            let is_known = self.step_times.iter().any(|known| known.rows >= rows);
            if !is_known || expected * (1 + RUNS as u32) > self.time_left() {
                return Ok(());
            }
            // The first forward of a shape allocates memory: not measured. It may take longer than expected.
            let warm_up = self.run(slots, context, rows_each)?;
            if warm_up * RUNS as u32 > self.time_left() {
                return Ok(());
            }
            let mut took = Duration::MAX;
            for _ in 0..RUNS {
                took = took.min(self.run(slots, context, rows_each)?);
            }
            point.micros = took.as_micros() as u64;
            self.measured.push(point);
        }
        Ok(())
    }

    /// Time of a forward, whose rows are dropped again.
    fn run(&mut self, slots: &[SlotId], context: u32, rows_each: u32) -> Result<Duration, EngineError> {
        let began = Instant::now();
        forward(self.engine, slots, rows_each, rows_each)?;
        let took = began.elapsed();
        slots.iter().for_each(|&slot| self.engine.truncate(slot, context));
        Ok(took)
    }

    fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}
