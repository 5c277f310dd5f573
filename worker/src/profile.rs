//! Measures forward times at the worker's start, for several numbers of rows and two context lengths of one
//! sequence, and on GPUs for batches of several sequences. Routers use the table to choose k and the worker
//! uses it to form batches. Profiling runs before the worker has a port, leaves the engine as it found it,
//! and has a time budget. Sizes that would not fit are skipped. A long context that takes too long to fill is
//! measured at the length reached, or not at all; readers extrapolate. The row counts of short drafts are
//! always measured: otherwise a router would treat the rows of a slow target as free. Rows are drawn on the
//! device where serving draws them there: copies of logits, which serving does not make, would count as
//! compute time.

mod batches;

use std::time::{Duration, Instant};

use engine::{DrawRequest, Engine, EngineError, SequenceRows, SlotId};
use scheduling::cost::{BatchTimePoint, PROFILED_ROWS, StepTimePoint};
use scheduling::profile::{PROFILED_BATCHES, PROFILED_CONTEXTS};
use speculation::{SequenceSpec, TokenId};

use self::batches::profile_batches;

/// Time budget of all measurements of one sequence.
const BUDGET: Duration = Duration::from_millis(1200);

/// Time budget of all measurements of several sequences, in addition.
const BATCH_BUDGET: Duration = Duration::from_millis(600);

/// Row counts up to this one are measured at the first context at least once, even if the budget is spent:
/// those of a few sequences with short drafts.
const NEEDED_ROWS: u32 = 32;

/// Share of a context's budget available for filling it.
const FILL_SHARE: f64 = 0.4;

/// Ids per forward while filling a context.
const FILL_ROWS: u32 = 128;

/// Runs per measurement. The shortest counts: other processes, such as a draft worker that profiles itself on
/// the same cores, only make them longer.
const RUNS: usize = 3;

/// Measured forward times.
#[derive(Debug, Clone, Default)]
pub struct StepProfile {
    /// Of one sequence.
    pub step_times: Vec<StepTimePoint>,
    /// Of several sequences; empty on CPUs.
    pub batch_times: Vec<BatchTimePoint>,
}

/// Profiles `engine`; returns fewer points if the budget or the KV does not allow more.
pub fn profile(engine: &mut Engine) -> StepProfile {
    let step_times = profile_within(engine, BUDGET);
    let batch_times = if engine.draws(&SequenceSpec::default()) {
        profile_batches(engine, &step_times, &PROFILED_BATCHES, BATCH_BUDGET)
    } else {
        Vec::new()
    };
    StepProfile { step_times, batch_times }
}

fn profile_within(engine: &mut Engine, budget: Duration) -> Vec<StepTimePoint> {
    let began = Instant::now();
    let mut points: Vec<StepTimePoint> = Vec::new();
    for (i, context) in PROFILED_CONTEXTS.into_iter().enumerate() {
        // The last context may use time left over by the first.
        let share =
            (budget * (i as u32 + 1) / PROFILED_CONTEXTS.len() as u32).saturating_sub(began.elapsed());
        if points.last().is_some_and(|point| fill_at_worst(point) > share) {
            break;
        }
        let slot = engine.open();
        // In a small window this context may be no longer than the one before: it would add no information.
        let longer_than = points.last().map_or(0, |point: &StepTimePoint| point.context as u32);
        let lens = (longer_than, context);
        let measured = profile_context(engine, slot, lens, share);
        engine.close(slot);
        match measured {
            Ok(curve) => points.extend(curve),
            Err(error) => {
                tracing::warn!(context, %error, "cannot measure step times at this context length: routers get none for it")
            }
        }
    }
    tracing::info!(points = points.len(), took = ?began.elapsed(), "measured step times");
    for StepTimePoint { rows, context, micros } in &points {
        tracing::debug!(rows, kv_tokens = context, micros, "measured step time");
    }
    points
}

/// Duration of the first fill forward, assuming the cost per row of this point.
fn fill_at_worst(point: &StepTimePoint) -> Duration {
    Duration::from_micros(point.micros) * FILL_ROWS / point.rows
}

