//! FP8 checkpoints: the engine's logits equal those of a checkpoint with the dequantized numbers in f32. With
//! FP8 weights they equal the oracle's, on any number of ranks and with ballast. Missing scales and scales of
//! unsupported shape are rejected by name. Scales by block: also `fp8_blocks`.

use std::path::Path;
use std::sync::LazyLock;

use engine::{Engine, LoadOptions, Oracle, WeightFormat};
use half::bf16;
use safetensors::tensor::Dtype;

use crate::quantized::{Task, compare, tasks};
use crate::support::{Tensors, demo_dir, feed, golden_dir, load, read_tensors, write_tensors};

/// The numbers that share a scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ScaleGranularity {
    Tensor,
    Row,
    Block,
}

/// A matrix as it is stored, and its dequantized numbers.
struct Quantized {
    bytes: Vec<u8>,
    scales: Vec<bf16>,
    scale_shape: Vec<usize>,
    numbers: Vec<f32>,
}

/// The value of an eight-bit float, by the format's definition.
fn value(byte: u8) -> f64 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f64::from(byte & 7) / 8.0);
    let size = if exponent == 0 { fraction / 64.0 } else { (1.0 + fraction) * f64::powi(2.0, exponent - 7) };
    if byte < 128 { size } else { -size }
}

/// The nearest eight-bit float.
fn nearest(x: f64) -> u8 {
    static SIZES: LazyLock<Vec<f64>> = LazyLock::new(|| (0..127).map(value).collect());
    let above = SIZES.partition_point(|size| *size < x.abs()).clamp(1, 126);
    let size = if SIZES[above] - x.abs() < x.abs() - SIZES[above - 1] { above } else { above - 1 };
    (size as u8) | (u8::from(x < 0.0) << 7)
}

fn quantize(numbers: &[f32], [rows, columns]: [usize; 2], granularity: ScaleGranularity) -> Quantized {
    let (tall, wide) = match granularity {
        ScaleGranularity::Tensor => (rows, columns),
        ScaleGranularity::Row => (1, columns),
        ScaleGranularity::Block => (128, 128),
    };
    let grid = [rows.div_ceil(tall), columns.div_ceil(wide)];
    let scale_of = |block: usize| {
        let (top, left) = (block / grid[1] * tall, block % grid[1] * wide);
        let of_row = |row: usize| &numbers[row * columns + left..row * columns + columns.min(left + wide)];
        let largest = (top..rows.min(top + tall)).flat_map(of_row).fold(1e-6f32, |max, x| max.max(x.abs()));
        bf16::from_f32(largest / 448.0)
    };
    let scales: Vec<bf16> = (0..grid[0] * grid[1]).map(scale_of).collect();
    let scale = |i: usize| scales[i / columns / tall * grid[1] + i % columns / wide].to_f32();
    let bytes: Vec<u8> =
        numbers.iter().enumerate().map(|(i, x)| nearest(f64::from(*x) / f64::from(scale(i)))).collect();
    let dequantize = |(i, byte): (usize, &u8)| value(*byte) as f32 * scale(i);
    let numbers = bytes.iter().enumerate().map(dequantize).collect();
    let scale_shape = match granularity {
        ScaleGranularity::Tensor => vec![1],
        ScaleGranularity::Row => vec![rows, 1],
        ScaleGranularity::Block => grid.to_vec(),
    };
    Quantized { bytes, scales, scale_shape, numbers }
}

/// Writes a checkpoint with FP8 projections, and one with the dequantized numbers.
pub(crate) fn write_both(from: &Path, granularity: ScaleGranularity, fp8_dir: &Path, plain_dir: &Path) {
    write_both_of(from, granularity, (fp8_dir, plain_dir), |name| name.ends_with("_proj.weight"));
}

