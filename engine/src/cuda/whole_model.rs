//! Whole models on a GPU against the CPU engine: the same few steps on both, and how far their logits lie apart;
//! and what decoding takes.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::cuda::GpuOptions;
use crate::{Engine, EngineError, LoadOptions, SequenceRows, SlotId, WeightFormat};

/// KV for the short runs here.
const KV_MEMORY_BYTES: u64 = 256 << 20;
/// Ids that each sequence holds before decoding is timed, and timed steps.
const PROMPT_LEN: usize = 64;
const TIMED_STEPS: u32 = 20;

/// Two sequences: a prompt over several blocks beside a short one, a verify step beside a decode step, a prefill, a
/// rollback. Returns every row of logits.
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

/// Largest difference of two runs, as a part of the largest logit; infinite where either is not a number.
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
    LoadOptions {
        model_dir,
        weights,
        threads,
        tensor_parallel: 1,
        kv_memory_bytes: KV_MEMORY_BYTES,
        max_model_len: None,
    }
}

/// How far a checkpoint's logits on a GPU lie from the CPU engine's.
pub(super) fn distance_on_gpu(
    ordinal: usize,
    model_dir: &Path,
    weights: WeightFormat,
) -> Result<f32, EngineError> {
    let options = options(model_dir.to_owned(), weights);
    let expected = run(&mut Engine::load(&options)?)?;
    Ok(distance(&run(&mut Engine::load_on_cuda(&options, &GpuOptions::on(&[ordinal]))?)?, &expected))
}

/// Seconds that a decode step of so many sequences takes on a GPU, the weights' bytes that it reads, for a model of
/// random weights by its config.json. Each step reads one row of logits back.
pub(super) fn decode_on_gpu(
    gpus: &GpuOptions,
    config: &Path,
    weights: WeightFormat,
    sequences: &[usize],
) -> Result<(Vec<f64>, u64), EngineError> {
    let options = options(config.to_owned(), weights);
    let mut engine = Engine::random_on_cuda(&options, 1, gpus)?;
    let mut seconds = Vec::new();
    for &count in sequences {
        let slots: Vec<SlotId> = (0..count).map(|_| engine.open()).collect();
        let prompt: Vec<u32> = (0..PROMPT_LEN as u32).collect();
        for &slot in &slots {
            engine.forward(&[SequenceRows { slot, token_ids: &prompt, num_logits: 0 }])?;
        }
        let step = |engine: &mut Engine| {
            let rows = |(i, &slot)| SequenceRows { slot, token_ids: &[7], num_logits: usize::from(i == 0) };
            let batch: Vec<SequenceRows<'_>> = slots.iter().enumerate().map(rows).collect();
            engine.forward(&batch).map(drop)
        };
        step(&mut engine)?;
        let start = Instant::now();
        for _ in 0..TIMED_STEPS {
            step(&mut engine)?;
        }
        seconds.push(start.elapsed().as_secs_f64() / f64::from(TIMED_STEPS));
        slots.into_iter().for_each(|slot| engine.close(slot));
    }
    Ok((seconds, engine.info().weight_bytes))
}
