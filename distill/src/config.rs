//! Settings of a draft's config.json that the engine's model shape does not contain. Refuses features that
//! [`crate::draft`] does not implement. It must read the file as the engine does, which is always first and
//! rejects invalid values.

use std::path::Path;

use engine::ModelShape;
use serde_json::{Map, Value};

use crate::error::DistillError;

const CONFIG_FILE: &str = "config.json";

/// Default of the model classes, for checkpoints without a value.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

/// Defaults of the model classes that have a sliding window.
const DEFAULT_WINDOW: u64 = 4096;
const DEFAULT_FULL_LAYERS: u64 = 28;

/// A draft's shape and settings.
#[derive(Debug)]
pub(crate) struct DraftConfig {
    pub(crate) shape: ModelShape,
    pub(crate) rms_norm_eps: f32,
    pub(crate) rope_theta: f64,
}

impl DraftConfig {
    /// Reads the config.json of a checkpoint, to run over texts of at most `context` tokens.
    pub(crate) fn read(directory: &Path, context: usize) -> Result<Self, DistillError> {
        let path = directory.join(CONFIG_FILE);
        let shape = ModelShape::read(&path)?;
        let bytes =
            std::fs::read(&path).map_err(|source| DistillError::Read { path: path.clone(), source })?;
        let unsupported = |reason: String| DistillError::Unsupported { path: path.clone(), reason };
        let fields: Map<String, Value> =
            serde_json::from_slice(&bytes).map_err(|error| unsupported(error.to_string()))?;
        let rms_norm_eps = number(&fields, "rms_norm_eps")
            .ok_or_else(|| unsupported("rms_norm_eps is missing".to_owned()))?;
        let rope = rope(&fields);
        if let Some((name, kind)) = rope.and_then(|(name, rope)| Some((name, scaled_kind(rope)?))) {
            return Err(unsupported(format!(
                "{name} has the type \"{kind}\": a draft with scaled rope cannot be trained"
            )));
        }
        let context = (context as u64).min(u64::from(shape.max_len));
        if let Some(window) = sliding_window(&fields, shape.num_layers).filter(|window| *window < context) {
            return Err(unsupported(format!(
                "sliding_window is {window}: texts of up to {context} tokens cannot be trained, only those that fit into the window"
            )));
        }
        let rope_theta = rope
            .and_then(|(_, rope)| number(rope, "rope_theta"))
            .or_else(|| number(&fields, "rope_theta"))
            .unwrap_or(DEFAULT_ROPE_THETA);
        Ok(Self { shape, rms_norm_eps: rms_norm_eps as f32, rope_theta })
    }
}

/// The rope object in use, with its name: `rope_scaling` replaces `rope_parameters` unless it is empty.
fn rope(fields: &Map<String, Value>) -> Option<(&'static str, &Map<String, Value>)> {
    let (scaling, parameters) = ("rope_scaling", "rope_parameters");
    match object(fields, scaling).filter(|object| !object.is_empty()) {
        Some(object) => Some((scaling, object)),
        None => Some((parameters, object(fields, parameters)?)),
    }
}

/// The type of a rope object whose positions are scaled.
fn scaled_kind(rope: &Map<String, Value>) -> Option<&str> {
    let kind = present(rope, "rope_type").or_else(|| present(rope, "type"))?;
    kind.as_str().filter(|kind| *kind != "default")
}

/// The sliding window, if a layer has one.
fn sliding_window(fields: &Map<String, Value>, num_layers: u64) -> Option<u64> {
    let architectures = fields.get("architectures").and_then(Value::as_array);
    let is_any_of = |names: &[&str]| {
        architectures.into_iter().flatten().filter_map(Value::as_str).any(|name| names.contains(&name))
    };
    let is_used = is_any_of(&["MistralForCausalLM"])
        || is_any_of(&["Qwen2ForCausalLM", "Qwen3ForCausalLM"]) && has_qwen_windows(fields, num_layers);
    match fields.get("sliding_window") {
        _ if !is_used => None,
        // Only an absent field means the default; null means that there is no window.
        None => Some(DEFAULT_WINDOW),
        Some(window) => window.as_u64(),
    }
}