/// Like [`write_both`], for the matrices that `is_chosen` selects.
pub(crate) fn write_both_of(
    from: &Path,
    granularity: ScaleGranularity,
    (fp8_dir, plain_dir): (&Path, &Path),
    is_chosen: impl Fn(&str) -> bool,
) {
    let (mut fp8, mut plain): (Tensors, Tensors) = (Vec::new(), Vec::new());
    for (name, dtype, shape, bytes) in read_tensors(from) {
        if !is_chosen(&name) {
            let whole = (name, dtype, shape, bytes);
            fp8.push(whole.clone());
            plain.push(whole);
            continue;
        }
        let numbers: Vec<f32> = match dtype {
            Dtype::BF16 => {
                let stored: Vec<bf16> = bytemuck::pod_collect_to_vec(&bytes);
                stored.into_iter().map(bf16::to_f32).collect()
            }
            _ => bytemuck::pod_collect_to_vec(&bytes),
        };
        let matrix = [shape[0], shape[1]];
        let Quantized { bytes, scales, scale_shape, numbers } = quantize(&numbers, matrix, granularity);
        let end = if granularity == ScaleGranularity::Block { "_scale_inv" } else { "_scale" };
        fp8.push((name.clone(), Dtype::F8_E4M3, shape.clone(), bytes));
        fp8.push((format!("{name}{end}"), Dtype::BF16, scale_shape, bytemuck::cast_slice(&scales).to_vec()));
        plain.push((name, Dtype::F32, shape, bytemuck::cast_slice(&numbers).to_vec()));
    }
    for (dir, tensors) in [(fp8_dir, fp8), (plain_dir, plain)] {
        write_tensors(dir, &tensors);
        std::fs::copy(from.join("config.json"), dir.join("config.json")).unwrap();
    }
}

pub(crate) fn options(dir: &Path, weights: WeightFormat, tensor_parallel: usize) -> LoadOptions {
    LoadOptions { threads: 2, tensor_parallel, ..LoadOptions::new(dir, weights, 64 << 20) }
}

pub(crate) fn ids() -> Vec<u32> {
    (0..40).map(|i| 4 + i * 7 % 90).collect()
}

