//! The reference implementation for tests: one sequence, no cache, no batch, no threads, every sum written
//! out. It shares only file reading and the stated numerics (docs/contract.md part C) with the serving path,
//! and must agree with it bit for bit. Slow on purpose; never used for serving.

mod layer;

use std::path::Path;

use cpu_kernels::reference::{self, QuantizedWeights};
use cpu_kernels::{KSlices, MatrixFormat};
use half::bf16;
use layer::OracleLayer;

use crate::model_config::ModelConfig;
use crate::weights::{Checkpoint, Formats, LinearFormat};
use crate::{EngineError, TokenId, WeightFormat};

/// A deliberately naive evaluator of one checkpoint.
pub struct Oracle {
    tensors: Tensors,
    /// `[vocab, hidden]`.
    embedding: Vec<f32>,
    layers: Vec<OracleLayer>,
    final_norm: Vec<f32>,
    /// `[vocab, hidden]`.
    lm_head: OracleMatrix,
}

/// A checkpoint, its configuration and the formats to convert to.
#[derive(Debug)]
struct Tensors {
    checkpoint: Checkpoint,
    config: ModelConfig,
    formats: Formats,
}

/// Weights of a projection.
#[derive(Debug)]
enum OracleMatrix {
    /// f32 numbers rounded to the format, `[columns, k]`.
    Floats(Vec<f32>),
    Quantized(QuantizedWeights),
}

impl Oracle {
    /// Loads a checkpoint as plain numbers, rounded or quantized to the format.
    pub fn load(model_dir: &Path, weights: WeightFormat) -> Result<Oracle, EngineError> {
        let config = ModelConfig::load(model_dir)?;
        let checkpoint = Checkpoint::open(model_dir)?;
        let formats = Formats::resolve(weights, checkpoint.stored_format());
        let tensors = Tensors { formats, checkpoint, config };
        let (vocab, hidden) = (tensors.config.vocab_size, tensors.config.hidden_size);

        const EMBEDDING: &str = "model.embed_tokens.weight";
        let embedding = factors(tensors.checkpoint.numbers(EMBEDDING, &[vocab, hidden])?, formats.embedding);
        let layers = (0..tensors.config.num_layers)
            .map(|i| OracleLayer::load(&tensors, i))
            .collect::<Result<Vec<_>, _>>()?;
        let final_norm = tensors.checkpoint.numbers("model.norm.weight", &[hidden])?;
        let lm_head = if tensors.config.tie_word_embeddings { EMBEDDING } else { "lm_head.weight" };
        let lm_head = tensors.matrix(lm_head, vocab, hidden)?;
        Ok(Oracle { tensors, embedding, layers, final_norm, lm_head })
    }

    /// Returns the logits at the last position of `ids`. `ids` must not be empty, and all ids must be in the
    /// vocabulary.
    pub fn logits(&self, ids: &[TokenId]) -> Vec<f32> {
        let hidden = self.hidden(ids);
        self.project(&hidden[hidden.len() - self.tensors.config.hidden_size..])
    }

    /// Returns the logits at every position of `ids`: row i equals [`Oracle::logits`] of `ids[..=i]`, at the
    /// cost of one call.
    pub fn logits_at_every_position(&self, ids: &[TokenId]) -> Vec<Vec<f32>> {
        self.hidden(ids).chunks_exact(self.tensors.config.hidden_size).map(|row| self.project(row)).collect()
    }

    /// The residual stream after the last layer, `[ids, hidden]`.
    fn hidden(&self, ids: &[TokenId]) -> Vec<f32> {
        let width = self.tensors.config.hidden_size;
        let row = |id: &TokenId| &self.embedding[*id as usize * width..(*id as usize + 1) * width];
        let embedded: Vec<f32> = ids.iter().flat_map(row).copied().collect();
        self.layers.iter().fold(embedded, |hidden, layer| layer.forward(&self.tensors, &hidden))
    }

    fn project(&self, row: &[f32]) -> Vec<f32> {
        let x = reference::rms_norm(row, &self.final_norm, self.tensors.config.rms_norm_eps);
        self.lm_head.multiply(x, self.tensors.formats, &KSlices::whole(row.len()), None)
    }
}

impl std::fmt::Debug for Oracle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Oracle").field("config", &self.tensors.config).finish_non_exhaustive()
    }
}

impl Tensors {
    /// Loads the weights of a projection, `[columns, k]`.
    fn matrix(&self, name: &str, columns: usize, k: usize) -> Result<OracleMatrix, EngineError> {
        let numbers = self.checkpoint.numbers(name, &[columns, k])?;
        Ok(match self.formats.linear {
            LinearFormat::Float(format) => OracleMatrix::Floats(factors(numbers, format)),
            LinearFormat::Quantized(format) => {
                OracleMatrix::Quantized(QuantizedWeights::new(format, &numbers, k))
            }
        })
    }

    /// Rounds keys and values to the KV format.
    fn stored(&self, numbers: Vec<f32>) -> Vec<f32> {
        rounded(numbers, self.formats.kv())
    }
}

impl OracleMatrix {
    /// `x` `[rows, k]` times `[columns, k]`, with the input rounded or quantized as the weights' format
    /// requires.
    fn multiply(&self, x: Vec<f32>, formats: Formats, slices: &KSlices, bias: Option<&[f32]>) -> Vec<f32> {
        let k = slices.ranges().last().map_or(0, |slice| slice.end);
        match self {
            Self::Floats(weights) => {
                let x = match formats.linear {
                    LinearFormat::Float(format) => factors(x, format),
                    LinearFormat::Quantized(_) => x,
                };
                reference::Linear { x: &x, weights, k, slices, bias }.compute()
            }
            Self::Quantized(weights) => weights.multiply(&x, slices, bias),
        }
    }
}

/// Rounds numbers as factors of a product in that format: weights or their inputs.
fn factors(numbers: Vec<f32>, format: MatrixFormat) -> Vec<f32> {
    match format {
        MatrixFormat::F32 => numbers,
        MatrixFormat::Bf16 => numbers.into_iter().map(reference::bf16_factor).collect(),
    }
}

/// Rounds numbers as the format stores them.
fn rounded(numbers: Vec<f32>, format: MatrixFormat) -> Vec<f32> {
    match format {
        MatrixFormat::F32 => numbers,
        MatrixFormat::Bf16 => numbers.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect(),
    }
}