/// Step times of a sequence that holds `context` tokens, or fewer if space or time runs out; empty if that is
/// not more than `longer_than`.
fn profile_context(
    engine: &mut Engine,
    slot: SlotId,
    (longer_than, context): (u32, u32),
    budget: Duration,
) -> Result<Vec<StepTimePoint>, EngineError> {
    let began = Instant::now();
    let longest = longest(engine);
    let mut points = Vec::new();
    let context = fill(engine, slot, context.min(longest / 2), budget.mul_f64(FILL_SHARE))?;
    if context <= longer_than {
        return Ok(points);
    }
    // The first forward of a shape touches memory for the first time: not measured.
    forward(engine, &[slot], 1, 1)?;
    let mut last: Option<(u32, Duration)> = None;
    for rows in PROFILED_ROWS.into_iter().filter(|rows| context + rows <= longest) {
        // Assume at most the cost per row of the previous size.
        let expected = last.map_or(Duration::ZERO, |(before, took)| took * rows / before * RUNS as u32);
        let fits = began.elapsed() + expected <= budget;
        let is_needed = longer_than == 0 && rows <= NEEDED_ROWS;
        if !fits && !is_needed {
            break;
        }
        let mut took = Duration::MAX;
        for _ in 0..if fits { RUNS } else { 1 } {
            engine.truncate(slot, context);
            let run = Instant::now();
            forward(engine, &[slot], rows, rows)?;
            took = took.min(run.elapsed());
        }
        last = Some((rows, took));
        points.push(StepTimePoint { rows, context: context.into(), micros: took.as_micros() as u64 });
    }
    Ok(points)
}

/// Maximum tokens of one sequence in an otherwise empty engine.
fn longest(engine: &Engine) -> u32 {
    let info = engine.info();
    let kv_tokens = info.kv_blocks * u64::from(info.kv_block_size);
    info.max_model_len.min(u32::try_from(kv_tokens).unwrap_or(u32::MAX))
}

/// Appends ids until the sequence holds `context` of them or the budget is spent; returns the length reached.
fn fill(engine: &mut Engine, slot: SlotId, context: u32, budget: Duration) -> Result<u32, EngineError> {
    let began = Instant::now();
    let mut filled = 0;
    while filled < context && (filled == 0 || began.elapsed() < budget) {
        let rows = FILL_ROWS.min(context - filled);
        forward(engine, &[slot], rows, 1)?;
        filled += rows;
    }
    Ok(filled)
}

