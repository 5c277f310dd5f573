//! Checkpoints that are missing, truncated, contradictory or noise: the error is one line that names the
//! file, field or tensor. Never a panic, never memory allocated by what a file claims.

use std::path::{Path, PathBuf};

use crate::support::{Random, golden_dir};
use engine::{Engine, EngineError, LoadOptions, Oracle, WeightFormat};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A copy of a golden checkpoint for tests to damage.
struct Copy(TempDir);

impl Copy {
    fn of(case: &str) -> Self {
        let dir = TempDir::new().unwrap();
        for entry in std::fs::read_dir(golden_dir().join(case)).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
        Self(dir)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn load(&self) -> Result<Engine, EngineError> {
        Engine::load(&LoadOptions::new(self.0.path(), WeightFormat::AsStored, 16 << 20))
    }

    fn change_json(&self, file: &str, change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> &Self {
        let mut json: Value = serde_json::from_slice(&std::fs::read(self.path(file)).unwrap()).unwrap();
        change(json.as_object_mut().unwrap());
        std::fs::write(self.path(file), json.to_string()).unwrap();
        self
    }

    /// Checks the error message, which must be one line and contain all the words.
    fn assert_refused(&self, words: &[&str]) {
        let message = self.load().unwrap_err().to_string();
        let missing: Vec<_> = words.iter().filter(|word| !message.contains(**word)).collect();
        assert!(missing.is_empty(), "{missing:?} not in: {message}");
        assert!(!message.contains('\n') && message.len() < 1000, "{message}");
        let oracle = Oracle::load(self.0.path(), WeightFormat::F32).unwrap_err().to_string();
        assert_eq!(oracle, message, "engine and oracle report the same error");
    }
}

/// Writes a safetensors file of all-zero tensors.
fn write_zeros(path: &Path, tensors: &[(&str, &str, Vec<usize>, usize)]) {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, dtype, shape, bytes) in tensors {
        let range = [end, end + bytes];
        header.insert((*name).to_owned(), json!({"dtype": dtype, "shape": shape, "data_offsets": range}));
        end += bytes;
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.resize(file.len() + end, 0);
    std::fs::write(path, file).unwrap();
}

#[test]
fn missing_and_truncated_files_are_named() {
    let missing = |file: &str, case: &str| {
        let copy = Copy::of(case);
        std::fs::remove_file(copy.path(file)).unwrap();
        copy.assert_refused(&[file, "No such file"]);
    };
    missing("config.json", "llama_tied");
    missing("model.safetensors", "llama_tied");
    missing("model-00002-of-00002.safetensors", "mistral_window");
    // The file may be absent, but a link to it must lead somewhere.
    let copy = Copy::of("qwen3_norms");
    let generation_config = copy.path("generation_config.json");
    std::fs::remove_file(&generation_config).unwrap();
    assert!(copy.load().is_ok());
    std::os::unix::fs::symlink("missing", &generation_config).unwrap();
    copy.assert_refused(&["generation_config.json", "No such file"]);

    let copy = Copy::of("llama_tied");
    let bytes = std::fs::read(copy.path("model.safetensors")).unwrap();
    for len in [0, 7, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(copy.path("model.safetensors"), &bytes[..len]).unwrap();
        copy.assert_refused(&["model.safetensors", "truncated or not a safetensors file"]);
    }
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4000000000\n";
    std::fs::write(copy.path("model.safetensors"), pointer).unwrap();
    copy.assert_refused(&["model.safetensors", "git lfs pull"]);
    std::fs::remove_file(copy.path("model.safetensors")).unwrap();
    std::fs::create_dir(copy.path("model.safetensors")).unwrap();
    copy.assert_refused(&["model.safetensors"]);

    let copy = Copy::of("llama_tied");
    std::fs::write(copy.path("config.json"), "{\"architectures\": [").unwrap();
    copy.assert_refused(&["config.json", "not valid json"]);
    std::fs::write(copy.path("config.json"), "[]").unwrap();
    copy.assert_refused(&["config.json", "not a json object"]);
    std::fs::write(copy.path("config.json"), "[".repeat(100_000)).unwrap();
    copy.assert_refused(&["config.json", "not valid json"]);
}

#[test]
fn missing_fields_are_named() {
    let required = [
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ];
    for field in required {
        let copy = Copy::of("llama_tied");
        copy.change_json("config.json", |config| {
            config.remove(field);
        });
        copy.assert_refused(&["config.json", &format!("`{field}`"), "missing"]);
    }
}

/// A golden case, a field of its config.json, its new value, and the words that the message must contain.
type Row = [&'static str; 4];

#[rustfmt::skip]
const WRONG_FIELDS: [Row; 25] = [
    ["llama_tied", "architectures", r#"["GemmaForCausalLM"]"#, "GemmaForCausalLM|LlamaForCausalLM|Qwen3ForCausalLM"],
    ["llama_tied", "hidden_act", r#""gelu""#, "`hidden_act`|gelu|silu"],
    ["llama_tied", "hidden_size", "-4", "`hidden_size`|-4|from 1"],
    ["llama_tied", "hidden_size", "1152921504606846976", "`hidden_size`|to 1048576"],
    ["llama_tied", "hidden_size", "32.5", "`hidden_size`|32.5|whole number"],
    ["llama_tied", "num_key_value_heads", "3", "`num_key_value_heads`|divisor|4"],
    ["llama_tied", "num_attention_heads", "5", "num_key_value_heads|5"],
    ["llama_tied", "head_dim", "7", "`head_dim`|7|even"],
    ["llama_tied", "rms_norm_eps", r#""tiny""#, "`rms_norm_eps`|tiny|number"],
    ["llama_tied", "tie_word_embeddings", r#""yes""#, "`tie_word_embeddings`|true or false"],
    ["llama_tied", "eos_token_id", "[1, -2]", "`eos_token_id`|-2"],
    ["llama_tied", "rope_parameters", r#"{"rope_type": "longrope"}"#, "`rope_parameters.rope_type`|longrope|yarn"],
    ["llama_tied", "rope_parameters", r#"{"rope_type": "linear"}"#, "`rope_parameters.factor`|missing"],
    ["llama_tied", "rope_parameters", r#"{"mrope_section": [1]}"#, "`rope_parameters.mrope_section`|not supported"],
    ["llama_tied", "rope_parameters", r#"{"partial_rotary_factor": 0.5}"#, "partial_rotary_factor|0.5"],
    ["llama_tied", "partial_rotary_factor", "0.5", "`partial_rotary_factor`|0.5"],
    ["llama_tied", "layer_types", r#"["full_attention", "sliding_attention"]"#, "`layer_types`|sliding|layer 1|full_attention"],
    ["mistral_window", "layer_types", r#"["full_attention", "sliding_attention"]"#, "`layer_types`|full|layer 0|sliding_attention"],
    ["llama_tied", "rope_parameters", "7", "`rope_parameters`|7|an object"],
    ["mistral_full", "num_key_value_heads", "null", "`num_key_value_heads`|missing"],
    ["qwen3_norms", "head_dim", "null", "`head_dim`|missing"],
    ["qwen2_window_layers", "max_window_layers", "null", "`max_window_layers`|missing"],
    ["qwen3_window_types", "layer_types", r#"["full_attention"]"#, "`layer_types`|1 entries|3"],
    ["qwen3_window_types", "layer_types", r#"["a", "b", "c"]"#, "`layer_types`|\"a\"|sliding_attention"],
    ["qwen3_window_types", "use_sliding_window", "false", "`layer_types`|use_sliding_window"],
];

#[rustfmt::skip]
const CONTRADICTIONS: [Row; 7] = [
    ["llama_tied", "vocab_size", "113", "`model.embed_tokens.weight`|[113, 32]|[112, 32]"],
    ["llama_tied", "num_hidden_layers", "3", "`model.layers.2.input_layernorm.weight`|missing|model.safetensors"],
    ["llama_tied", "num_hidden_layers", "4096", "`model.layers.2.input_layernorm.weight`|missing"],
    ["llama_tied", "tie_word_embeddings", "false", "`lm_head.weight`|missing"],
    ["llama_tied", "attention_bias", "true", "`model.layers.0.self_attn.q_proj.bias`|missing"],
    ["llama_tied", "intermediate_size", "1048576", "mlp.gate_proj.weight`|[1048576, 32]|[72, 32]"],
    ["mistral_window", "vocab_size", "113", "`model.embed_tokens.weight`|model-0000"],
];

fn check([case, field, value, words]: Row) {
    let copy = Copy::of(case);
    copy.change_json("config.json", |config| {
        config.insert(field.to_owned(), serde_json::from_str(value).unwrap());
    });
    copy.assert_refused(&words.split('|').collect::<Vec<_>>());
}

#[test]
fn wrong_fields_are_named() {
    WRONG_FIELDS.into_iter().for_each(check);
}

#[test]
fn tensors_that_contradict_the_configuration_are_named() {
    CONTRADICTIONS.into_iter().for_each(check);
}

#[test]
fn tensors_missing_from_their_file_are_named() {
    // A tensor that the index lists, but its file does not hold.
    let copy = Copy::of("mistral_window");
    let index = "model.safetensors.index.json";
    copy.change_json(index, |index| {
        let map = index["weight_map"].as_object_mut().unwrap();
        let other = map["model.norm.weight"].clone();
        let name = map.keys().find(|name| map[*name] != other).unwrap().clone();
        map.insert("model.norm.weight".to_owned(), map[&name].clone());
    });
    copy.assert_refused(&["`model.norm.weight`", "missing", "model-0000"]);
    copy.change_json(index, |index| {
        index["weight_map"]["model.norm.weight"] = json!("../../etc/passwd");
    });
    copy.assert_refused(&[index, "`weight_map.model.norm.weight`", "file name"]);
    copy.change_json(index, |index| {
        index["weight_map"]["model.norm.weight"] = json!("model-1\n.safetensors");
    });
    copy.assert_refused(&["`weight_map.model.norm.weight`", r#"is "model-1\n.safetensors""#, "file name"]);
    copy.change_json(index, |index| {
        index["weight_map"] = json!({ "two\nlines": 7 });
    });
    copy.assert_refused(&[index, r"`weight_map.two\nlines`"]);
    copy.change_json(index, |index| {
        index.remove("weight_map");
    });
    copy.assert_refused(&[index, "`weight_map`", "missing"]);
}

#[test]
fn unreadable_tensors_are_named() {
    let copy = Copy::of("llama_tied");
    let embedding = |dtype, bytes| ("model.embed_tokens.weight", dtype, vec![112, 32], bytes);
    write_zeros(&copy.path("model.safetensors"), &[embedding("I8", 112 * 32)]);
    copy.assert_refused(&["`model.embed_tokens.weight`", "I8", "BF16"]);
    // A shape that overflows when multiplied, and one that is larger than the file.
    for (shape, bytes) in [(vec![usize::MAX, 32], 64), (vec![1 << 40, 1 << 20], 64), (vec![112, 32], 112)] {
        write_zeros(&copy.path("model.safetensors"), &[("model.embed_tokens.weight", "F32", shape, bytes)]);
        copy.assert_refused(&["model.safetensors", "not a safetensors file"]);
    }
}

/// A header that claims gigabytes in a small file.
#[test]
fn claimed_sizes_are_not_trusted() {
    let copy = Copy::of("llama_tied");
    for header_len in [99_999_999u64, 100_000_001, u64::MAX, u64::MAX - 7, i64::MAX as u64] {
        let mut bytes = header_len.to_le_bytes().to_vec();
        bytes.extend([b'{'; 64]);
        std::fs::write(copy.path("model.safetensors"), bytes).unwrap();
        copy.assert_refused(&["model.safetensors"]);
    }
    assert!(peak_memory_bytes() < 1 << 30, "address space {} bytes", peak_memory_bytes());
}

/// Noise in every file: a checkpoint that loads must also run, any other must return an error.
#[test]
fn noise_never_panics() {
    for (case, files) in [
        ("llama_rope_yarn_new", &["config.json", "model.safetensors"][..]),
        ("qwen3_norms", &["config.json", "generation_config.json", "model.safetensors.index.json"]),
    ] {
        let copy = Copy::of(case);
        for file in files {
            let original = std::fs::read(copy.path(file)).unwrap();
            // Only the header of a safetensors file can be misread; the rest are numbers.
            let end = original.len().min(2500);
            let mut loaded = 0;
            for seed in 0..300 {
                let mut random = Random::new(seed);
                let mut bytes = original.clone();
                for _ in 0..1 + random.below(3) {
                    let at = random.below(end);
                    match random.below(4) {
                        0 => bytes[at] = random.below(256) as u8,
                        1 => bytes[at] = b"0123456789-.eE[]{}\",:"[random.below(20)],
                        2 => drop(bytes.drain(at..(at + 1 + random.below(40)).min(bytes.len()))),
                        _ => bytes.truncate(at),
                    }
                    if bytes.len() < end {
                        break;
                    }
                }
                std::fs::write(copy.path(file), &bytes).unwrap();
                if let Ok(mut engine) = copy.load() {
                    loaded += 1;
                    let slot = engine.open();
                    let ids = [1, 2, 3];
                    let rows = engine::SequenceRows { slot, token_ids: &ids, num_logits: 1 };
                    match engine.forward(&[rows]) {
                        Ok(logits) => assert_eq!(logits.rows(), 1),
                        Err(EngineError::TooLong { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            println!("{case}/{file}: {loaded} of 300 still load");
            std::fs::write(copy.path(file), original).unwrap();
        }
    }
    assert!(peak_memory_bytes() < 1 << 30, "address space {} bytes", peak_memory_bytes());
}

/// Peak address space of this process, which includes allocations that were never touched.
fn peak_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPeak:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// A loaded model works whatever happens to its files: nothing is read later, and nothing is mapped.
#[test]
fn files_truncated_after_loading() {
    let copy = Copy::of("mistral_window");
    let ids: Vec<engine::TokenId> = (0..40).map(|i| i * 29 % 112).collect();
    let logits = |engine: &mut Engine| {
        let slot = engine.open();
        crate::support::feed(engine, slot, &ids, 3)
    };
    let mut engine = copy.load().unwrap();
    let expected = logits(&mut engine);
    for file in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json"] {
        std::fs::OpenOptions::new().write(true).open(copy.path(file)).unwrap().set_len(5).unwrap();
    }
    assert_eq!(logits(&mut engine), expected);
    copy.assert_refused(&["config.json"]);
}
