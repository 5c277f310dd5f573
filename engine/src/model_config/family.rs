//! Differences between the model families: head counts and widths, biases, norms, sliding windows.

use serde_json::Value;

use super::fields::Fields;
use super::{Biases, MAX_HEAD_DIM, MAX_HEADS, MAX_POSITIONS};
use crate::EngineError;

/// Window of a Mistral configuration without the field: its class default.
const MISTRAL_DEFAULT_WINDOW: u32 = 4096;

/// Defaults of Qwen's classes for a configuration with `use_sliding_window`.
const QWEN_DEFAULT_WINDOW: u32 = 4096;
const QWEN_DEFAULT_FULL_LAYERS: u64 = 28;

/// Entries of `layer_types`.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// The supported families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

impl Architecture {
    const ALL: [(&'static str, Self); 4] = [
        ("LlamaForCausalLM", Self::Llama),
        ("MistralForCausalLM", Self::Mistral),
        ("Qwen2ForCausalLM", Self::Qwen2),
        ("Qwen3ForCausalLM", Self::Qwen3),
    ];

    pub(crate) fn from_fields(fields: &Fields<'_>) -> Result<Self, EngineError> {
        let list = fields.get("architectures").ok_or_else(|| fields.missing("architectures"))?;
        let names: Vec<&str> = list.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let supported = |name: &&str| {
            Self::ALL.iter().find(|(supported, _)| supported == name).map(|(_, architecture)| *architecture)
        };
        names.iter().find_map(supported).ok_or_else(|| EngineError::UnknownArchitecture {
            path: fields.path().to_owned(),
            found: list.to_string().chars().take(200).collect(),
            supported: Self::ALL.map(|(name, _)| name).join(", "),
        })
    }

    pub(crate) fn num_kv_heads(self, fields: &Fields<'_>, num_heads: usize) -> Result<usize, EngineError> {
        let name = "num_key_value_heads";
        let count = match fields.optional_count(name, MAX_HEADS)? {
            Some(count) => count,
            // Llama's first checkpoints, from before grouped-query attention, lack the field.
            None if self == Self::Llama => num_heads,
            None => return Err(fields.missing(name)),
        };
        if num_heads.is_multiple_of(count) {
            Ok(count)
        } else {
            Err(fields
                .bad(name, format!("is {count}, expected a divisor of num_attention_heads, {num_heads}")))
        }
    }

    pub(crate) fn head_dim(
        self,
        fields: &Fields<'_>,
        hidden: usize,
        num_heads: usize,
    ) -> Result<usize, EngineError> {
        let head_dim = match fields.optional_count("head_dim", MAX_HEAD_DIM)? {
            Some(head_dim) => head_dim,
            // Qwen3's heads are wider than hidden_size / num_attention_heads, so the quotient would be wrong.
            None if self == Self::Qwen3 => return Err(fields.missing("head_dim")),
            None if hidden.is_multiple_of(num_heads) && hidden / num_heads <= MAX_HEAD_DIM => {
                hidden / num_heads
            }
            None => {
                let reason = format!(
                    "is {hidden}, expected {num_heads} (num_attention_heads) times at most {MAX_HEAD_DIM}, or a head_dim"
                );
                return Err(fields.bad("hidden_size", reason));
            }
        };
        if head_dim.is_multiple_of(2) {
            Ok(head_dim)
        } else {
            Err(fields.bad(
                "head_dim",
                format!("is {head_dim}, expected an even number, because rope rotates pairs"),
            ))
        }
    }

    pub(crate) fn biases(self, fields: &Fields<'_>) -> Result<Biases, EngineError> {
        match self {
            Self::Llama => {
                let attention = fields.flag("attention_bias", false)?;
                Ok(Biases { qkv: attention, o: attention, mlp: fields.flag("mlp_bias", false)? })
            }
            Self::Mistral => Ok(Biases { qkv: false, o: false, mlp: false }),
            Self::Qwen2 => Ok(Biases { qkv: true, o: false, mlp: false }),
            Self::Qwen3 => {
                let attention = fields.flag("attention_bias", false)?;
                Ok(Biases { qkv: attention, o: attention, mlp: false })
            }
        }
    }

    pub(crate) fn has_qk_norm(self) -> bool {
        self == Self::Qwen3
    }

    /// The sliding window of each layer's attention.
    pub(crate) fn windows(
        self,
        fields: &Fields<'_>,
        num_layers: usize,
    ) -> Result<Vec<Option<u32>>, EngineError> {
        match self {
            Self::Llama => equal_windows(fields, num_layers, None),
            Self::Mistral => equal_windows(fields, num_layers, window(fields, MISTRAL_DEFAULT_WINDOW)?),
            Self::Qwen2 | Self::Qwen3 => qwen_windows(fields, num_layers),
        }
    }
}

/// The configured window. `null` means "no window"; only an absent field means the default.
fn window(fields: &Fields<'_>, default: u32) -> Result<Option<u32>, EngineError> {
    let is_mentioned = fields.names().any(|name| name == "sliding_window");
    let window = fields.optional_count("sliding_window", MAX_POSITIONS)?.map(|window| window as u32);
    Ok(window.or((!is_mentioned).then_some(default)))
}

/// The windows of a family whose layers are all alike. transformers ignores `layer_types` there, and other
/// programs follow it: if it asks for something else, what the model was trained with cannot be known.
fn equal_windows(
    fields: &Fields<'_>,
    num_layers: usize,
    window: Option<u32>,
) -> Result<Vec<Option<u32>>, EngineError> {
    let expected = if window.is_some() { SLIDING } else { FULL };
    let layer_types = fields.get("layer_types").and_then(Value::as_array).into_iter().flatten();
    match layer_types.enumerate().find(|(_, layer_type)| layer_type.as_str() != Some(expected)) {
        None => Ok(vec![window; num_layers]),
        Some((layer, layer_type)) => Err(fields.bad(
            "layer_types",
            format!(
                "has {layer_type} at layer {layer}, but this architecture has {expected} in every layer: correct the \
                 field, or remove it"
            ),
        )),
    }
}

/// `layer_types` says which layers have the window. Older configurations give it to layers from
/// `max_window_layers` on.
fn qwen_windows(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<Option<u32>>, EngineError> {
    let is_on = fields.flag("use_sliding_window", false)?;
    let window = if is_on { window(fields, QWEN_DEFAULT_WINDOW)? } else { None };
    if let Some(layer_types) = fields.get("layer_types") {
        return windows_by_layer_type(fields, layer_types, num_layers, window);
    }
    let Some(window) = window else { return Ok(vec![None; num_layers]) };
    let first = match fields.get("max_window_layers") {
        None if fields.names().any(|name| name == "max_window_layers") => {
            return Err(fields.missing("max_window_layers"));
        }
        None => QWEN_DEFAULT_FULL_LAYERS,
        Some(first) => first
            .as_u64()
            .ok_or_else(|| fields.bad("max_window_layers", format!("is {first}, expected a whole number")))?,
    };
    Ok((0..num_layers as u64).map(|layer| (layer >= first).then_some(window)).collect())
}

fn windows_by_layer_type(
    fields: &Fields<'_>,
    layer_types: &Value,
    num_layers: usize,
    window: Option<u32>,
) -> Result<Vec<Option<u32>>, EngineError> {
    let bad = |reason: String| fields.bad("layer_types", reason);
    let types = layer_types.as_array().ok_or_else(|| bad("is not a list".to_owned()))?;
    if types.len() != num_layers {
        return Err(bad(format!("has {} entries, expected num_hidden_layers, {num_layers}", types.len())));
    }
    let of_layer = |(layer, layer_type): (usize, &Value)| match layer_type.as_str() {
        Some(FULL) => Ok(None),
        Some(SLIDING) if window.is_some() => Ok(window),
        Some(SLIDING) => Err(bad(format!(
            "has sliding_attention at layer {layer}, but there is no window: set use_sliding_window to true and sliding_window"
        ))),
        _ => Err(bad(format!(
            "has {layer_type} at layer {layer}, expected full_attention or sliding_attention"
        ))),
    };
    types.iter().enumerate().map(of_layer).collect()
}
