//! Whole models on the emulator compared with the CPU engine: the forward, loading, paged KV and formats as
//! on a GPU.

use std::path::Path;

use cpu_kernels::{HeadLayout, MatrixFormat, Segment};

use super::check_model;
use crate::cuda::emulator::Emulator;
use crate::cuda::kv_budget::PASS_LIMITS;
use crate::cuda::ops::{OwnBlocks, Tiling, TilingKey, count_attention};
use crate::cuda::ranks::{Ranks, load_on};
use crate::cuda::test_model::{InBlocks, PANELS, WIDE_HEADS, changed_config};
use crate::cuda::whole_model::{distance, run};
use crate::load::{Loaded, load_on_cpu};
use crate::weights::{Formats, ModelSpec, TensorSource};
use crate::{Engine, EngineError, LoadOptions, SequenceRows, WeightFormat};

fn options(model: &str, weights: WeightFormat) -> LoadOptions {
    LoadOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(model), weights, 4 << 20)
}

fn on_emulator(
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: ModelSpec,
) -> Result<Loaded, EngineError> {
    load_on(Ranks::alone(Emulator::build()), options, source, model)
}

fn emulated(options: &LoadOptions) -> Engine {
    Engine::load_by(options, |source, model| on_emulator(options, source, model)).unwrap()
}

fn check(model: &str, weights: WeightFormat, tolerance: f32) {
    let options = options(model, weights);
    let expected = run(&mut Engine::load(&options).unwrap()).unwrap();
    let found = run(&mut emulated(&options)).unwrap();
    let distance = distance(&found, &expected);
    println!("{model} as {weights:?}: {distance:e}");
    assert!(distance <= tolerance, "{model} as {weights:?}: {distance} of the largest logit apart");
}

#[test]
fn the_bundled_draft_gives_the_cpus_logits() {
    check("../models/demo/draft", WeightFormat::Bf16, 1e-2);
    check("../models/demo/draft", WeightFormat::Fp8, 1e-2);
    check("../models/demo/draft", WeightFormat::Int8, 2e-2);
}

#[test]
fn ballast_changes_no_number() {
    for weights in [WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8] {
        let options = options("../models/demo/draft", weights);
        let mut heavy = emulated(&LoadOptions { ballast: 500_000, ..options.clone() });
        assert!(heavy.info().ballast_parameters > 0);
        assert!(run(&mut heavy).unwrap() == run(&mut emulated(&options)).unwrap(), "{weights:?}");
    }
}

