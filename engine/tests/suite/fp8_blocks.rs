//! FP8 checkpoints with scales by block of 128 x 128, held as stored: logits `==` the oracle's with either name of
//! the scales, on any number of ranks, also where a rank begins within a block.

use std::path::Path;

use engine::{Engine, LoadOptions, Oracle, WeightFormat};
use half::bf16;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use crate::fp8::{ScaleGranularity, distance, ids, logits, options, write_both, write_both_of};
use crate::small_model::write_small_model;
use crate::support::{demo_dir, load, read_tensors, write_tensors};

/// Names the scales as compressed-tensors does, and stores them as f32.
fn rename_scales(dir: &Path) {
    let mut tensors = read_tensors(dir);
    let mut renamed = 0;
    for (name, dtype, _, bytes) in &mut tensors {
        if let Some(matrix) = name.strip_suffix("_scale_inv") {
            let scales: Vec<bf16> = bytemuck::pod_collect_to_vec(bytes);
            let scales: Vec<f32> = scales.into_iter().map(bf16::to_f32).collect();
            (*name, *dtype) = (format!("{matrix}_scale"), Dtype::F32);
            *bytes = bytemuck::cast_slice(&scales).to_vec();
            renamed += 1;
        }
    }
    assert!(renamed > 0);
    write_tensors(dir, &tensors);
}

/// Adds a `quantization_config` to config.json.
fn set_quantization(dir: &Path, quantization: Value) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["quantization_config"] = quantization;
    std::fs::write(path, config.to_string()).unwrap();
}

/// As Qwen3-8B-FP8 and DeepSeek-V3 write it.
fn by_scale_inv() -> Value {
    let size = [128, 128];
    json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": size})
}

/// As llm-compressor writes it with the scheme FP8_BLOCK.
fn by_compressed_tensors() -> Value {
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]});
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
    json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups})
}

/// The bundled models have blocks that are cut at the end of rows and columns, and down_proj slices of 64 and 96
/// columns, so that the second of two ranks begins within a block.
#[test]
fn weights_by_block_agree_with_the_oracle() {
    for role in ["draft", "target"] {
        let (fp8, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_both(&demo_dir(role), ScaleGranularity::Block, fp8.path(), plain.path());
        set_quantization(fp8.path(), by_scale_inv());
        let oracle = Oracle::load(fp8.path(), WeightFormat::Fp8).unwrap();
        let expected = oracle.logits_at_every_position(&ids());
        for ranks in [1, 2, 4] {
            let engine = Engine::load(&options(fp8.path(), WeightFormat::Fp8, ranks));
            assert!(logits(&mut engine.unwrap()) == expected, "{role}, {ranks} ranks");
        }
        // Close to the dequantized numbers, each of which bf16 would round.
        let whole = logits(&mut load(plain.path(), WeightFormat::F32, 1));
        assert!(expected != whole && distance(&expected, &whole) < 0.03, "{}", distance(&expected, &whole));
        let id = |weights| load(fp8.path(), weights, 1).info().numerics_id.clone();
        assert_eq!(id(WeightFormat::AsStored), id(WeightFormat::Fp8));
        assert_ne!(id(WeightFormat::Fp8), id(WeightFormat::Bf16), "a separate numerics class");

        rename_scales(fp8.path());
        set_quantization(fp8.path(), by_compressed_tensors());
        let renamed = logits(&mut load(fp8.path(), WeightFormat::Fp8, 2));
        assert!(renamed == expected, "{role}: the scales' names");
    }
}

/// The vocabulary's projection by block, too; then matrices that are stored with one scale, or are quantized at
/// load, beside those with scales by block. Four ranks begin within blocks of down_proj's 288 columns.
#[test]
fn other_matrices_beside_those_with_scales_by_block_agree_with_the_oracle() {
    let all = |name: &str| name.ends_with("_proj.weight") || name == "lm_head.weight";
    let some = |name: &str| ["q_proj", "up_proj", "down_proj"].iter().any(|module| name.contains(module));
    let vocabulary = |name: &str| name == "lm_head.weight";
    let chosen: [&dyn Fn(&str) -> bool; 3] = [&all, &some, &vocabulary];
    for (i, is_chosen) in chosen.into_iter().enumerate() {
        let [model, fp8, plain] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        write_small_model(model.path(), 2);
        write_both_of(model.path(), ScaleGranularity::Block, (fp8.path(), plain.path()), is_chosen);
        let oracle = Oracle::load(fp8.path(), WeightFormat::Fp8).unwrap();
        let expected = oracle.logits_at_every_position(&ids());
        for ranks in [1, 2, 4, 8] {
            let Ok(mut engine) = Engine::load(&options(fp8.path(), WeightFormat::Fp8, ranks)) else {
                assert_eq!(ranks, 8, "four heads are refused on eight ranks only");
                continue;
            };
            assert!(logits(&mut engine) == expected, "case {i}, {ranks} ranks");
        }
    }
}

/// As `--isa avx2`. A process has one instruction set, and nextest runs each test in a process of its own.
#[test]
fn weights_by_block_agree_with_the_oracle_on_avx2() {
    if let Err(error) = engine::use_instruction_set("avx2") {
        println!("skipped: {error}");
        return;
    }
    let (fp8, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_both(&demo_dir("draft"), ScaleGranularity::Block, fp8.path(), plain.path());
    let oracle = Oracle::load(fp8.path(), WeightFormat::Fp8).unwrap();
    let expected = oracle.logits_at_every_position(&ids());
    assert!(logits(&mut load(fp8.path(), WeightFormat::Fp8, 2)) == expected);
    assert_eq!(engine::instruction_set().unwrap(), "avx2");
}

/// Zeros between the columns of a block would change the order of its sums.
#[test]
fn ballast_is_refused_with_scales_by_block() {
    let (fp8, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_both(&demo_dir("draft"), ScaleGranularity::Block, fp8.path(), plain.path());
    let enlarged =
        |weights| Engine::load(&LoadOptions { ballast: 300_000, ..options(fp8.path(), weights, 1) });
    for weights in [WeightFormat::Fp8, WeightFormat::AsStored] {
        let error = enlarged(weights).err().unwrap().to_string();
        assert!(error.contains("ballast") && error.contains("`weights` bf16"), "{error}");
    }
    assert!(enlarged(WeightFormat::Bf16).is_ok());
}
