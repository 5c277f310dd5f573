//! Names and shapes of the tensors of a decoder, as transformers saves them.

use super::{Layer, Llama};
use crate::EngineError;
use crate::backend::{Linear, Norm};
use crate::k_slices::KSlices;
use crate::model_config::ModelConfig;
use crate::weights::{Checkpoint, Matrix, MatrixFormat};

/// Columns in a unit of down_proj's K-slices (docs/contract.md C2).
const DOWN_UNIT: usize = 32;

/// Loads tensors of one checkpoint in one format.
struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a ModelConfig,
    format: MatrixFormat,
}

impl Llama {
    /// Maps or converts every tensor that the configuration implies.
    pub(crate) fn load(
        checkpoint: &Checkpoint,
        config: ModelConfig,
        format: MatrixFormat,
    ) -> Result<Self, EngineError> {
        let loader = Loader { checkpoint, config: &config, format };
        let embedding = loader.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)?;
        let layers =
            (0..config.num_layers).map(|layer| loader.layer(layer)).collect::<Result<Vec<_>, _>>()?;
        let final_norm = loader.norm("model.norm.weight", config.hidden_size)?;
        let lm_head = if config.tie_word_embeddings {
            embedding.clone()
        } else {
            loader.matrix("lm_head.weight", config.vocab_size, config.hidden_size)?
        };
        let lm_head = Linear { parts: vec![lm_head], bias: None, slices: KSlices::whole(config.hidden_size) };
        Ok(Self { embedding, layers, final_norm, lm_head, config })
    }

    /// Weights, tied ones once.
    pub(crate) fn num_parameters(&self) -> u64 {
        let linear = |linear: &Linear| linear.width() * linear.k() + linear.bias.as_ref().map_or(0, Vec::len);
        let norm = |norm: &Norm| norm.weight.len();
        let layers = self.layers.iter().map(|layer| {
            let qk_norms = layer.qk_norms.as_ref().map_or(0, |(q, k)| norm(q) + norm(k));
            let linears =
                linear(&layer.qkv) + linear(&layer.o) + linear(&layer.gate_up) + linear(&layer.down);
            linears + norm(&layer.input_norm) + norm(&layer.post_attention_norm) + qk_norms
        });
        let embeddings = self.embedding.rows() * self.embedding.columns();
        let lm_head = if self.config.tie_word_embeddings { 0 } else { linear(&self.lm_head) };
        (layers.sum::<usize>() + embeddings + lm_head + norm(&self.final_norm)) as u64
    }
}

impl Loader<'_> {
    fn layer(&self, layer: usize) -> Result<Layer, EngineError> {
        let config = self.config;
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.q_width(), config.kv_width());
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let attention = |part: &str| name(&format!("self_attn.{part}"));
        let mlp = |part: &str| name(&format!("mlp.{part}"));

        let qk_norms = if config.qk_norm {
            let norm = |part| self.norm(&attention(part), config.head_dim);
            Some((norm("q_norm.weight")?, norm("k_norm.weight")?))
        } else {
            None
        };
        let qkv = [(attention("q_proj"), q), (attention("k_proj"), kv), (attention("v_proj"), kv)];
        let gate_up = [(mlp("gate_proj"), intermediate), (mlp("up_proj"), intermediate)];
        Ok(Layer {
            input_norm: self.norm(&name("input_layernorm.weight"), hidden)?,
            qkv: self.linear(&qkv, config.biases.qkv, KSlices::whole(hidden))?,
            qk_norms,
            o: self.linear(
                &[(attention("o_proj"), hidden)],
                config.biases.o,
                KSlices::eighths(q, config.head_dim),
            )?,
            post_attention_norm: self.norm(&name("post_attention_layernorm.weight"), hidden)?,
            gate_up: self.linear(&gate_up, config.biases.mlp, KSlices::whole(hidden))?,
            down: self.linear(
                &[(mlp("down_proj"), hidden)],
                config.biases.mlp,
                KSlices::eighths(intermediate, DOWN_UNIT),
            )?,
        })
    }

    /// Projections of one input, each a module's name and its outputs.
    fn linear(
        &self,
        modules: &[(String, usize)],
        has_bias: bool,
        slices: KSlices,
    ) -> Result<Linear, EngineError> {
        let k = slices.ranges().last().map_or(0, |slice| slice.end);
        let mut parts = Vec::new();
        let mut bias = Vec::new();
        for (module, width) in modules {
            parts.push(self.matrix(&format!("{module}.weight"), *width, k)?);
            if has_bias {
                bias.extend(self.checkpoint.vector(&format!("{module}.bias"), *width)?);
            }
        }
        Ok(Linear { parts, bias: has_bias.then_some(bias), slices })
    }

    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix, EngineError> {
        self.checkpoint.matrix(name, [rows, columns], self.format)
    }

    fn norm(&self, name: &str, width: usize) -> Result<Norm, EngineError> {
        Ok(Norm { weight: self.checkpoint.vector(name, width)?, eps: self.config.rms_norm_eps })
    }
}