/// Appends `rows` ids to each of some sequences of equal length and decides on the last `num_logits`, at
/// least one: draws them if the device can, and reads their logits otherwise. The ids do not affect the time.
fn forward(engine: &mut Engine, slots: &[SlotId], rows: u32, num_logits: u32) -> Result<(), EngineError> {
    let vocab_size = engine.info().vocab_size;
    let len = slots.first().map_or(0, |slot| engine.len(*slot)) as usize;
    // All ids of a sequence afterwards; the device looks only at how many precede a row.
    let ids: Vec<TokenId> = (0..len as u32 + rows).map(|id| id % vocab_size).collect();
    let rows_of =
        |&slot: &SlotId| SequenceRows { slot, token_ids: &ids[len..], num_logits: num_logits as usize };
    let batch: Vec<SequenceRows<'_>> = slots.iter().map(rows_of).collect();
    let spec = SequenceSpec { max_len: u32::MAX, ..SequenceSpec::default() };
    let (prefix, suffix) = ids.split_at(ids.len() - (num_logits as usize - 1));
    let (logprobs, prompt, candidate_rows) = (None, None, 0);
    let request = DrawRequest { spec: &spec, prefix, suffix, vocab_size, logprobs, prompt, candidate_rows };
    let requests = if engine.draws(&spec) { vec![Some(request); slots.len()] } else { Vec::new() };
    engine.forward_and_draw(&batch, &requests).map(drop)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use engine::cuda::GpuOptions;
    use engine::cuda::host_driver::HostDriver;
    use engine::{LoadOptions, WeightFormat};

    use super::*;

    fn options(weights: WeightFormat) -> LoadOptions {
        let model_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/draft");
        LoadOptions::new(model_dir, weights, 64 << 20)
    }

    fn points(budget: Duration) -> Vec<(u32, u64)> {
        let mut engine = Engine::load(&options(WeightFormat::AsStored)).unwrap();
        let before = engine.free_blocks();
        let points = profile_within(&mut engine, budget);
        assert_eq!(engine.free_blocks(), before, "the engine is left as it was");
        points.iter().map(|point| (point.rows, point.context)).collect()
    }

    #[test]
    fn a_target_too_slow_for_the_budget_still_tells_what_the_rows_of_a_draft_cost() {
        let first = u64::from(PROFILED_CONTEXTS[0]);
        assert_eq!(points(Duration::ZERO), [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32].map(|rows| (rows, first)));
    }

    /// The shortest profile, over the host driver: every row that is decided on is drawn there.
    #[test]
    fn a_profile_on_a_device_copies_at_most_16_bytes_a_row_back() {
        let name = "profile::tests::a_profile_on_a_device_copies_at_most_16_bytes_a_row_back";
        let Some(driver) = HostDriver::for_test(name) else { return };
        let gpus = GpuOptions { kernels: Some(driver.kernels.clone()), ..GpuOptions::for_devices(&[0]) };
        let mut engine = Engine::load(&options(WeightFormat::Bf16).on_gpus(gpus)).unwrap();
        let before = driver.counts();
        let points = profile_within(&mut engine, Duration::ZERO);
        let bytes = driver.counts().since(before).bytes_from_device;
        // Two more rows are drawn: at the end of the context, and in the first forward of the shape.
        let rows = points.iter().map(|point| u64::from(point.rows)).sum::<u64>() + 2;
        println!("{bytes} bytes for {rows} rows");
        assert!(rows > 70 && (4 * rows..=16 * rows).contains(&bytes), "{bytes} bytes for {rows} rows");
    }

    /// Profiles batches with time enough: (sequences, rows, tokens of each).
    fn batches(engine: &mut Engine, batches: &[(u32, u32)]) -> Vec<(u32, u32, u64)> {
        let step_times = [1, 16].map(|rows| StepTimePoint { rows, context: 16, micros: 1 });
        let before = engine.free_blocks();
        let points = profile_batches(engine, &step_times, batches, Duration::from_secs(600));
        assert_eq!(engine.free_blocks(), before, "the engine is left as it was");
        assert_eq!(engine.stats().cached_blocks, 0, "nobody finds KV that was never computed");
        assert!(points.iter().all(|point| point.micros > 0), "{points:?}");
        points.iter().map(|point| (point.sequences, point.rows, point.context)).collect()
    }

    #[test]
    fn batches_are_measured_where_kv_and_rows_allow_it() {
        let mut engine = Engine::load(&options(WeightFormat::AsStored)).unwrap();
        let (window, blocks) = (engine.info().max_model_len, engine.info().kv_blocks as u32);
        let wanted = [(2, 100), (3, window), (3, 2 * window), (blocks, 20), (4, 40)];
        let longest = u64::from(window) - 5;
        let expected = [(2, 2, 100), (2, 10, 100), (3, 3, longest), (3, 15, longest), (4, 4, 40)];
        assert_eq!(batches(&mut engine, &wanted), expected, "20 rows are not in the table");
    }

    #[test]
    fn batches_without_time_or_on_a_cpu_are_not_measured() {
        let mut engine = Engine::load(&options(WeightFormat::AsStored)).unwrap();
        let slow = [StepTimePoint { rows: 64, context: 16, micros: 1_000_000 }];
        let before = engine.stats().forwards;
        let found = profile_batches(&mut engine, &slow, &[(2, 100)], Duration::from_secs(1));
        assert_eq!((found, engine.stats().forwards), (vec![], before), "four runs take 4 s");
        assert!(profile(&mut engine).batch_times.is_empty(), "a CPU shows it with one sequence");
    }

    #[test]
    fn a_device_that_draws_measures_batches() {
        let name = "profile::tests::a_device_that_draws_measures_batches";
        let Some(driver) = HostDriver::for_test(name) else { return };
        let gpus = GpuOptions { kernels: Some(driver.kernels.clone()), ..GpuOptions::for_devices(&[0]) };
        let mut engine = Engine::load(&options(WeightFormat::Bf16).on_gpus(gpus)).unwrap();
        assert!(engine.draws(&SequenceSpec::default()));
        assert_eq!(batches(&mut engine, &[(2, 40)]), [(2, 2, 40), (2, 10, 40)]);
    }

    #[test]
    fn with_time_enough_every_size_is_measured_at_two_contexts() {
        let points = points(Duration::from_secs(600));
        let first = u64::from(PROFILED_CONTEXTS[0]);
        let at_first = points.iter().filter(|(_, tokens)| *tokens == first).map(|(rows, _)| *rows);
        assert!(at_first.eq(PROFILED_ROWS), "{points:?}");
        assert!(points.iter().any(|(_, tokens)| *tokens > first), "{points:?}");
    }
}
