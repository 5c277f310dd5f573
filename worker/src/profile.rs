//! How long a forward takes at a few numbers of rows and two lengths of context, measured once at the worker's start: the table
//! that routers choose k by. It runs before the worker has a port, leaves the engine as it found it, and keeps to a
//! budget: sizes that would not fit are left out, and routers carry the slope on.

use std::time::{Duration, Instant};

use engine::{Engine, EngineError, SequenceRows, SlotId};
use proto::v1::StepTimePoint;
use speculation::TokenId;
use speculation::cost::PROFILED_ROWS;

/// All measurements together.
const BUDGET: Duration = Duration::from_millis(900);

const CONTEXTS: [u32; 2] = [16, 256];

/// Of so many runs the middle one counts.
const RUNS: usize = 3;

/// Step times of `engine`; fewer points where the budget or the KV does not allow more.
pub fn profile(engine: &mut Engine) -> Vec<StepTimePoint> {
    let began = Instant::now();
    let mut points = Vec::new();
    for (i, context) in CONTEXTS.into_iter().enumerate() {
        // The last context may use what the first left.
        let share = BUDGET * (i as u32 + 1) / CONTEXTS.len() as u32;
        let slot = engine.open();
        let measured = profile_context(engine, slot, context, share.saturating_sub(began.elapsed()));
        engine.close(slot);
        match measured {
            Ok(curve) => points.extend(curve),
            Err(error) => tracing::warn!(context, %error, "step times of this context could not be profiled"),
        }
    }
    tracing::info!(points = points.len(), took = ?began.elapsed(), "step times profiled");
    points
}

fn profile_context(
    engine: &mut Engine,
    slot: SlotId,
    context: u32,
    budget: Duration,
) -> Result<Vec<StepTimePoint>, EngineError> {
    let began = Instant::now();
    let max_model_len = engine.info().max_model_len;
    let mut points = Vec::new();
    if context >= max_model_len {
        return Ok(points);
    }
    forward(engine, slot, context, 1)?;
    // The first forward of a shape touches memory for the first time: it is not measured.
    forward(engine, slot, 1, 1)?;
    let mut last: Option<(u32, Duration)> = None;
    for rows in PROFILED_ROWS.into_iter().filter(|rows| context + rows <= max_model_len) {
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

/// Appends `rows` ids to the sequence and has logits made for the last `num_logits`. Which ids does not matter for time.
fn forward(engine: &mut Engine, slot: SlotId, rows: u32, num_logits: u32) -> Result<(), EngineError> {
    let vocab_size = engine.info().vocab_size;
    let token_ids: Vec<TokenId> = (0..rows).map(|row| row % vocab_size).collect();
    let batch = [SequenceRows { slot, token_ids: &token_ids, num_logits: num_logits as usize }];
    engine.forward(&batch).map(drop)
}
