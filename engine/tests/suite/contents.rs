//! Checkpoints whose files hold something else than their configuration says: other projections of the
//! vocabulary than the tied one, tensors that nothing uses, quantizations that are not supported.

use std::path::Path;

use engine::{Engine, LoadOptions, WeightFormat};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Tensors, golden_dir, read_tensors, write_tensors};

/// A copy of a golden checkpoint with one file of tensors, with changes.
fn changed(case: &str, config: Value, change: impl FnOnce(&mut Tensors)) -> TempDir {
    let (from, dir) = (golden_dir().join(case), TempDir::new().unwrap());
    let mut object: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    for (name, value) in config.as_object().unwrap() {
        object[name] = value.clone();
    }
    std::fs::write(dir.path().join("config.json"), object.to_string()).unwrap();
    let mut tensors = read_tensors(&from);
    change(&mut tensors);
    write_tensors(dir.path(), &tensors);
    dir
}

fn load(dir: &Path, weights: WeightFormat) -> Result<Engine, String> {
    let options = LoadOptions::new(dir, weights, 16 << 20);
    Engine::load(&options).map_err(|error| error.to_string())
}

#[test]
fn a_projection_beside_tied_embeddings_must_equal_them() {
    let with_head = |first_byte: u8| {
        changed("llama_tied", json!({}), |tensors| {
            let table = tensors.iter().find(|(name, ..)| name == "model.embed_tokens.weight").unwrap();
            let mut head = table.clone();
            head.0 = "lm_head.weight".to_owned();
            head.3[0] ^= first_byte;
            tensors.push(head);
        })
    };
    assert!(load(with_head(0).path(), WeightFormat::AsStored).is_ok());
    let error = load(with_head(1).path(), WeightFormat::AsStored).unwrap_err();
    for words in ["`tie_word_embeddings`", "`lm_head.weight`", "set it to false", "remove"] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn tensors_that_nothing_uses_do_not_change_the_format() {
    let plain = changed("mistral_full", json!({}), |_| ());
    let extra = changed("mistral_full", json!({}), |tensors| {
        let name = "model.layers.0.self_attn.rotary_emb.inv_freq".to_owned();
        tensors.push((name, Dtype::F32, vec![2], vec![0; 8]));
    });
    let bytes = |dir: &TempDir| load(dir.path(), WeightFormat::AsStored).unwrap().info().weight_bytes;
    assert_eq!(bytes(&plain), bytes(&extra), "both are bf16");
}

/// As after merging a fine-tune that held them so.
#[test]
fn norms_in_f32_do_not_change_the_format() {
    let widen = |bytes: &[u8]| bytes.chunks_exact(2).flat_map(|half| [0, 0, half[0], half[1]]).collect();
    let wide = changed("mistral_full", json!({}), |tensors| {
        for (name, dtype, _, bytes) in tensors.iter_mut().filter(|(name, ..)| name.contains("norm")) {
            assert_eq!(*dtype, Dtype::BF16, "{name}");
            (*dtype, *bytes) = (Dtype::F32, widen(bytes));
        }
    });
    let plain = changed("mistral_full", json!({}), |_| ());
    let bytes = |dir: &TempDir| load(dir.path(), WeightFormat::AsStored).unwrap().info().weight_bytes;
    assert_eq!(bytes(&plain), bytes(&wide), "both are bf16");
}

#[test]
fn unsupported_quantizations_are_named() {
    let awq = json!({"quantization_config": {"quant_method": "awq", "bits": 4}});
    let fp8 =
        json!({"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}});
    let without_matrix = |config: &Value| {
        let dir = changed("llama_tied", config.clone(), |tensors| {
            tensors.retain(|(name, ..)| !name.contains("up_proj"));
        });
        load(dir.path(), WeightFormat::AsStored).unwrap_err()
    };
    let mlx = json!({"quantization_config": {"group_size": 64, "bits": 4}});
    for (config, method) in [(awq, "(awq)"), (mlx, "(4 bits)")] {
        let error = without_matrix(&config);
        for words in ["up_proj.weight` is missing", method, "only FP8 is supported"] {
            assert!(error.contains(words), "{error}");
        }
    }
    let error = without_matrix(&fp8);
    assert!(!error.contains("only FP8"), "{error}");
}
