//! The number of tensor parallel ranks changes no bit: every family, every weight format, key-value heads
//! that are split and ones that are replicated, blocks that do not divide evenly.

use std::path::{Path, PathBuf};

use engine::{Engine, EngineError, LoadOptions, SequenceRows, TokenId, WeightFormat};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{feed, golden_dir};

const FORMATS: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8, WeightFormat::Int4];

/// A golden case's configuration, with enough heads for eight ranks.
fn config_of(case: &str, dir: &TempDir, changes: &Value) -> PathBuf {
    let text = std::fs::read(golden_dir().join(case).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    let sizes = json!({
        "hidden_size": 72, "num_attention_heads": 8, "head_dim": 10, "intermediate_size": 300, "vocab_size": 131,
    });
    for (name, value) in [&sizes, changes].into_iter().flat_map(|fields| fields.as_object().unwrap()) {
        config[name] = value.clone();
    }
    let path = dir.path().join("config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    path
}

fn load(config: &Path, weights: WeightFormat, ranks: usize) -> Result<Engine, EngineError> {
    let options = LoadOptions {
        tensor_parallel: ranks,
        max_model_len: Some(200),
        ..LoadOptions::new(config, weights, 16 << 20)
    };
    Engine::random(&options, 3)
}

/// Bits of the logits of two sequences that grow in the same batches, one of them truncated in between.
fn bits(engine: &mut Engine) -> Vec<u32> {
    let ids: Vec<TokenId> = (0..70).map(|i| i * 29 % 131).collect();
    let (a, b) = (engine.open(), engine.open());
    let mut found = feed(engine, a, &ids[..37], 3);
    for round in 0..4 {
        let rows = |slot, ids, num_logits| SequenceRows { slot, token_ids: ids, num_logits };
        let batch = [rows(b, &ids[round..round + 9], 9), rows(a, &ids[40 + round..43 + round], 2)];
        let logits = engine.forward(&batch).unwrap();
        found.extend((0..logits.rows()).map(|i| logits.row(i).to_vec()));
        engine.truncate(a, 38);
    }
    assert!(found.iter().all(|row| row.len() == 131));
    found.concat().iter().map(|x| x.to_bits()).collect()
}

#[test]
fn ranks_change_no_bit() {
    let dir = TempDir::new().unwrap();
    let cases = [
        ("llama_tied", json!({"num_key_value_heads": 8, "attention_bias": true, "mlp_bias": true})),
        ("llama_rope_yarn_new", json!({"num_key_value_heads": 1, "tie_word_embeddings": false})),
        ("mistral_window", json!({"num_key_value_heads": 4})),
        ("qwen2_window_layers", json!({"num_key_value_heads": 2})),
        ("qwen3_norms", json!({"num_key_value_heads": 8, "tie_word_embeddings": true})),
    ];
    for (case, changes) in &cases {
        let config = config_of(case, &dir, changes);
        for format in FORMATS {
            let mut alone = load(&config, format, 1).unwrap();
            let expected = bits(&mut alone);
            for ranks in [2, 4, 8] {
                let mut engine = load(&config, format, ranks).unwrap();
                assert!(bits(&mut engine) == expected, "{case} {format:?}, {ranks} ranks");
                assert_eq!(engine.info().numerics_id, alone.info().numerics_id);
                assert_eq!(engine.info().num_parameters, alone.info().num_parameters);
            }
        }
    }
}

#[test]
fn unsupported_splits_are_rejected_by_name() {
    let dir = TempDir::new().unwrap();
    let check = |ranks, changes: Value, words: &str| {
        let config = config_of("llama_tied", &dir, &changes);
        let error = load(&config, WeightFormat::F32, ranks).unwrap_err().to_string();
        assert!(error.contains("tensor_parallel") && error.contains(words), "{error}");
    };
    check(3, json!({}), "1, 2, 4 or 8");
    check(8, json!({"num_attention_heads": 12, "num_key_value_heads": 4}), "12 attention heads");
    check(4, json!({"num_attention_heads": 24, "num_key_value_heads": 6}), "6 key-value heads");
    check(8, json!({"num_key_value_heads": 8, "intermediate_size": 100}), "feed-forward of 100");
}
