//! Whole models on the emulator against the CPU engine: the forward, loading, paged KV and formats as a GPU runs
//! them.

use std::path::{Path, PathBuf};

use super::{Gpu, KERNEL_CLASS};
use crate::cuda::emulator::Emulator;
use crate::load::load_whole;
use crate::{Engine, LoadOptions, SequenceRows, WeightFormat};

fn options(model: &str, weights: WeightFormat) -> LoadOptions {
    LoadOptions {
        model_dir: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(Path::new(model)),
        weights,
        threads: 1,
        tensor_parallel: 1,
        kv_memory_bytes: 4 << 20,
        max_model_len: None,
    }
}

fn emulated(options: &LoadOptions) -> Engine {
    Engine::load_by(options, |source, model| {
        load_whole(Gpu::new(Emulator::build(), options.kv_memory_bytes), KERNEL_CLASS, source, model)
    })
    .unwrap()
}

/// Two sequences: prompts of which one crosses blocks, a verify step beside a decode step, a rollback, another.
fn run(engine: &mut Engine) -> Vec<Vec<f32>> {
    let prompt: Vec<u32> = (0..37).map(|i| 3 + i * 7 % 50).collect();
    let (a, b) = (engine.open(), engine.open());
    let mut all = Vec::new();
    let steps: [&[(_, &[u32], usize)]; 4] = [
        &[(a, &prompt[..30], 2), (b, &prompt[5..9], 1)],
        &[(a, &prompt[30..34], 4), (b, &[7], 1)],
        &[(b, &prompt[9..20], 11)],
        &[(a, &[9, 11], 2), (b, &[12], 1)],
    ];
    for (i, step) in steps.into_iter().enumerate() {
        if i == 3 {
            engine.truncate(a, 31);
        }
        let rows = |&(slot, token_ids, num_logits)| SequenceRows { slot, token_ids, num_logits };
        let batch: Vec<SequenceRows<'_>> = step.iter().map(rows).collect();
        let logits = engine.forward(&batch).unwrap();
        all.extend((0..logits.rows()).map(|row| logits.row(row).to_vec()));
    }
    all
}

/// Largest difference of two runs, as a part of the largest logit.
fn distance(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().flatten().fold(0.0f32, |max, x| max.max(x.abs()));
    let pairs = found.iter().flatten().zip(expected.iter().flatten());
    pairs.fold(0.0f32, |worst, (a, b)| if (a - b).abs() <= worst { worst } else { (a - b).abs() }) / largest
}

fn check(model: &str, weights: WeightFormat, tolerance: f32) {
    let options = options(model, weights);
    let expected = run(&mut Engine::load(&options).unwrap());
    let found = run(&mut emulated(&options));
    let distance = distance(&found, &expected);
    println!("{model} as {weights:?}: {distance:e}");
    assert!(distance <= tolerance, "{model} as {weights:?}: {distance} of the largest logit apart");
}

#[test]
fn the_bundled_draft_gives_the_cpus_logits() {
    check("../models/demo/draft", WeightFormat::Bf16, 1e-2);
    check("../models/demo/draft", WeightFormat::Int8, 2e-2);
}

#[test]
fn every_family_gives_the_cpus_logits() {
    for model in ["llama_biases_mha", "mistral_window", "qwen2_window_layers", "qwen3_norms"] {
        check(&format!("tests/golden/{model}"), WeightFormat::Bf16, 1e-2);
    }
}

#[test]
fn a_rows_logits_do_not_depend_on_how_it_is_batched() {
    let options = options("tests/golden/qwen3_norms", WeightFormat::Bf16);
    let ids: Vec<u32> = (0..40).map(|i| 2 + i * 5 % 60).collect();
    let logits_of = |cuts: &[usize]| {
        let mut engine = emulated(&options);
        let slot = engine.open();
        let mut all = Vec::new();
        let mut first = 0;
        for &end in cuts {
            let rows = SequenceRows { slot, token_ids: &ids[first..end], num_logits: end - first };
            let logits = engine.forward(&[rows]).unwrap();
            all.extend((0..logits.rows()).flat_map(|row| logits.row(row).to_vec()));
            first = end;
        }
        all
    };
    let whole = logits_of(&[40]);
    assert!(whole == logits_of(&[1, 2, 17, 33, 34, 40]), "cut otherwise, the bits differ");
}

#[test]
fn formats_without_kernels_are_refused() {
    for (weights, name) in [(WeightFormat::F32, "f32"), (WeightFormat::Int4, "int4")] {
        let options = options("../models/demo/draft", weights);
        let error = Engine::load_by(&options, |source, model| {
            load_whole(Gpu::new(Emulator::build(), 1 << 20), KERNEL_CLASS, source, model)
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("bf16 and int8"), "{error}");
    }
}
