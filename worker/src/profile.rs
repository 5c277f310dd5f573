//! How long a forward takes at a few numbers of rows and two lengths of context, measured once at the
//! worker's start: the table by which routers choose k and by which the worker forms its batches. It runs
//! before the worker has a port, leaves the engine as it found it, and keeps to a time budget: sizes that
//! would not fit are left out, and a long context that takes too long to fill is measured at the length that
//! was reached. Readers extrapolate from there.

use std::time::{Duration, Instant};

use engine::{Engine, EngineError, SequenceRows, SlotId};
use proto::v1::StepTimePoint;
use scheduling::cost::PROFILED_ROWS;
use scheduling::profile::PROFILED_CONTEXTS;
use speculation::TokenId;

/// All measurements together.
const BUDGET: Duration = Duration::from_millis(900);

/// The share of a context's budget that filling it may take.
const FILL_SHARE: f64 = 0.4;

/// Ids of one forward while a context is filled.
const FILL_ROWS: u32 = 128;

/// Of so many runs the middle one counts.
const RUNS: usize = 3;

/// Step times of `engine`; fewer points where the budget or the KV does not allow more.
pub fn profile(engine: &mut Engine) -> Vec<StepTimePoint> {
    let began = Instant::now();
    let mut points = Vec::new();
    for (i, context) in PROFILED_CONTEXTS.into_iter().enumerate() {
        // The last context may use what the first left.
        let share = BUDGET * (i as u32 + 1) / PROFILED_CONTEXTS.len() as u32;
        let slot = engine.open();
        // In a small window no context is longer than the one before: it would tell nothing new.
        let longer_than = points.last().map_or(0, |point: &StepTimePoint| point.kv_tokens as u32);
        let lens = (longer_than, context);
        let measured = profile_context(engine, slot, lens, share.saturating_sub(began.elapsed()));
        engine.close(slot);
        match measured {
            Ok(curve) => points.extend(curve),
            Err(error) => tracing::warn!(context, %error, "step times of this context could not be profiled"),
        }
    }
    tracing::info!(points = points.len(), took = ?began.elapsed(), "step times profiled");
    points
}

/// Step times of a sequence that holds `context` tokens, or as many as there is room and time for; none where
/// that is not more than `longer_than`.
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
    // The first forward of a shape touches memory for the first time: it is not measured.
    forward(engine, slot, 1, 1)?;
    let mut last: Option<(u32, Duration)> = None;
    for rows in PROFILED_ROWS.into_iter().filter(|rows| context + rows <= longest) {
        // At worst a row costs as much as it did at the size before.
        let expected = last.map_or(Duration::ZERO, |(before, took)| took * rows / before * RUNS as u32);
        if began.elapsed() + expected > budget {
            break;
        }
        let mut runs = Vec::with_capacity(RUNS);
        for _ in 0..RUNS {
            engine.truncate(slot, context);
            let run = Instant::now();
            forward(engine, slot, rows, rows)?;
            runs.push(run.elapsed());
        }
        runs.sort_unstable();
        let took = runs[RUNS / 2];
        last = Some((rows, took));
        points.push(StepTimePoint { rows, kv_tokens: context.into(), micros: took.as_micros() as u64 });
    }
    Ok(points)
}

/// Tokens that one sequence can hold in an engine that holds nothing else.
fn longest(engine: &Engine) -> u32 {
    let info = engine.info();
    let kv_tokens = info.kv_blocks * u64::from(info.kv_block_size);
    info.max_model_len.min(u32::try_from(kv_tokens).unwrap_or(u32::MAX))
}

/// Appends ids until the sequence holds `context` of them or the budget is spent; how many it holds then.
fn fill(engine: &mut Engine, slot: SlotId, context: u32, budget: Duration) -> Result<u32, EngineError> {
    let began = Instant::now();
    let mut filled = 0;
    while filled < context && (filled == 0 || began.elapsed() < budget) {
        let rows = FILL_ROWS.min(context - filled);
        forward(engine, slot, rows, 1)?;
        filled += rows;
    }
    Ok(filled)
}

/// Appends `rows` ids to the sequence and has logits made for the last `num_logits`. Which ids does not
/// matter for time.
fn forward(engine: &mut Engine, slot: SlotId, rows: u32, num_logits: u32) -> Result<(), EngineError> {
    let vocab_size = engine.info().vocab_size;
    let token_ids: Vec<TokenId> = (0..rows).map(|row| row % vocab_size).collect();
    let batch = [SequenceRows { slot, token_ids: &token_ids, num_logits: num_logits as usize }];
    engine.forward(&batch).map(drop)
}
