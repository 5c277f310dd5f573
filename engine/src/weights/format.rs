//! Formats of weights in memory, once [`WeightFormat::AsStored`] is resolved against a checkpoint. This file
//! has names and rules only; `weights` (floats) and `cpu_kernels` (integers) convert the numbers.

use cpu_kernels::{MatrixFormat, QuantizedFormat};

use crate::WeightFormat;
use crate::model_config::ModelConfig;

/// Format of the matrices that activations are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinearFormat {
    Float(MatrixFormat),
    Quantized(QuantizedFormat),
    /// Eight-bit floats (E4M3) with scales; products use their values as bf16.
    Fp8(Fp8Scales),
}

/// What has a scale of FP8 weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fp8Scales {
    /// An output channel: the scale is applied to the finished sum.
    Channels,
    /// A channel's columns in a block of 128: the scale is applied to their sum in each K-slice
    /// (docs/contract.md C1). Matrices that are stored otherwise have their channel's scale in each block.
    Blocks,
}

/// The formats of a loaded model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Formats {
    /// The input embedding table: never quantized, since only single rows of it are read.
    pub(crate) embedding: MatrixFormat,
    /// All projections; for the vocabulary projection see [`Formats::vocabulary`].
    pub(crate) linear: LinearFormat,
}

/// Configuration of a model, and the formats in which its weights are loaded.
#[derive(Debug, Clone)]
pub(crate) struct ModelSpec {
    pub(crate) config: ModelConfig,
    pub(crate) formats: Formats,
}

impl Formats {
    /// `stored` is the format that holds every number of the checkpoint without loss.
    pub(crate) fn resolve(wanted: WeightFormat, stored: MatrixFormat) -> Self {
        let float = |format| Self { embedding: format, linear: LinearFormat::Float(format) };
        let quantized = |format| Self { embedding: stored, linear: LinearFormat::Quantized(format) };
        match wanted {
            WeightFormat::AsStored => float(stored),
            WeightFormat::F32 => float(MatrixFormat::F32),
            WeightFormat::Bf16 => float(MatrixFormat::Bf16),
            WeightFormat::Fp8 => Self::fp8(Fp8Scales::Channels),
            WeightFormat::Int8 => quantized(QuantizedFormat::Int8),
            WeightFormat::Int4 => quantized(QuantizedFormat::Int4),
        }
    }

    /// FP8 projections with these scales.
    pub(crate) fn fp8(scales: Fp8Scales) -> Self {
        Self { embedding: MatrixFormat::Bf16, linear: LinearFormat::Fp8(scales) }
    }

    /// Default format of the vocabulary projection: bf16 with FP8 weights, because FP8 checkpoints usually do
    /// not quantize it.
    pub(crate) fn vocabulary(self) -> LinearFormat {
        match self.linear {
            LinearFormat::Fp8(_) => LinearFormat::Float(self.embedding),
            other => other,
        }
    }

    /// Whether a tied embedding table and vocabulary projection are one matrix.
    pub(crate) fn ties(self) -> bool {
        self.vocabulary() == LinearFormat::Float(self.embedding)
    }

    /// Format of keys and values: f32 only with f32 weights.
    pub(crate) fn kv(self) -> MatrixFormat {
        match self.linear {
            LinearFormat::Float(format) => format,
            LinearFormat::Quantized(_) | LinearFormat::Fp8(_) => MatrixFormat::Bf16,
        }
    }

    /// Name that is hashed into `numerics_id`. The embedding's format follows from it and the checkpoint.
    pub(crate) fn as_str(self) -> &'static str {
        match self.linear {
            LinearFormat::Float(MatrixFormat::F32) => "f32",
            LinearFormat::Float(MatrixFormat::Bf16) => "bf16",
            LinearFormat::Fp8(Fp8Scales::Channels) => "fp8",
            LinearFormat::Fp8(Fp8Scales::Blocks) => "fp8 by blocks",
            LinearFormat::Quantized(QuantizedFormat::Int8) => "int8",
            LinearFormat::Quantized(QuantizedFormat::Int4) => "int4",
        }
    }
}
