//! The accuracy of quantization for the bundled pair, compared with bf16 along the texts of each task type:
//! how often the greedy choice stays the same, and how large logit errors are. Run with `--no-capture` for
//! the table. The bounds are loose; a wrong kernel is far outside.

use std::path::Path;

use engine::{Engine, LoadOptions, TokenId, WeightFormat};
use tokenizers::Tokenizer;

use crate::support::{argmax, demo_dir, feed, golden_dir, load};

/// Number of texts per task.
const TEXTS: usize = 2;
/// Number of positions to compare per text.
const POSITIONS: usize = 128;

/// A task type and the ids of some of its prompts, each with its completion.
pub(crate) struct Task {
    pub(crate) name: String,
    pub(crate) texts: Vec<Vec<TokenId>>,
}

/// All task types.
pub(crate) fn tasks() -> Vec<Task> {
    let tokenizer = Tokenizer::from_file(demo_dir("target").join("tokenizer.json")).unwrap();
    let mut files: Vec<_> =
        std::fs::read_dir(demo_dir("prompts")).unwrap().map(|f| f.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "jsonl"));
    files.sort();
    let text = |line: &str| {
        let json: serde_json::Value = serde_json::from_str(line).unwrap();
        let whole = format!("{}\n{}", json["prompt"].as_str().unwrap(), json["completion"].as_str().unwrap());
        let mut ids = tokenizer.encode(whole, false).unwrap().get_ids().to_vec();
        ids.truncate(POSITIONS);
        ids
    };
    let task = |file: &Path| Task {
        name: file.file_stem().unwrap().to_string_lossy().into_owned(),
        texts: std::fs::read_to_string(file).unwrap().lines().take(TEXTS).map(text).collect(),
    };
    files.iter().map(|file| task(file)).collect()
}

/// Sums over positions.
#[derive(Default, Clone, Copy)]
pub(crate) struct Distance {
    positions: usize,
    agreed: usize,
    /// Sum of squared logit errors.
    error: f64,
    /// Sum of squared distances of the reference's logits from their mean.
    spread: f64,
}

impl Distance {
    fn add(&mut self, found: &[f32], reference: &[f32]) {
        let mean = reference.iter().map(|&x| f64::from(x)).sum::<f64>() / reference.len() as f64;
        self.positions += 1;
        self.agreed += usize::from(argmax(found) == argmax(reference));
        for (&found, &reference) in found.iter().zip(reference) {
            self.error += f64::from(found - reference).powi(2);
            self.spread += (f64::from(reference) - mean).powi(2);
        }
    }

    /// Fraction of positions with the same greedy choice.
    pub(crate) fn agreement(self) -> f64 {
        self.agreed as f64 / self.positions as f64
    }

    /// Error of a logit relative to the spread of logits around their mean.
    pub(crate) fn relative_error(self) -> f64 {
        (self.error / self.spread).sqrt()
    }
}

fn logits(engine: &mut Engine, ids: &[TokenId]) -> Vec<Vec<f32>> {
    let slot = engine.open();
    let logits = feed(engine, slot, ids, ids.len());
    engine.close(slot);
    logits
}

/// Compares a model of the pair in a format with itself in bf16.
fn compare_formats(role: &str, format: WeightFormat, tasks: &[Task]) -> Distance {
    let dir = demo_dir(role);
    let (mut exact, mut quantized) = (load(&dir, WeightFormat::Bf16, 1), load(&dir, format, 1));
    compare(&format!("{role:<7} {format:?}"), (&mut quantized, &mut exact), tasks)
}

/// Prints a line per task and returns the sum over all tasks.
#[expect(clippy::print_stdout, reason = "the table is what a person runs this test for")]
pub(crate) fn compare(
    label: &str,
    (found, reference): (&mut Engine, &mut Engine),
    tasks: &[Task],
) -> Distance {
    let mut all = Distance::default();
    for task in tasks {
        let mut here = Distance::default();
        for ids in &task.texts {
            for (found, reference) in logits(found, ids).iter().zip(logits(reference, ids)) {
                here.add(found, &reference);
                all.add(found, &reference);
            }
        }
        let name = &task.name;
        println!(
            "{label} {name:<14} greedy agreement {:.3}, logit error {:.4}",
            here.agreement(),
            here.relative_error()
        );
    }
    println!(
        "{label} {:<14} greedy agreement {:.3}, logit error {:.4}",
        "all",
        all.agreement(),
        all.relative_error()
    );
    all
}

#[test]
fn quantized_weights_are_close_to_bf16() {
    let tasks = tasks();
    assert!(tasks.len() >= 10, "prompts are missing");
    for (format, least_agreement, most_error) in
        [(WeightFormat::Fp8, 0.90, 0.06), (WeightFormat::Int8, 0.90, 0.05), (WeightFormat::Int4, 0.60, 0.30)]
    {
        for role in ["target", "draft"] {
            let all = compare_formats(role, format, &tasks);
            assert!(all.agreement() > least_agreement, "{role} {format:?}: {}", all.agreement());
            assert!(all.relative_error() < most_error, "{role} {format:?}: {}", all.relative_error());
            assert!(all.relative_error() > 1e-4, "{role} {format:?}: nothing was quantized");
        }
    }
}

/// A random model depends only on a configuration and a seed; every format holds the same one.
#[test]
fn a_random_model_depends_only_on_its_seed() {
    let random = |weights, seed, threads| {
        let options = LoadOptions {
            threads,
            ..LoadOptions::new(golden_dir().join("qwen3_norms/config.json"), weights, 1 << 20)
        };
        Engine::random(&options, seed).unwrap()
    };
    let ids: Vec<TokenId> = (0..40).map(|i| i * 29 % 112).collect();
    let of = |weights, seed, threads| logits(&mut random(weights, seed, threads), &ids);
    assert_eq!(of(WeightFormat::F32, 5, 1), of(WeightFormat::F32, 5, 3));
    assert_eq!(of(WeightFormat::AsStored, 5, 1), of(WeightFormat::Bf16, 5, 1));
    assert_ne!(of(WeightFormat::F32, 5, 1), of(WeightFormat::F32, 6, 1));
    let mut distance = Distance::default();
    for (found, reference) in of(WeightFormat::Int8, 5, 1).iter().zip(of(WeightFormat::F32, 5, 1)) {
        distance.add(found, &reference);
    }
    assert!(distance.relative_error() < 0.1, "{}", distance.relative_error());
    let id = |weights, seed| random(weights, seed, 1).info().numerics_id.clone();
    let ids = [
        id(WeightFormat::F32, 5),
        id(WeightFormat::Bf16, 5),
        id(WeightFormat::Fp8, 5),
        id(WeightFormat::Int8, 5),
        id(WeightFormat::Int4, 5),
        id(WeightFormat::Int8, 6),
    ];
    for (i, one) in ids.iter().enumerate() {
        assert!(!ids[..i].contains(one), "two formats share an id");
    }
}
