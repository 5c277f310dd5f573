//! Interpretation of configurations. `tests/suite/broken_files.rs` checks invalid files.

use serde_json::{Value, json};

use super::*;

fn parse(changes: Value) -> Result<ModelConfig, EngineError> {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1000,
        "rms_norm_eps": 1e-5,
    });
    let object = config.as_object_mut().unwrap();
    for (name, value) in changes.as_object().unwrap() {
        object.insert(name.clone(), value.clone());
    }
    ModelConfig::from_fields(&Fields::top(Path::new("config.json"), object))
}

/// A configuration for tests to modify.
pub(crate) fn tiny() -> ModelConfig {
    parse(json!({})).unwrap()
}

fn windows(changes: Value) -> Vec<Option<u32>> {
    parse(changes).unwrap().windows
}

fn max_len(rope: Value) -> u32 {
    parse(json!({"rope_parameters": rope})).unwrap().max_len
}

#[test]
fn defaults_are_those_of_transformers() {
    let config = parse(json!({"num_key_value_heads": null})).unwrap();
    assert_eq!((config.num_kv_heads, config.head_dim, config.max_len), (8, 8, 1000));
    assert!(!config.tie_word_embeddings && !config.qk_norm);
    assert_eq!(config.biases, Biases { qkv: false, o: false, mlp: false });
    assert!(config.eos_token_ids.is_empty());
    assert_eq!(parse(json!({"eos_token_id": [7, 9]})).unwrap().eos_token_ids, [7, 9]);
    assert!(parse(json!({"eos_token_id": -1})).unwrap().eos_token_ids.is_empty());
}

#[test]
fn transforms_of_activations_are_refused() {
    let with = |locations: [&str; 2]| {
        let apply = locations.map(|location| json!({"targets": ["Linear"], "location": location}));
        let groups = json!({"R1": {"type": "hadamard", "apply": [apply[0]]}, "R4": {"apply": [apply[1]]}});
        parse(json!({"quantization_config": {"transform_config": {"config_groups": groups}}}))
    };
    assert!(with(["weight_output", "weight_input"]).is_ok(), "they are part of the stored weights");
    for location in ["input", "output", "k_cache", "q_attn"] {
        let error = with(["weight_input", location]).unwrap_err().to_string();
        assert!(error.contains("`quantization_config.transform_config`"), "{error}");
        assert!(error.contains(location) && error.contains("without such transforms"), "{error}");
    }
    assert!(parse(json!({"quantization_config": {"transform_config": {}}})).is_ok());
}

#[test]
fn windows_by_family() {
    assert_eq!(windows(json!({"sliding_window": 5})), [None; 4], "llama has none");
    let mistral = |window| json!({"architectures": ["MistralForCausalLM"], "sliding_window": window});
    assert_eq!(windows(mistral(json!(5))), [Some(5); 4]);
    assert_eq!(windows(mistral(json!(null))), [None; 4]);
    let mut all_sliding = mistral(json!(5));
    all_sliding["layer_types"] = json!(vec!["sliding_attention"; 4]);
    assert_eq!(windows(all_sliding), [Some(5); 4]);
    assert_eq!(windows(json!({"layer_types": vec!["full_attention"; 4]})), [None; 4]);
    assert_eq!(
        windows(json!({"architectures": ["MistralForCausalLM"]})),
        [Some(4096); 4],
        "an absent field means the default"
    );

    let qwen = |on, types: Value| {
        json!({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": on, "sliding_window": 5,
            "max_window_layers": 3, "layer_types": types})
    };
    assert_eq!(windows(qwen(false, json!(null))), [None; 4]);
    assert_eq!(windows(qwen(true, json!(null))), [None, None, None, Some(5)]);
    let defaults = |window: Value| {
        let mut config = json!({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": true,
            "num_hidden_layers": 30});
        if window != json!("absent") {
            config["sliding_window"] = window;
        }
        windows(config)[27..].to_vec()
    };
    assert_eq!(defaults(json!("absent")), [None, Some(4096), Some(4096)], "class defaults");
    assert_eq!(defaults(json!(7)), [None, Some(7), Some(7)]);
    assert_eq!(defaults(json!(null)), [None; 3], "null means no window");
    let types = json!(["sliding_attention", "full_attention", "full_attention", "sliding_attention"]);
    assert_eq!(windows(qwen(true, types)), [Some(5), None, None, Some(5)], "layer_types takes precedence");
}

#[test]
fn rope_scaling_extends_the_maximum_length() {
    assert_eq!(max_len(json!({"rope_type": "default"})), 1000);
    assert_eq!(max_len(json!({"rope_type": "linear", "factor": 2.5})), 2500);
    let linear =
        |original: u32| json!({"type": "linear", "factor": 4, "original_max_position_embeddings": original});
    assert_eq!(max_len(linear(1000)), 4000);
    assert_eq!(max_len(linear(250)), 1000, "the configuration has the extended length");
    assert_eq!(max_len(linear(500)), 2000);
    let llama3 = json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 100});
    assert_eq!(max_len(llama3), 1000, "the configuration has the extended length");
    let yarn =
        |original: u32| json!({"type": "yarn", "factor": 4, "original_max_position_embeddings": original});
    assert_eq!(max_len(yarn(1000)), 4000);
    assert_eq!(max_len(yarn(250)), 1000);
}

#[test]
fn both_rope_spellings_give_the_same_config() {
    let scaling = json!({"type": "linear", "factor": 4});
    let old = parse(json!({"rope_theta": 500.0, "rope_scaling": scaling})).unwrap();
    let new = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0});
    assert_eq!(old, parse(json!({"rope_parameters": new})).unwrap());
    assert_ne!(old.rope, parse(json!({"rope_scaling": scaling})).unwrap().rope, "theta matters");
}

#[test]
fn rope_scaling_takes_precedence_over_rope_parameters() {
    let yarn = json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 250});
    let parameters = json!({"rope_type": "default", "rope_theta": 700.0});
    let both = |scaling: Value, theta: Value| {
        parse(json!({"rope_parameters": parameters, "rope_scaling": scaling, "rope_theta": theta}))
    };
    let of = |scaling: Value, theta: f64| {
        parse(json!({"rope_scaling": scaling, "rope_theta": theta})).unwrap().rope
    };
    assert_eq!(both(yarn.clone(), json!(500.0)).unwrap().rope, of(yarn.clone(), 500.0));
    let mut with_theta = yarn.clone();
    with_theta["rope_theta"] = json!(900.0);
    assert_eq!(both(with_theta, json!(null)).unwrap().rope, of(yarn.clone(), 900.0));
    assert_eq!(both(json!({}), json!(null)).unwrap().rope, of(json!(null), 700.0), "empty");

    let error = both(yarn, json!(null)).unwrap_err().to_string();
    assert!(error.contains("`rope_scaling`") && error.contains("`rope_parameters`"), "{error}");
}
