//! The judge: one sequence, no cache, no batch, no threads, every sum written out. It shares with the serving
//! path the reading of files and the stated numerics (docs/contract.md part C), nothing else, and must agree
//! with it bit for bit. Slow on purpose; never a part of serving.

mod layer;

use std::path::Path;

use half::bf16;
use layer::OracleLayer;

use crate::cpu::reference;
use crate::k_slices::KSlices;
use crate::model_config::ModelConfig;
use crate::weights::{Checkpoint, MatrixFormat};
use crate::{EngineError, TokenId, WeightFormat};

/// A deliberately naive evaluator of one checkpoint.
pub struct Oracle {
    tensors: Tensors,
    /// `[vocab, hidden]`.
    embedding: Vec<f32>,
    layers: Vec<OracleLayer>,
    final_norm: Vec<f32>,
    /// `[vocab, hidden]`; `None` where the embedding is tied.
    lm_head: Option<Vec<f32>>,
}

/// How tensors are read, and what they are read for.
#[derive(Debug)]
struct Tensors {
    checkpoint: Checkpoint,
    config: ModelConfig,
    format: MatrixFormat,
}

impl Oracle {
    /// Loads a checkpoint, every tensor as f32 numbers (rounded to bf16 first where the format says so).
    pub fn load(model_dir: &Path, weights: WeightFormat) -> Result<Oracle, EngineError> {
        let config = ModelConfig::load(model_dir)?;
        let checkpoint = Checkpoint::open(model_dir)?;
        let tensors = Tensors { format: checkpoint.resolve(weights), checkpoint, config };
        let (vocab, hidden) = (tensors.config.vocab_size, tensors.config.hidden_size);

        let embedding = tensors.matrix("model.embed_tokens.weight", vocab, hidden)?;
        let layers = (0..tensors.config.num_layers)
            .map(|i| OracleLayer::load(&tensors, i))
            .collect::<Result<Vec<_>, _>>()?;
        let final_norm = tensors.checkpoint.numbers("model.norm.weight", &[hidden])?;
        let lm_head = match tensors.config.tie_word_embeddings {
            true => None,
            false => Some(tensors.matrix("lm_head.weight", vocab, hidden)?),
        };
        Ok(Oracle { tensors, embedding, layers, final_norm, lm_head })
    }

    /// The logits at the last position of `ids`, which must not be empty nor hold an id outside the
    /// vocabulary.
    pub fn logits(&self, ids: &[TokenId]) -> Vec<f32> {
        let hidden = self.hidden(ids);
        self.project(&hidden[hidden.len() - self.tensors.config.hidden_size..])
    }

    /// The logits at every position of `ids`: row i is what [`Oracle::logits`] says of `ids[..=i]`, at the
    /// cost of one.
    pub fn logits_at_every_position(&self, ids: &[TokenId]) -> Vec<Vec<f32>> {
        self.hidden(ids).chunks_exact(self.tensors.config.hidden_size).map(|row| self.project(row)).collect()
    }

    /// The residual stream behind the last layer, `[ids, hidden]`.
    fn hidden(&self, ids: &[TokenId]) -> Vec<f32> {
        let width = self.tensors.config.hidden_size;
        let row = |id: &TokenId| &self.embedding[*id as usize * width..(*id as usize + 1) * width];
        let embedded: Vec<f32> = ids.iter().flat_map(row).copied().collect();
        self.layers.iter().fold(embedded, |hidden, layer| layer.forward(&self.tensors, &hidden))
    }

    fn project(&self, row: &[f32]) -> Vec<f32> {
        let x = reference::rms_norm(row, &self.final_norm, self.tensors.config.rms_norm_eps);
        let weights = self.lm_head.as_ref().unwrap_or(&self.embedding);
        self.tensors.linear(x, weights, &KSlices::whole(row.len()), None)
    }
}

impl std::fmt::Debug for Oracle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Oracle").field("config", &self.tensors.config).finish_non_exhaustive()
    }
}

impl Tensors {
    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Vec<f32>, EngineError> {
        Ok(self.rounded(self.checkpoint.numbers(name, &[rows, columns])?))
    }

    /// To the format of matrices, GEMM inputs, keys and values.
    fn rounded(&self, numbers: Vec<f32>) -> Vec<f32> {
        match self.format {
            MatrixFormat::F32 => numbers,
            MatrixFormat::Bf16 => numbers.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect(),
        }
    }

    /// `[rows, k]` times `[columns, k]`, the input rounded.
    fn linear(&self, x: Vec<f32>, weights: &[f32], slices: &KSlices, bias: Option<&[f32]>) -> Vec<f32> {
        let k = slices.ranges().last().map_or(0, |slice| slice.end);
        reference::Linear { x: &self.rounded(x), weights, k, slices, bias }.compute()
    }
}
