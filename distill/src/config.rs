//! Reads a draft's config.json and refuses features that [`crate::draft`] does not implement.

use std::path::Path;

use engine::{CONFIG_FILE, ModelSettings, ScaledRope};

use crate::error::DistillError;

/// Reads the config.json of a checkpoint, to run over texts of at most `context` tokens.
pub(crate) fn read(directory: &Path, context: usize) -> Result<ModelSettings, DistillError> {
    let path = directory.join(CONFIG_FILE);
    let settings = ModelSettings::read(&path)?;
    if let Some(ScaledRope { field, kind }) = settings.scaled_rope {
        let reason = format!("{field} has the type \"{kind}\": a draft with scaled rope cannot be trained");
        return Err(DistillError::Unsupported { path, reason });
    }
    let context = context.min(settings.shape.max_len as usize);
    if let Some(window) = settings.sliding_window.filter(|window| (*window as usize) < context) {
        let reason = format!(
            "sliding_window is {window}: texts of up to {context} tokens cannot be trained, only those that fit into the window"
        );
        return Err(DistillError::Unsupported { path, reason });
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Reads a configuration of two layers with these fields for texts of up to `context` tokens.
    fn read(mut fields: Value, context: usize) -> Result<ModelSettings, String> {
        let all = json!({
            "vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "eos_token_id": 0,
        });
        fields.as_object_mut().unwrap().extend(all.as_object().unwrap().clone());
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(CONFIG_FILE), fields.to_string()).unwrap();
        super::read(directory.path(), context).map_err(|error| error.to_string())
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
