//! Runs the same few steps of a whole model on a GPU and on the CPU engine, and compares their logits.

use std::path::PathBuf;

use crate::{Engine, EngineError, LoadOptions, SequenceRows, SlotId, WeightFormat};

/// Size of the KV cache for these short runs.
const KV_MEMORY_BYTES: u64 = 32 << 20;

/// Two sequences: a prompt of several blocks with a short one in the same batch, a verify step with a decode
/// step, a prefill, a rollback. Returns every row of logits.
pub(super) fn run(engine: &mut Engine) -> Result<Vec<Vec<f32>>, EngineError> {
    let prompt: Vec<u32> = (0..37).map(|i| 3 + i * 7 % 50).collect();
    let (a, b) = (engine.open(), engine.open());
    let steps: [&[(SlotId, &[u32], usize)]; 4] = [
        &[(a, &prompt[..30], 2), (b, &prompt[5..9], 1)],
        &[(a, &prompt[30..34], 4), (b, &[7], 1)],
        &[(b, &prompt[9..20], 11)],
        &[(a, &[9, 11], 2), (b, &[12], 1)],
    ];
    let mut all = Vec::new();
    for (i, step) in steps.into_iter().enumerate() {
        if i == 3 {
            engine.truncate(a, 31);
        }
        let rows =
            |&(slot, token_ids, num_logits): &(SlotId, _, _)| SequenceRows { slot, token_ids, num_logits };
        let batch: Vec<SequenceRows<'_>> = step.iter().map(rows).collect();
        let logits = engine.forward(&batch)?;
        all.extend((0..logits.rows()).map(|row| logits.row(row).to_vec()));
    }
    engine.close(a);
    engine.close(b);
    Ok(all)
}

/// Largest difference of two runs, relative to the largest logit. Infinite if a difference is NaN or the
/// numbers of rows differ.
pub(super) fn distance(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f32 {
    let largest = expected.iter().flatten().fold(0.0f32, |max, x| max.max(x.abs()));
    let pairs = found.iter().flatten().zip(expected.iter().flatten());
    let worst = pairs
        .map(|(a, b)| (a - b).abs())
        .fold(0.0f32, |worst, x| if x.is_nan() { f32::INFINITY } else { worst.max(x) });
    if found.len() == expected.len() { worst / largest } else { f32::INFINITY }
}

pub(super) fn options(model_dir: PathBuf, weights: WeightFormat) -> LoadOptions {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    LoadOptions { threads, ..LoadOptions::new(model_dir, weights, KV_MEMORY_BYTES) }
}
