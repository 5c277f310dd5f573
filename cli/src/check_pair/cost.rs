//! Costs of forwards of both models on this machine, measured alternately so that changes of its speed affect
//! both.

use std::time::Instant;

use engine::SlotId;
use scheduling::cost::StepTimePoint;
use speculation::TokenId;

use super::error::CheckPairError;
use super::local::LocalModel;
use crate::load::statistics::median;

/// Rows of one sequence per forward.
const ROWS: [u32; 6] = [1, 2, 4, 8, 16, 32];
/// Tokens in the sequence before the forward.
const CONTEXTS: [u32; 2] = [16, 256];
/// Timed runs per shape; the median counts.
const RUNS: usize = 9;
/// Once a target forward takes longer, microseconds, larger ones are not measured; the last slope is
/// extrapolated.
const FORWARD_US_MAX: f64 = 2e6;

/// Step times of both models.
#[derive(Debug, Clone, Default)]
pub struct Costs {
    /// The target's.
    pub target: Vec<StepTimePoint>,
    /// The draft's.
    pub draft: Vec<StepTimePoint>,
}

impl Costs {
    /// Time of a draft step of `rows` rows over that of a target step of `rows` rows, at the shorter context;
    /// `None` if it was not measured.
    pub fn ratio(&self, rows: u32) -> Option<f64> {
        let at = |points: &[StepTimePoint]| {
            points.iter().find(|point| point.rows == rows).map(|point| point.micros as f64)
        };
        Some(at(&self.draft)? / at(&self.target)?)
    }
}

/// Times both models at every number of rows and every context length that fits.
pub fn measure(target: &mut LocalModel, draft: &mut LocalModel) -> Result<Costs, CheckPairError> {
    let mut costs = Costs::default();
    let max_len = target.info().max_model_len.min(draft.info().max_model_len);
    for context in CONTEXTS {
        let slots = (target.engine().open(), draft.engine().open());
        let measured = measure_context(target, draft, (slots, context, max_len), &mut costs);
        target.engine().close(slots.0);
        draft.engine().close(slots.1);
        measured?;
    }
    Ok(costs)
}

fn measure_context(
    target: &mut LocalModel,
    draft: &mut LocalModel,
    (slots, context, max_len): ((SlotId, SlotId), u32, u32),
    costs: &mut Costs,
) -> Result<(), CheckPairError> {
    if context >= max_len {
        return Ok(());
    }
    run(target, slots.0, context)?;
    run(draft, slots.1, context)?;
    for rows in ROWS.into_iter().filter(|rows| context + rows <= max_len) {
        let mut times = [Vec::with_capacity(RUNS), Vec::with_capacity(RUNS)];
        // The first forward of a shape touches memory for the first time and is not counted.
        for i in 0..=RUNS {
            let [target_times, draft_times] = &mut times;
            for (model, slot, times) in
                [(&mut *target, slots.0, target_times), (&mut *draft, slots.1, draft_times)]
            {
                model.engine().truncate(slot, context);
                let took = run(model, slot, rows)?;
                if i > 0 {
                    times.push(took);
                }
            }
        }
        let [target_us, draft_us] = times.map(|mut times| median(&mut times));
        let point = |micros: f64| StepTimePoint { rows, context: context.into(), micros: micros as u64 };
        costs.target.push(point(target_us));
        costs.draft.push(point(draft_us));
        if target_us > FORWARD_US_MAX {
            break;
        }
    }
    Ok(())
}

/// Times one forward, in microseconds. The ids do not affect the time.
fn run(model: &mut LocalModel, slot: SlotId, rows: u32) -> Result<f64, CheckPairError> {
    let token_ids: Vec<TokenId> = (0..rows).map(|row| row % model.vocab_size()).collect();
    let began = Instant::now();
    model.append(slot, &token_ids, rows as usize)?;
    Ok(began.elapsed().as_nanos() as f64 / 1e3)
}
