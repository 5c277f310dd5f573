//! Logits and greedy tokens compared with transformers, for every family and rope variant and for the bundled
//! pair (`golden/make_golden.py` created the files).

use std::path::Path;

use crate::support::{argmax, demo_dir, feed, golden_cases, golden_dir, load};
use engine::{Engine, TokenId, WeightFormat};
use safetensors::SafeTensors;

/// The results of transformers for a prompt.
struct Expected {
    prompt: Vec<TokenId>,
    greedy: Vec<TokenId>,
    rows: Vec<usize>,
    /// `[rows]` of logits.
    logits: Vec<Vec<f32>>,
}

impl Expected {
    fn read(dir: &Path) -> Self {
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
        let list = |name: &str| -> Vec<u64> {
            json[name].as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).collect()
        };
        let ids = |name: &str| list(name).into_iter().map(|id| id as TokenId).collect();
        let bytes = std::fs::read(dir.join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor("logits").unwrap();
        let numbers: Vec<f32> =
            tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        Self {
            prompt: ids("prompt"),
            greedy: ids("greedy"),
            rows: list("rows").into_iter().map(|row| row as usize).collect(),
            logits: numbers.chunks_exact(tensor.shape()[1]).map(<[f32]>::to_vec).collect(),
        }
    }

    /// The largest difference, and a description of its location.
    fn worst(&self, engine: &mut Engine) -> (f32, String) {
        let ids = [self.prompt.as_slice(), &self.greedy].concat();
        let slot = engine.open();
        let found = feed(engine, slot, &ids, ids.len());
        engine.close(slot);
        let mut worst = (0.0, String::new());
        for (&row, expected) in self.rows.iter().zip(&self.logits) {
            for (id, (&found, &expected)) in found[row].iter().zip(expected).enumerate() {
                let difference = (found - expected).abs();
                if difference >= worst.0 || difference.is_nan() {
                    worst = (difference, format!("row {row}, id {id}: {found}, expected {expected}"));
                }
            }
        }
        assert!(!worst.0.is_nan(), "{}", worst.1);
        worst
    }

    /// The greedy continuation, one row at a time.
    fn continuation(&self, engine: &mut Engine) -> Vec<TokenId> {
        let slot = engine.open();
        let mut logits = feed(engine, slot, &self.prompt, 1);
        let mut continuation = Vec::new();
        while continuation.len() < self.greedy.len() {
            let id = argmax(&logits[0]);
            continuation.push(id);
            logits = feed(engine, slot, &[id], 1);
        }
        engine.close(slot);
        continuation
    }
}

#[test]
fn every_golden_checkpoint_agrees_in_f32() {
    for case in golden_cases() {
        let dir = golden_dir().join(&case);
        let expected = Expected::read(&dir);
        let mut engine = load(&dir, WeightFormat::F32, 1);
        let (difference, place) = expected.worst(&mut engine);
        println!("{case}: worst {difference:e} at {place}");
        assert!(difference < 1e-4, "{case}: {difference:e} at {place}");
        assert_eq!(expected.continuation(&mut engine), expected.greedy, "{case}");
    }
}

/// bf16 rounds GEMM inputs and KV to 8 bits; logits of these models spread over about ten units.
#[test]
fn every_golden_checkpoint_is_close_in_bf16() {
    for case in golden_cases() {
        let dir = golden_dir().join(&case);
        let (difference, place) = Expected::read(&dir).worst(&mut load(&dir, WeightFormat::Bf16, 1));
        println!("{case}: worst {difference} at {place}");
        assert!(difference < 0.6, "{case}: {difference} at {place}");
        assert!(difference > 1e-4, "{case}: bf16 is not rounding at all");
    }
}

#[test]
fn the_bundled_pair_agrees() {
    for role in ["target", "draft"] {
        let mut exact = load(&demo_dir(role), WeightFormat::F32, 1);
        let mut rounded = load(&demo_dir(role), WeightFormat::AsStored, 1);
        for prompt in ["sql", "code", "chat"] {
            let expected = Expected::read(&golden_dir().join(format!("demo/{role}_{prompt}")));
            let (difference, place) = expected.worst(&mut exact);
            println!("{role} {prompt}: f32 worst {difference:e} at {place}");
            assert!(difference < 1e-4, "{role} {prompt}: {difference:e} at {place}");
            assert_eq!(expected.continuation(&mut exact), expected.greedy, "{role} {prompt}");
            let (difference, place) = expected.worst(&mut rounded);
            println!("{role} {prompt}: bf16 worst {difference} at {place}");
            assert!(difference < 0.3, "{role} {prompt}: {difference} at {place}");
        }
    }
}

#[test]
fn eos_ids_of_generation_config_take_precedence() {
    let eos =
        |case: &str| load(&golden_dir().join(case), WeightFormat::AsStored, 1).info().eos_token_ids.clone();
    assert_eq!(eos("qwen3_norms"), [5, 3]);
    assert_eq!(eos("llama_tied"), [3]);
}
