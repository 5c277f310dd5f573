//! The reference implementation for tests: one sequence, no cache, no batch, no threads, every sum written
//! out. It shares only file reading and the stated numerics (docs/contract.md part C) with the serving path,
//! and must agree with it bit for bit. Slow on purpose; never used for serving.

mod layer;

use std::path::Path;

use cpu_kernels::reference::{self, QuantizedWeights, Scales};
use cpu_kernels::{KSlices, MatrixFormat, SCALE_BLOCK};
use half::bf16;
use layer::OracleLayer;

use crate::model_config::ModelConfig;
use crate::weights::{Checkpoint, Formats, Fp8Rows, Fp8Scales, LinearFormat, TensorPart, TensorSource};
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
    Floats(Vec<f32>, MatrixFormat),
    Quantized(QuantizedWeights),
    /// Values of eight-bit floats, `[columns, k]`, and scales of the columns or of their blocks.
    Scaled(Vec<f32>, Vec<f32>, Fp8Scales),
}

impl Oracle {
    /// Loads a checkpoint as plain numbers, rounded or quantized to the format.
    pub fn load(model_dir: &Path, weights: WeightFormat) -> Result<Oracle, EngineError> {
        let config = ModelConfig::load(model_dir)?;
        let checkpoint = Checkpoint::open(model_dir, &config)?;
        let formats = checkpoint.formats(weights, &config);
        let tensors = Tensors { formats, checkpoint, config };
        let (vocab, hidden) = (tensors.config.vocab_size, tensors.config.hidden_size);

        const EMBEDDING: &str = "model.embed_tokens.weight";
        let embedding = factors(tensors.checkpoint.numbers(EMBEDDING, &[vocab, hidden])?, formats.embedding);
        let layers = (0..tensors.config.num_layers)
            .map(|i| OracleLayer::load(&tensors, i))
            .collect::<Result<Vec<_>, _>>()?;
        let final_norm = tensors.checkpoint.numbers("model.norm.weight", &[hidden])?;
        let tied = tensors.config.tie_word_embeddings;
        let lm_head = if tied { EMBEDDING } else { "lm_head.weight" };
        let is_fp8 = !tied && tensors.checkpoint.stores_fp8(lm_head);
        let format = if is_fp8 { formats.linear } else { formats.vocabulary() };
        let lm_head = tensors.matrix(format, lm_head, [vocab, hidden])?;
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
        self.lm_head.multiply(x, &KSlices::whole(row.len()), None)
    }
}

impl std::fmt::Debug for Oracle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Oracle").field("config", &self.tensors.config).finish_non_exhaustive()
    }
}

impl Tensors {
    /// Loads the weights of a projection, `[columns, k]`.
    fn matrix(
        &self,
        format: LinearFormat,
        name: &str,
        [columns, k]: [usize; 2],
    ) -> Result<OracleMatrix, EngineError> {
        if let LinearFormat::Fp8(by) = format {
            return self.fp8(name, [columns, k], by);
        }
        let numbers = self.checkpoint.numbers(name, &[columns, k])?;
        Ok(match format {
            LinearFormat::Float(format) => OracleMatrix::Floats(factors(numbers, format), format),
            LinearFormat::Fp8(_) => unreachable!("handled above"),
            LinearFormat::Quantized(format) => {
                OracleMatrix::Quantized(QuantizedWeights::new(format, &numbers, k))
            }
        })
    }

    /// Loads an FP8 matrix: codes and scales as stored, or rows quantized one by one.
    fn fp8(&self, name: &str, [columns, k]: [usize; 2], by: Fp8Scales) -> Result<OracleMatrix, EngineError> {
        let scales_per_row = if by == Fp8Scales::Blocks { k.div_ceil(SCALE_BLOCK) } else { 1 };
        if self.checkpoint.stores_fp8(name) {
            let (mut codes, mut scales) = (vec![0; columns * k], vec![0.0; columns * scales_per_row]);
            let part = TensorPart::whole(name.to_owned(), [columns, k]);
            let out = Fp8Rows { codes: &mut codes, scales: &mut scales, scales_per_row };
            self.checkpoint.read_fp8(&part, 0..columns, out)?;
            let values = codes.into_iter().map(reference::fp8_value).collect();
            return Ok(OracleMatrix::Scaled(values, scales, by));
        }
        let numbers = self.checkpoint.numbers(name, &[columns, k])?;
        let (rows, scales): (Vec<Vec<f32>>, Vec<f32>) =
            numbers.chunks_exact(k).map(reference::fp8_row).unzip();
        let scales = scales.into_iter().flat_map(|scale| vec![scale; scales_per_row]).collect();
        Ok(OracleMatrix::Scaled(rows.concat(), scales, by))
    }

    /// Rounds keys and values to the KV format.
    fn stored(&self, numbers: Vec<f32>) -> Vec<f32> {
        rounded(numbers, self.formats.kv())
    }
}

impl OracleMatrix {
    /// `x` `[rows, k]` times `[columns, k]`, with the input rounded or quantized as the weights' format
    /// requires.
    fn multiply(&self, x: Vec<f32>, slices: &KSlices, bias: Option<&[f32]>) -> Vec<f32> {
        let k = slices.ranges().last().map_or(0, |slice| slice.end);
        match self {
            Self::Floats(weights, format) => {
                let x = factors(x, *format);
                reference::Linear { x: &x, weights, k, slices, scales: None, bias }.compute()
            }
            Self::Scaled(weights, scales, by) => {
                let x = factors(x, MatrixFormat::Bf16);
                let scales = match by {
                    Fp8Scales::Channels => Scales::Columns(scales),
                    Fp8Scales::Blocks => Scales::Blocks(scales),
                };
                reference::Linear { x: &x, weights, k, slices, scales: Some(scales), bias }.compute()
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