/// A tiny golden configuration, changed to head sizes that have a kernel.
fn with_heads(model: &str, changes: &[(&str, u64)]) -> tempfile::TempDir {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{model}/config.json"));
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for &(field, value) in changes {
        config[field] = value.into();
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

fn random_pair(dir: &tempfile::TempDir, weights: WeightFormat) -> (Engine, Engine) {
    let mut options = options("", weights);
    options.model_dir = dir.path().join("config.json");
    let cpu = Engine::random(&options, 5).unwrap();
    let gpu = Engine::random_by(&options, 5, |source, model| on_emulator(&options, source, model));
    (cpu, gpu.unwrap())
}

#[test]
fn every_family_gives_the_cpus_logits() {
    check("tests/golden/llama_biases_mha", WeightFormat::Bf16, 1e-2);
    check("tests/golden/mistral_window", WeightFormat::Bf16, 1e-2);
    // Biases and windows on some layers; q/k norms and a window by layer type.
    for (model, changes) in [
        ("qwen2_window_layers", &[("num_attention_heads", 2), ("num_key_value_heads", 1)][..]),
        ("qwen3_norms", &[("head_dim", 16)]),
        ("qwen3_window_types", &[("head_dim", 32)]),
    ] {
        let (mut cpu, mut gpu) = random_pair(&with_heads(model, changes), WeightFormat::Bf16);
        let distance = distance(&run(&mut gpu).unwrap(), &run(&mut cpu).unwrap());
        println!("{model}: {distance:e}");
        assert!(distance <= 1e-2, "{model}: {distance} of the largest logit apart");
    }
}

/// Operands in panels, multiplied by warpgroups, give the bits of operands in rows, and the CPU's logits.
#[test]
fn panels_change_no_bit_of_a_model() {
    for is_tied in [false, true] {
        panels_change_no_bit(WeightFormat::Bf16, is_tied, &[]);
    }
    // Slices of one and of two steps.
    panels_change_no_bit(WeightFormat::Bf16, false, &[("hidden_size", 576), ("head_dim", 64)]);
}

/// So many KV heads that a prompt of 30 rows, 90 queries each, has work for every multiprocessor in tiles of
/// warpgroups. Products are the same with and without panels: their slices are too short.
#[test]
fn attention_by_warpgroups_changes_no_bit_of_a_model() {
    let heads = [("num_attention_heads", 396), ("num_key_value_heads", 132), ("head_dim", 64)];
    let small = [("hidden_size", 64), ("intermediate_size", 128), ("num_hidden_layers", 1)];
    let layout = HeadLayout { num_heads: 396, num_kv_heads: 132, head_dim: 64 };
    let segment = Segment { rows: 0..30, start: 0, block_table: &[], tree: None };
    let key = TilingKey::of(layout, None, true);
    let counted = count_attention(&Tiling::new(&[segment], &[0], &OwnBlocks::default(), key), layout);
    assert_eq!(counted.blocks, [0, 0, 0, 132]);
    panels_change_no_bit(WeightFormat::Bf16, false, &[heads, small].concat());
}

/// int8: scales of slices and of rows, and matrices beside them whose slices are no whole panels.
#[test]
fn panels_change_no_bit_of_an_int8_model() {
    // Inputs so long that slices are divided into groups.
    let long = [("hidden_size", 2048), ("num_hidden_layers", 1)];
    panels_change_no_bit(WeightFormat::Int8, true, &[WIDE_HEADS, &long].concat());
    // Slices of one and of two steps; o_proj in rows.
    let changes = [("intermediate_size", 1280), ("hidden_size", 640), ("head_dim", 64)];
    panels_change_no_bit(WeightFormat::Int8, false, &changes);
}

/// FP8 with scales by block: slices of one block, of a half, and of one and a half; o_proj and down_proj with and
/// without panels.
#[test]
fn scales_by_block_give_the_cpus_logits_in_rows_and_in_panels() {
    let (_short, short) = changed_config("tests/golden/qwen3_norms/config.json", &[("head_dim", 16)]);
    let (_whole, whole) =
        changed_config(PANELS, &[("hidden_size", 1024), ("head_dim", 64), ("num_hidden_layers", 1)]);
    let uneven = [("intermediate_size", 1536), ("hidden_size", 640), ("head_dim", 64)];
    let (_uneven, uneven) = changed_config(PANELS, &uneven);
    for options in [short, whole, uneven] {
        let options = LoadOptions { weights: WeightFormat::Fp8, kv_memory_bytes: 8 << 20, ..options };
        let random = |emulator: Emulator| {
            let load = |source: &dyn TensorSource, model| {
                load_on(Ranks::alone(emulator), &options, &InBlocks(source), InBlocks::model(model))
            };
            run(&mut Engine::random_by(&options, 5, load).unwrap()).unwrap()
        };
        let of_panels = random(Emulator::build());
        assert!(of_panels == random(Emulator::build().without_panels()), "the bits differ");
        let load = |source: &dyn TensorSource, model| {
            load_on_cpu(&options, &InBlocks(source), InBlocks::model(model), None)
        };
        let of_cpu = run(&mut Engine::random_by(&options, 5, load).unwrap()).unwrap();
        let distance = distance(&of_panels, &of_cpu);
        println!("{}: {distance:e}", options.model_dir.display());
        assert!(distance <= 1e-2, "{distance} of the largest logit apart");
        // Scales of rows give other logits.
        let of_rows = run(&mut Engine::random(&options, 5).unwrap()).unwrap();
        assert!(of_cpu != of_rows);
    }
}

fn panels_change_no_bit(weights: WeightFormat, is_tied: bool, changes: &[(&str, u64)]) {
    let (dir, options) = changed_config(PANELS, changes);
    let options = LoadOptions { weights, kv_memory_bytes: 8 << 20, ..options };
    let path = dir.path().join("config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    let tied = format!("\"tie_word_embeddings\":{is_tied}");
    std::fs::write(&path, config.replace("\"tie_word_embeddings\":false", &tied)).unwrap();
    assert!(std::fs::read_to_string(&path).unwrap().contains(&tied));
    let random = |emulator: fn() -> Emulator| {
        Engine::random_by(&options, 5, |source, model| {
            load_on(Ranks::alone(emulator()), &options, source, model)
        })
        .unwrap()
    };
    let of_panels = run(&mut random(Emulator::build)).unwrap();
    let of_rows = run(&mut random(|| Emulator::build().without_panels())).unwrap();
    assert!(of_panels == of_rows, "the bits differ");
    let distance = distance(&of_panels, &run(&mut Engine::random(&options, 5).unwrap()).unwrap());
    let tolerance = if weights == WeightFormat::Int8 { 2e-2 } else { 1e-2 };
    assert!(distance <= tolerance, "{distance} of the largest logit apart");
}

#[test]
fn a_rows_logits_do_not_depend_on_how_it_is_batched() {
    [WeightFormat::Bf16, WeightFormat::Fp8].into_iter().for_each(batched_in_parts);
}

fn batched_in_parts(weights: WeightFormat) {
    let dir = with_heads("qwen3_norms", &[("head_dim", 16)]);
    let ids: Vec<u32> = (0..40).map(|i| 2 + i * 5 % 60).collect();
    let logits_of = |cuts: &[usize]| {
        let mut engine = random_pair(&dir, weights).1;
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
    assert!(whole == logits_of(&[1, 2, 17, 33, 34, 40]), "{weights:?}: cut otherwise, the bits differ");
}

/// 700 rows fit into one pass; the default limit of 512 would need two.
#[test]
fn a_long_pass_gives_the_bits_of_short_ones() {
    let dir = with_heads("qwen3_norms", &[("head_dim", 16), ("max_position_embeddings", 1024)]);
    let ids: Vec<u32> = (0..700).map(|i| 2 + i * 5 % 60).collect();
    assert!((513..=PASS_LIMITS.rows).contains(&ids.len()));
    let last_logits = |pieces: &[&[u32]]| {
        let mut engine = random_pair(&dir, WeightFormat::Bf16).1;
        let slot = engine.open();
        let mut last = Vec::new();
        for &token_ids in pieces {
            let logits = engine.forward(&[SequenceRows { slot, token_ids, num_logits: 100 }]).unwrap();
            last = (0..logits.rows()).flat_map(|row| logits.row(row).to_vec()).map(f32::to_bits).collect();
        }
        last
    };
    assert!(last_logits(&[&ids]) == last_logits(&[&ids[..512], &ids[512..]]), "the bits differ");
}

#[test]
fn heads_without_kernels_are_refused() {
    let options = options("tests/golden/llama_tied", WeightFormat::Bf16);
    let engine = Engine::load_by(&options, |source, model| on_emulator(&options, source, model));
    let error = engine.unwrap_err().to_string();
    assert_eq!(error, "attention: head_dim is 8, expected one of [16, 32, 64, 96, 128]");
}

#[test]
fn formats_without_kernels_are_refused() {
    for (weights, name) in [(WeightFormat::F32, "f32"), (WeightFormat::Int4, "int4")] {
        let options = options("../models/demo/draft", weights);
        let engine = Engine::load_by(&options, |source, model| on_emulator(&options, source, model));
        let error = engine.unwrap_err().to_string();
        let advice = "pass --weights bf16 or fp8, or int8 if the checkpoint is bf16";
        assert!(error.starts_with(name) && error.ends_with(advice), "{error}");
    }
}

/// int8 and fp8 of a checkpoint that is not bf16: only fp8 rounds the embedding table.
#[test]
fn int8_of_an_f16_checkpoint_is_refused_with_advice_that_works() {
    let check = |weights| {
        let mut config = crate::model_config::tests::tiny();
        config.head_dim = 16;
        let formats = Formats::resolve(weights, MatrixFormat::F32);
        check_model(&ModelSpec { config, formats }).map_err(|error| error.to_string())
    };
    let error = check(WeightFormat::Int8).unwrap_err();
    assert!(error.starts_with("--weights int8 keeps the embedding table"), "{error}");
    assert!(error.ends_with("pass --weights bf16 or fp8"), "{error}");
    assert_eq!((check(WeightFormat::Bf16), check(WeightFormat::Fp8)), (Ok(()), Ok(())));
    assert!(check(WeightFormat::AsStored).unwrap_err().starts_with("f32 weights"));
    assert!(check(WeightFormat::Int4).unwrap_err().starts_with("int4 weights"));
}
