//! Whole models on the device: close to the CPU engine's logits, and equal to themselves when steps are
//! replayed.

use super::decode::{PANELS, write_config};
use super::{CheckTarget, Report};
use crate::cuda::GpuOptions;
use crate::cuda::whole_model::{distance, options, run};
use crate::{Engine, EngineError, SequenceRows, WeightFormat};

/// Seed of random weights.
const SEED: u64 = 5;

/// Largest allowed difference of logits on a GPU from the CPU engine's, relative to the largest logit.
pub(super) const BF16_TOLERANCE: f32 = 1e-2;
/// The same with quantized activations: the last bits of attention decide how its outputs are quantized.
const INT8_TOLERANCE: f32 = 2e-2;
/// The same of random weights, whose logits were 2.0e-2 apart on the host driver.
const RANDOM_INT8_TOLERANCE: f32 = 4e-2;

/// Compares logits of the pair, bf16 and int8, with those of the CPU engine.
pub(super) fn logits(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    for model in target.models() {
        for (weights, tolerance) in [
            (WeightFormat::Bf16, BF16_TOLERANCE),
            (WeightFormat::Fp8, BF16_TOLERANCE),
            (WeightFormat::Int8, INT8_TOLERANCE),
        ] {
            let options = options(model.clone(), weights);
            let expected = run(&mut Engine::load(&options)?)?;
            let found = run(&mut Engine::load(&options.on_gpus(target.gpus()))?)?;
            let distance = distance(&found, &expected);
            let case = format!("logits of {} as {weights:?} against the cpu's", model.display());
            report.check(
                distance <= tolerance,
                format!("{case}: {distance:.1e} of the largest apart, allowed {tolerance:.0e}"),
            );
        }
    }
    panels(target, report, (WeightFormat::Bf16, BF16_TOLERANCE))?;
    panels(target, report, (WeightFormat::Int8, RANDOM_INT8_TOLERANCE))
}

/// A model of random weights whose products take operands in panels, where the device has them (of int8 all
/// but o_proj): near the CPU engine's logits, and equal to itself when every row is its own forward.
fn panels(
    target: &CheckTarget,
    report: &mut Report<'_>,
    (weights, tolerance): (WeightFormat, f32),
) -> Result<(), EngineError> {
    let file = write_config(PANELS, "panels")?;
    let options = options(file.clone(), weights);
    let expected = run(&mut Engine::random(&options, SEED)?)?;
    let mut engine = Engine::random(&options.on_gpus(target.gpus()), SEED)?;
    let distance = distance(&run(&mut engine)?, &expected);
    report.check(
        distance <= tolerance,
        format!("logits of random weights in panels as {weights:?} against the cpu's: {distance:.1e} of the largest apart, allowed {tolerance:.0e}"),
    );
    let ids: Vec<u32> = (0..if target.is_dry { 40 } else { 400 }).map(|i| 2 + i * 5 % 60).collect();
    let mut logits_of = |piece: usize| -> Result<Vec<Vec<f32>>, EngineError> {
        let (slot, mut all) = (engine.open(), Vec::new());
        for token_ids in ids.chunks(piece) {
            let logits = engine.forward(&[SequenceRows { slot, token_ids, num_logits: token_ids.len() }])?;
            all.extend((0..logits.rows()).map(|row| logits.row(row).to_vec()));
        }
        engine.close(slot);
        Ok(all)
    };
    let whole = logits_of(ids.len())?;
    for piece in [1, 7, 16, 37, 80, 160] {
        let is_good = logits_of(piece)? == whole;
        let case = format!("panels as {weights:?}: {} rows in pieces of {piece} == all at once", ids.len());
        report.check(is_good, case);
    }
    std::fs::remove_file(&file).map_err(|source| EngineError::Io { path: file, source })
}

/// Compares the draft's logits with graphs, run several times so that steps are replayed, with those without
/// graphs: equal bits.
pub(super) fn graphs(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let options = options(target.pair.0.clone(), WeightFormat::Bf16);
    let launched = target.gpus();
    let expected = run(&mut Engine::load(&options.on_gpus(launched.clone()))?)?;
    let mut engine = Engine::load(&options.on_gpus(GpuOptions { graphs: true, ..launched }))?;
    for time in 1..=4 {
        let is_good = run(&mut engine)? == expected;
        report.check(is_good, format!("graphs, time {time}: logits == launched ones"));
    }
    Ok(())
}