/// Whether a layer of a Qwen model has the window. `layer_types` takes precedence over `max_window_layers`,
/// the first layer that has it.
fn has_qwen_windows(fields: &Map<String, Value>, num_layers: u64) -> bool {
    if fields.get("use_sliding_window") != Some(&Value::Bool(true)) {
        return false;
    }
    match present(fields, "layer_types").and_then(Value::as_array) {
        Some(layer_types) => layer_types.iter().any(|layer_type| layer_type == "sliding_attention"),
        None => {
            let first = present(fields, "max_window_layers").and_then(Value::as_u64);
            first.unwrap_or(DEFAULT_FULL_LAYERS) < num_layers
        }
    }
}

/// A field that is present and not null.
fn present<'a>(fields: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    fields.get(name).filter(|value| !value.is_null())
}

fn object<'a>(fields: &'a Map<String, Value>, name: &str) -> Option<&'a Map<String, Value>> {
    fields.get(name).and_then(Value::as_object)
}

fn number(fields: &Map<String, Value>, name: &str) -> Option<f64> {
    fields.get(name).and_then(Value::as_f64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Reads a configuration of two layers with these fields for texts of up to `context` tokens.
    fn read(mut fields: Value, context: usize) -> Result<DraftConfig, String> {
        let all = json!({
            "vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "eos_token_id": 0,
        });
        fields.as_object_mut().unwrap().extend(all.as_object().unwrap().clone());
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(CONFIG_FILE), fields.to_string()).unwrap();
        DraftConfig::read(directory.path(), context).map_err(|error| error.to_string())
    }

    #[test]
    fn scaled_rope_is_refused_by_name() {
        let llama = |name: &str, rope: Value| {
            read(json!({ "architectures": ["LlamaForCausalLM"], "rope_theta": 500.0, name: rope }), 40)
        };
        let llama3 = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 500.0,
        });
        for (name, rope, kind) in [
            ("rope_scaling", json!({ "rope_type": "linear", "factor": 4.0 }), "linear"),
            ("rope_scaling", json!({ "type": "linear", "factor": 4.0 }), "linear"),
            ("rope_parameters", llama3, "llama3"),
        ] {
            let error = llama(name, rope).expect_err(kind);
            assert!(error.contains(&format!("{name} has the type \"{kind}\"")), "{error}");
        }
        for (name, rope, theta) in [
            ("rope_scaling", json!(null), 500.0),
            ("rope_scaling", json!({}), 500.0),
            ("rope_scaling", json!({ "rope_type": "default", "rope_theta": 7.0 }), 7.0),
            ("rope_parameters", json!({ "rope_type": "default", "rope_theta": 7.0 }), 7.0),
            ("rope_parameters", json!({ "rope_type": "default" }), 500.0),
        ] {
            assert_eq!(
                llama(name, rope.clone()).map(|config| config.rope_theta),
                Ok(theta),
                "{name}: {rope}"
            );
        }
    }

    #[test]
    fn a_window_that_a_text_exceeds_is_refused() {
        let llama = |window| json!({ "architectures": ["LlamaForCausalLM"], "sliding_window": window });
        let mistral = |window| json!({ "architectures": ["MistralForCausalLM"], "sliding_window": window });
        let qwen = |is_on: bool, first: u64| {
            json!({
                "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": is_on, "sliding_window": 16,
                "max_window_layers": first,
            })
        };
        let by_layer = |last: &str| {
            let mut fields = qwen(true, 0);
            fields["layer_types"] = json!(["full_attention", last]);
            fields
        };
        for (fields, context, is_refused) in [
            (llama(Some(16)), 40, false),
            (mistral(Some(16)), 40, true),
            (mistral(Some(16)), 16, false),
            (mistral(Some(64)), 4096, false),
            (mistral(None), 40, false),
            (json!({ "architectures": ["MistralForCausalLM"] }), 40, false),
            (qwen(true, 1), 40, true),
            (qwen(true, 1), 16, false),
            (qwen(true, 2), 40, false),
            (qwen(false, 0), 40, false),
            (by_layer("sliding_attention"), 40, true),
            (by_layer("full_attention"), 40, false),
        ] {
            let error = read(fields.clone(), context).err();
            assert_eq!(error.is_some(), is_refused, "{fields}, {context} tokens: {error:?}");
            assert!(error.is_none_or(|error| error.contains("sliding_window is 16")), "{fields}");
        }
    }
}
