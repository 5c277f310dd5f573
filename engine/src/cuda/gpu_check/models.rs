//! Whole models on the device: close to the CPU engine's logits, and equal to themselves when steps are
//! replayed.

use super::{CheckTarget, Report};
use crate::cuda::GpuOptions;
use crate::cuda::whole_model::{distance, options, run};
use crate::{Engine, EngineError, WeightFormat};

/// Largest allowed difference of logits on a GPU from the CPU engine's, relative to the largest logit.
pub(super) const BF16_TOLERANCE: f32 = 1e-2;
/// The same with quantized activations: the last bits of attention decide how its outputs are quantized.
const INT8_TOLERANCE: f32 = 2e-2;

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
            let found = run(&mut Engine::load_on_cuda(&options, &target.gpus())?)?;
            let distance = distance(&found, &expected);
            let case = format!("logits of {} as {weights:?} against the cpu's", model.display());
            report.check(
                distance <= tolerance,
                format!("{case}: {distance:.1e} of the largest apart, allowed {tolerance:.0e}"),
            );
        }
    }
    Ok(())
}

/// Compares the draft's logits with graphs, run several times so that steps are replayed, with those without
/// graphs: equal bits.
pub(super) fn graphs(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let options = options(target.pair.0.clone(), WeightFormat::Bf16);
    let launched = target.gpus();
    let expected = run(&mut Engine::load_on_cuda(&options, &launched)?)?;
    let mut engine = Engine::load_on_cuda(&options, &GpuOptions { graphs: true, ..launched })?;
    for time in 1..=4 {
        let is_good = run(&mut engine)? == expected;
        report.check(is_good, format!("graphs, time {time}: logits == launched ones"));
    }
    Ok(())
}
