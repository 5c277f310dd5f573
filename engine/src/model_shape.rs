//! Facts that follow from a config.json alone: numbers of weights by kind, and the size of a token's keys and
//! values. Used for planning, before a checkpoint exists; must count what `llama` loads.

use std::path::Path;

use crate::EngineError;
use crate::model_config::ModelConfig;

/// Inputs per scale in int4 (docs/contract.md C1).
const INT4_GROUP: u64 = 32;

/// Sizes of a decoder that the engine can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelShape {
    /// Number of layers.
    pub num_layers: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Width of the feed-forward layer.
    pub intermediate_size: u64,
    /// Number of query heads.
    pub num_heads: u64,
    /// Number of key heads, or of value heads.
    pub num_kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
    /// Rows of the embedding table.
    pub vocab_size: u64,
    /// Whether the vocabulary projection is the embedding table.
    pub tied: bool,
    /// Longest sequence that the model supports.
    pub max_len: u32,
    /// Number of norm weights and biases, over all layers.
    vectors: u64,
}

/// A matrix that activations are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Projection {
    /// Number of outputs.
    pub width: u64,
    /// Number of inputs.
    pub k: u64,
    /// Number of such matrices in the model.
    pub count: u64,
}

impl Projection {
    /// Number of weights, over all `count` matrices.
    pub fn weights(&self) -> u64 {
        self.width * self.k * self.count
    }

    /// Number of scales in fp8 and int8: one per output.
    pub fn channel_scales(&self) -> u64 {
        self.width * self.count
    }

    /// Number of scales in int4: one per group of 32 inputs and output.
    pub fn int4_scales(&self) -> u64 {
        self.width * self.k.div_ceil(INT4_GROUP) * self.count
    }
}

impl ModelShape {
    /// Reads a config.json, given its path or that of its checkpoint directory.
    pub fn read(path: &Path) -> Result<Self, EngineError> {
        let config = if path.is_dir() { ModelConfig::load(path)? } else { ModelConfig::read(path)? };
        Ok(Self::of(&config))
    }

    pub(crate) fn of(config: &ModelConfig) -> Self {
        let when = |present: bool, count: usize| if present { count } else { 0 };
        let (hidden, q, kv) = (config.hidden_size, config.q_width(), config.kv_width());
        let biases = when(config.biases.qkv, q + 2 * kv)
            + when(config.biases.o, hidden)
            + when(config.biases.mlp, 2 * config.intermediate_size + hidden);
        let norms = 2 * hidden + when(config.qk_norm, 2 * config.head_dim);
        Self {
            num_layers: config.num_layers as u64,
            hidden_size: hidden as u64,
            intermediate_size: config.intermediate_size as u64,
            num_heads: config.num_heads as u64,
            num_kv_heads: config.num_kv_heads as u64,
            head_dim: config.head_dim as u64,
            vocab_size: config.vocab_size as u64,
            tied: config.tie_word_embeddings,
            max_len: config.max_len,
            vectors: (config.num_layers * (biases + norms) + hidden) as u64,
        }
    }

    /// All matrices of the layers, by shape.
    pub fn layer_projections(&self) -> [Projection; 4] {
        let (q, kv) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let each = |width, k| Projection { width, k, count: self.num_layers };
        [
            each(q + 2 * kv, self.hidden_size),
            each(self.hidden_size, q),
            each(2 * self.intermediate_size, self.hidden_size),
            each(self.hidden_size, self.intermediate_size),
        ]
    }

    /// The projection to the vocabulary; the embedding table itself if it is tied.
    pub fn vocabulary_projection(&self) -> Projection {
        Projection { width: self.vocab_size, k: self.hidden_size, count: 1 }
    }

    /// Number of weights that every row is multiplied with: the layers' matrices and the vocabulary
    /// projection.
    pub fn multiplied(&self) -> u64 {
        self.layer_projections().iter().map(Projection::weights).sum::<u64>()
            + self.vocabulary_projection().weights()
    }

    /// Number of weights of the embedding table.
    pub fn embedding(&self) -> u64 {
        self.vocab_size * self.hidden_size
    }

    /// Number of norm weights and biases: stored in f32, too small to quantize.
    pub fn vectors(&self) -> u64 {
        self.vectors
    }

    /// Number of weights, tied ones counted once.
    pub fn num_parameters(&self) -> u64 {
        self.multiplied() + self.vectors + if self.tied { 0 } else { self.embedding() }
    }

    /// Number of key and value elements per token, over all layers. A sliding window does not reduce it: its
    /// blocks are kept.
    pub fn kv_numbers_per_token(&self) -> u64 {
        2 * self.num_layers * self.num_kv_heads * self.head_dim
    }
}