/// The largest difference, relative to the largest logit.
pub(crate) fn distance(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f32 {
    let pairs = found.iter().flatten().zip(expected.iter().flatten());
    let largest = |numbers: &mut dyn Iterator<Item = f32>| numbers.fold(0.0f32, |max, x| max.max(x.abs()));
    largest(&mut pairs.map(|(a, b)| a - b)) / largest(&mut expected.iter().flatten().copied())
}

pub(crate) fn logits(engine: &mut Engine) -> Vec<Vec<f32>> {
    let slot = engine.open();
    let ids = ids();
    let mut all = feed(engine, slot, &ids[..33], 33);
    all.extend(feed(engine, slot, &ids[33..], 7));
    engine.close(slot);
    all
}

#[test]
fn fp8_checkpoints_give_the_bits_of_their_dequantized_numbers() {
    let golden = |name| golden_dir().join(name);
    // The last model has several blocks along both sides.
    for (model, granularity) in [
        (golden("llama_tied"), ScaleGranularity::Tensor),
        (golden("llama_tied"), ScaleGranularity::Row),
        (golden("llama_wide_heads"), ScaleGranularity::Block),
        (demo_dir("draft"), ScaleGranularity::Row),
        (demo_dir("draft"), ScaleGranularity::Block),
    ] {
        let (fp8, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_both(&model, granularity, fp8.path(), plain.path());
        for weights in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Int8] {
            let found = logits(&mut load(fp8.path(), weights, 2));
            assert!(
                found == logits(&mut load(plain.path(), weights, 1)),
                "{model:?}, {granularity:?}, {weights:?}"
            );
        }
        let ranks = |dir: &Path| logits(&mut Engine::load(&options(dir, WeightFormat::F32, 2)).unwrap());
        // Three heads cannot be split over two ranks.
        if !model.ends_with("llama_wide_heads") {
            assert!(ranks(fp8.path()) == ranks(plain.path()), "{model:?}, {granularity:?}, two ranks");
        }
        let ids = [5, 9, 13, 21];
        let oracle = Oracle::load(fp8.path(), WeightFormat::F32).unwrap();
        let mut engine = load(fp8.path(), WeightFormat::F32, 1);
        let slot = engine.open();
        assert!(
            feed(&mut engine, slot, &ids, 4) == oracle.logits_at_every_position(&ids),
            "{model:?}, {granularity:?}"
        );
        let ids = |dir: &Path| load(dir, WeightFormat::F32, 1).info().numerics_id.clone();
        assert_ne!(ids(fp8.path()), ids(plain.path()), "a separate numerics class");
    }
}

/// With FP8 weights: `==` to the oracle, which multiplies finished sums by scales; on one rank and two, with
/// ballast, and with the text split into two forwards.
#[test]
fn fp8_weights_agree_with_the_oracle() {
    let layers: fn(&str) -> bool = |name| name.ends_with("_proj.weight");
    let vocabulary_too = |name: &str| name.ends_with("_proj.weight") || name == "lm_head.weight";
    // The other matrices are quantized at load; in a model of random weights the difference is large.
    let some = |name: &str| ["q_proj", "up_proj", "down_proj"].iter().any(|module| name.contains(module));
    for (model, granularity, is_chosen, most) in [
        (golden_dir().join("llama_tied"), ScaleGranularity::Tensor, layers, 0.03),
        (golden_dir().join("llama_tied"), ScaleGranularity::Row, layers, 0.03),
        (golden_dir().join("mistral_full"), ScaleGranularity::Row, vocabulary_too, 0.03),
        (golden_dir().join("mistral_full"), ScaleGranularity::Tensor, some, 0.5),
        (demo_dir("draft"), ScaleGranularity::Row, layers, 0.03),
    ] {
        let (fp8, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_both_of(&model, granularity, (fp8.path(), plain.path()), is_chosen);
        let found = logits(&mut load(fp8.path(), WeightFormat::Fp8, 2));
        let oracle = Oracle::load(fp8.path(), WeightFormat::Fp8).unwrap();
        let expected = oracle.logits_at_every_position(&ids());
        assert!(found == expected, "{model:?}, {granularity:?}");
        for ranks in [1, 2] {
            let options = options(fp8.path(), WeightFormat::Fp8, ranks);
            let engine = Engine::load(&options);
            assert!(logits(&mut engine.unwrap()) == expected, "{model:?}, {granularity:?}, {ranks} ranks");
            let enlarged = Engine::load(&LoadOptions { ballast: 300_000, ..options });
            assert!(
                logits(&mut enlarged.unwrap()) == expected,
                "{model:?}, {granularity:?}, {ranks} ranks, ballast"
            );
        }
        // Close to the dequantized numbers, each of which bf16 would round.
        let whole = logits(&mut load(plain.path(), WeightFormat::F32, 1));
        assert!(found != whole && distance(&found, &whole) < most, "{}", distance(&found, &whole));
        let id = |weights| load(fp8.path(), weights, 1).info().numerics_id.clone();
        assert_ne!(id(WeightFormat::Fp8), id(WeightFormat::Bf16), "a separate numerics class");
    }
}

/// `auto`: FP8 where every projection is stored as FP8, bf16 where only some are.
#[test]
fn as_stored_keeps_fp8() {
    let layers: fn(&str) -> bool = |name| name.ends_with("_proj.weight");
    let some = |name: &str| name.ends_with("up_proj.weight");
    for (granularity, is_chosen, expected) in [
        (ScaleGranularity::Tensor, layers, WeightFormat::Fp8),
        (ScaleGranularity::Row, layers, WeightFormat::Fp8),
        (ScaleGranularity::Block, layers, WeightFormat::Fp8),
        (ScaleGranularity::Row, some, WeightFormat::Bf16),
    ] {
        let (fp8, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_both_of(&demo_dir("draft"), granularity, (fp8.path(), plain.path()), is_chosen);
        let id = |weights| load(fp8.path(), weights, 1).info().numerics_id.clone();
        assert_eq!(id(WeightFormat::AsStored), id(expected), "{granularity:?}");
        let oracle = Oracle::load(fp8.path(), WeightFormat::AsStored).unwrap();
        let expected = oracle.logits_at_every_position(&ids());
        assert!(logits(&mut load(fp8.path(), WeightFormat::AsStored, 1)) == expected, "{granularity:?}");
    }
}

/// A NaN code makes every result that depends on its row a NaN, on every rank.
#[test]
fn a_nan_code_makes_logits_nan() {
    for (model, granularity) in [
        (golden_dir().join("llama_tied"), ScaleGranularity::Row),
        (demo_dir("draft"), ScaleGranularity::Block),
    ] {
        let (fp8, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_both(&model, granularity, fp8.path(), plain.path());
        let mut tensors = read_tensors(fp8.path());
        let is_down = |name: &str| name == "model.layers.0.mlp.down_proj.weight";
        tensors.iter_mut().find(|(name, ..)| is_down(name)).unwrap().3[1] = 0xff;
        write_tensors(fp8.path(), &tensors);
        for ranks in [1, 2] {
            let mut engine = Engine::load(&options(fp8.path(), WeightFormat::Fp8, ranks)).unwrap();
            let found = logits(&mut engine);
            assert!(found.iter().flatten().all(|logit| logit.is_nan()), "{granularity:?}, {ranks} ranks");
        }
    }
}

#[test]
fn bad_scales_are_rejected_by_name() {
    const MATRIX: &str = "model.layers.0.self_attn.q_proj.weight";
    let (fp8, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let refusal = |change: &dyn Fn(&mut Tensors)| {
        write_both(&golden_dir().join("llama_tied"), ScaleGranularity::Row, fp8.path(), plain.path());
        let mut tensors = read_tensors(fp8.path());
        change(&mut tensors);
        write_tensors(fp8.path(), &tensors);
        let [numbers, as_fp8] = [WeightFormat::AsStored, WeightFormat::Fp8].map(|weights| {
            Engine::load(&options(fp8.path(), weights, 1)).err().map(|error| error.to_string())
        });
        assert_eq!(numbers, as_fp8, "independent of the weight format");
        numbers.unwrap_or_default()
    };
    let scales = format!("{MATRIX}_scale");
    let missing = refusal(&|tensors| tensors.retain(|(name, ..)| *name != scales));
    assert!(missing.contains(&scales) && missing.contains("model.safetensors"), "{missing}");
    let short = refusal(&|tensors| {
        let (_, _, shape, bytes) = tensors.iter_mut().find(|(name, ..)| *name == scales).unwrap();
        shape[0] -= 1;
        bytes.truncate(bytes.len() - 2);
    });
    assert!(short.contains(&scales) && short.contains("[31, 1]"), "{short}");
    let norm = refusal(&|tensors| {
        let norm = tensors.iter_mut().find(|(name, ..)| name == "model.norm.weight").unwrap();
        norm.1 = Dtype::F8_E4M3;
        norm.3.truncate(norm.2[0]);
    });
    assert!(norm.contains("model.norm.weight") && norm.contains("F8_E4M3"), "{norm}");
}

/// The accuracy of eight-bit floats for the bundled pair, dequantized to bf16 and as stored: how often each
/// model's greedy choice stays the same, and how often the draft's choice is the target's. Run with
/// `--no-capture` for the table.
#[test]
fn fp8_is_close_to_bf16() {
    let mut tasks = tasks();
    tasks.iter_mut().for_each(|task| task.texts.truncate(1));
    for weights in [WeightFormat::Bf16, WeightFormat::Fp8] {
        pair_in_fp8(&tasks, weights);
    }
}

fn pair_in_fp8(tasks: &[Task], weights: WeightFormat) {
    let folders = [(); 2].map(|()| (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()));
    let mut engines = Vec::new();
    for (role, (fp8, plain)) in ["draft", "target"].into_iter().zip(&folders) {
        write_both(&demo_dir(role), ScaleGranularity::Row, fp8.path(), plain.path());
        let (mut rounded, mut whole) =
            (load(fp8.path(), weights, 1), load(&demo_dir(role), WeightFormat::Bf16, 1));
        let all = compare(&format!("{role:<7} fp8 loaded as {weights:?}"), (&mut rounded, &mut whole), tasks);
        assert!(all.agreement() > 0.85, "{role}: {}", all.agreement());
        assert!((1e-3..0.15).contains(&all.relative_error()), "{role}: {}", all.relative_error());
        engines.push((rounded, whole));
    }
    let [(draft_fp8, draft), (target_fp8, target)] = &mut engines[..] else { panic!("two models") };
    let accepted = compare("draft bf16, target bf16", (draft, target), tasks).agreement();
    for (label, found) in [
        ("draft fp8,  target bf16", compare("draft fp8,  target bf16", (draft_fp8, target), tasks)),
        ("draft fp8,  target fp8 ", compare("draft fp8,  target fp8 ", (draft_fp8, target_fp8), tasks)),
    ] {
        assert!((found.agreement() - accepted).abs() < 0.05, "{label}: {} of {accepted}", found.agreement());
    }
}
