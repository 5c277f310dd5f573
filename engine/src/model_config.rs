//! Hugging Face's config.json and generation_config.json -> a [`ModelConfig`] that is valid for this engine.
//! Defaults are those of the transformers classes. Nothing is guessed: an unknown family or rope type is
//! refused by name.

mod family;
pub(crate) mod fields;
pub(crate) mod tensors;

use std::path::Path;

pub(crate) use family::Architecture;
use fields::{Fields, parse_json_object, read_file, read_json_object};
use serde_json::Value;

use crate::EngineError;
use crate::model_shape::ModelShape;
use crate::rope::Rope;

/// File name of the configuration in a checkpoint directory.
pub const CONFIG_FILE: &str = "config.json";

/// Sanity limits, far above any real model: they prevent overflow in size arithmetic.
const MAX_VOCAB: usize = 1 << 24;
pub(crate) const MAX_WIDTH: usize = 1 << 20;
pub(crate) const MAX_LAYERS: usize = 1 << 12;
const MAX_HEADS: usize = 1 << 12;
/// Limited because attention keeps a head's sums on the stack.
pub(crate) const MAX_HEAD_DIM: usize = 512;
/// Limited because rope computes positions in f32, which is exact up to here.
pub(crate) const MAX_POSITIONS: usize = 1 << 24;

/// Which projections have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Biases {
    pub(crate) qkv: bool,
    pub(crate) o: bool,
    pub(crate) mlp: bool,
}

/// Configuration of a decoder that the engine can run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ModelConfig {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_layers: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) rms_norm_eps: f32,
    pub(crate) tie_word_embeddings: bool,
    pub(crate) biases: Biases,
    /// Whether each head's query and key are normalised before rope.
    pub(crate) qk_norm: bool,
    pub(crate) rope: Rope,
    /// Sliding window of each layer: attend only to this many of the last positions.
    pub(crate) windows: Vec<Option<u32>>,
    /// Longest sequence that the model supports.
    pub(crate) max_len: u32,
    /// `_name_or_path` of the configuration.
    pub(crate) name: Option<String>,
    pub(crate) eos_token_ids: Vec<u32>,
    /// How the checkpoint is quantized, unless not at all or as FP8.
    pub(crate) quantization: Option<String>,
}

/// Returns the ids that end a text, from the content of a config.json or generation_config.json read from
/// `path`; empty if the file has none.
pub fn eos_token_ids(path: &Path, json: &[u8]) -> Result<Vec<u32>, EngineError> {
    let object = parse_json_object(path, json)?;
    Fields::top(path, &object).ids("eos_token_id")
}

impl ModelConfig {
    /// Reads and checks the configuration in a checkpoint directory.
    pub(crate) fn load(model_dir: &Path) -> Result<Self, EngineError> {
        let mut config = Self::read(&model_dir.join(CONFIG_FILE))?;

        let path = model_dir.join("generation_config.json");
        // A link whose file is missing is an error: without the file other ids might end a text.
        if path.symlink_metadata().is_ok() {
            let eos = eos_token_ids(&path, &read_file(&path)?)?;
            if !eos.is_empty() {
                config.eos_token_ids = eos;
            }
        }
        Ok(config)
    }

    /// Reads and checks a single config.json.
    pub(crate) fn read(path: &Path) -> Result<Self, EngineError> {
        let object = read_json_object(path)?;
        Self::from_fields(&Fields::top(path, &object))
    }

    pub(crate) fn from_fields(fields: &Fields<'_>) -> Result<Self, EngineError> {
        let architecture = Architecture::from_fields(fields)?;
        refuse_other_activations(fields)?;

        let hidden_size = fields.count("hidden_size", MAX_WIDTH)?;
        let num_layers = fields.count("num_hidden_layers", MAX_LAYERS)?;
        let num_heads = fields.count("num_attention_heads", MAX_HEADS)?;
        let num_kv_heads = architecture.num_kv_heads(fields, num_heads)?;
        let head_dim = architecture.head_dim(fields, hidden_size, num_heads)?;
        let max_position_embeddings = fields.count("max_position_embeddings", MAX_POSITIONS)?;
        let (rope, max_len) = Rope::from_fields(fields, head_dim, max_position_embeddings)?;
        let rms_norm_eps = fields.number("rms_norm_eps")?;
        if !(0.0..1.0).contains(&rms_norm_eps) {
            return Err(fields.bad("rms_norm_eps", format!("is {rms_norm_eps}, expected a number in [0, 1)")));
        }

        Ok(Self {
            vocab_size: fields.count("vocab_size", MAX_VOCAB)?,
            hidden_size,
            intermediate_size: fields.count("intermediate_size", MAX_WIDTH)?,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps: rms_norm_eps as f32,
            tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
            biases: architecture.biases(fields)?,
            qk_norm: architecture.has_qk_norm(),
            rope,
            windows: architecture.windows(fields, num_layers)?,
            max_len: max_len.min(MAX_POSITIONS) as u32,
            name: fields.optional_string("_name_or_path")?.map(str::to_owned),
            eos_token_ids: fields.ids("eos_token_id")?,
            quantization: quantization(fields)?,
        })
    }

    /// Number of weights, tied ones counted once.
    pub(crate) fn num_parameters(&self) -> u64 {
        ModelShape::of(self).num_parameters()
    }

    /// Number of weights of all norms.
    pub(crate) fn norm_numbers(&self) -> u64 {
        let heads = if self.qk_norm { 2 * self.head_dim } else { 0 };
        (self.num_layers * (2 * self.hidden_size + heads) + self.hidden_size) as u64
    }

    /// Total width of the query heads.
    pub(crate) fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Total width of the key heads, or of the value heads.
    pub(crate) fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

/// The method of `quantization_config`, with the format if there is one; `None` for FP8. The number of bits
/// if there is neither, as from MLX.
fn quantization(fields: &Fields<'_>) -> Result<Option<String>, EngineError> {
    let Some(quantization) = fields.nested("quantization_config")? else { return Ok(None) };
    refuse_transforms(&quantization)?;
    let method = quantization.optional_string("quant_method")?;
    let format = quantization.optional_string("format")?;
    let words: Vec<&str> = method.into_iter().chain(format).collect();
    if words.is_empty() {
        return Ok(quantization.get("bits").map(|bits| format!("{bits} bits")));
    }
    let is_fp8 = words.iter().any(|word| word.contains("fp8") || *word == "float-quantized");
    Ok((!is_fp8).then(|| words.join(", ")))
}

/// Refuses transforms of compressed-tensors that are applied to activations (QuIP, SpinQuant): without them
/// the text would be noise. Those of weights are part of the stored weights.
fn refuse_transforms(quantization: &Fields<'_>) -> Result<(), EngineError> {
    let groups = quantization.get("transform_config").and_then(|config| config.get("config_groups"));
    let mut locations = groups
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(|groups| groups.values())
        .filter_map(|group| group.get("apply")?.as_array())
        .flatten()
        .filter_map(|transform| transform.get("location")?.as_str());
    match locations.find(|location| !location.starts_with("weight_")) {
        None => Ok(()),
        Some(location) => Err(quantization.bad(
            "transform_config",
            format!(
                "transforms activations (location \"{location}\"), which is not supported: use a checkpoint \
                 without such transforms"
            ),
        )),
    }
}

fn refuse_other_activations(fields: &Fields<'_>) -> Result<(), EngineError> {
    match fields.optional_string("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => Err(fields.bad("hidden_act", format!("is \"{other}\", expected \"silu\""))),
    }
}

#[cfg(test)]
pub(crate) mod tests;
