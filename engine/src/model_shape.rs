//! What follows from a config.json alone: how many weights a model has and of which kind, and what a token costs in keys and
//! values. For planning, before there is a checkpoint; it must count as `llama` loads.

use std::path::Path;

use crate::EngineError;
use crate::model_config::ModelConfig;

/// Inputs that share a scale in int4 (docs/contract.md C1).
const INT4_GROUP: u64 = 32;

/// The sizes of a decoder that the engine can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelShape {
    /// Layers.
    pub num_layers: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Width of the feed-forward part.
    pub intermediate_size: u64,
    /// Query heads.
    pub num_heads: u64,
    /// Key, and value, heads.
    pub num_kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
    /// Rows of the embedding table.
    pub vocab_size: u64,
    /// Whether the last projection is the embedding table.
    pub tied: bool,
    /// Longest sequence that the model is made for.
    pub max_len: u32,
    /// Numbers in norms and biases, all layers.
    vectors: u64,
}

/// A matrix that activations are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Projection {
    /// Outputs.
    pub width: u64,
    /// Inputs.
    pub k: u64,
    /// How many such matrices the model has.
    pub count: u64,
}

impl Projection {
    /// Its weights, all matrices together.
    pub fn weights(&self) -> u64 {
        self.width * self.k * self.count
    }

    /// Scales of its int8 form: one an output.
    pub fn int8_scales(&self) -> u64 {
        self.width * self.count
    }

    /// Scales of its int4 form: one a group of 32 inputs and output.
    pub fn int4_scales(&self) -> u64 {
        self.width * self.k.div_ceil(INT4_GROUP) * self.count
    }
}

impl ModelShape {
    /// Reads a config.json, or the one in a checkpoint directory.
    pub fn read(path: &Path) -> Result<Self, EngineError> {
        let config = if path.is_dir() { ModelConfig::load(path)? } else { ModelConfig::read(path)? };
        Ok(Self::of(&config))
    }

    pub(crate) fn of(config: &ModelConfig) -> Self {
        let when = |there: bool, count: usize| if there { count } else { 0 };
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

    /// Every matrix of the layers, by shape.
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

    /// The last projection; the embedding table itself where it is tied.
    pub fn vocabulary_projection(&self) -> Projection {
        Projection { width: self.vocab_size, k: self.hidden_size, count: 1 }
    }

    /// Weights that every row is multiplied with: the layers' matrices and the last projection.
    pub fn multiplied(&self) -> u64 {
        self.layer_projections().iter().map(Projection::weights).sum::<u64>()
            + self.vocabulary_projection().weights()
    }

    /// The embedding table.
    pub fn embedding(&self) -> u64 {
        self.vocab_size * self.hidden_size
    }

    /// Norms and biases: too small to be quantized, held in f32.
    pub fn vectors(&self) -> u64 {
        self.vectors
    }

    /// All weights, tied ones once.
    pub fn num_parameters(&self) -> u64 {
        self.multiplied() + self.vectors + if self.tied { 0 } else { self.embedding() }
    }

    /// Numbers of keys and values that a token leaves, all layers. A sliding window changes nothing: its blocks are kept.
    pub fn kv_numbers_per_token(&self) -> u64 {
        2 * self.num_layers * self.num_kv_heads * self.head_dim
    }
}
