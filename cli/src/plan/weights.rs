//! Memory of a model: weights by format, the scales of quantized weights, the parts that are never quantized,
//! keys and values.
//!
//! `weights` counts every parameter at its format's width, as published sums do. The additional memory of a
//! server is counted separately: scales, and what the engine does not quantize (input embeddings, norms,
//! biases).

use engine::{ModelShape, Projection};
use serde::Serialize;

/// Weight formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    Bf16,
    /// 8-bit floats, with an f32 scale per output channel; the vocabulary projection is 16-bit.
    Fp8,
    /// 8-bit integers, with an f32 scale per output channel.
    Int8,
    /// 4-bit integers, with a bf16 scale per group of 32.
    Int4,
}

impl Format {
    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Bytes per weight, without scales.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
            Self::Fp8 | Self::Int8 => 1.0,
            Self::Int4 => 0.5,
        }
    }

    /// What the last projection is held as.
    fn of_vocabulary(self) -> Self {
        match self {
            Self::Fp8 => Self::Bf16,
            other => other,
        }
    }

    /// Whether that is a copy of the table of input embeddings where both are one in the checkpoint.
    fn copies_table(self) -> bool {
        matches!(self, Self::Int8 | Self::Int4)
    }
}

/// Formats of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum KvFormat {
    /// 32-bit floats.
    F32,
    /// 16-bit floats: the engine's format with every weight format except f32.
    Bf16,
    /// One byte: fp8 or int8 KV in other engines.
    Int8,
}

impl KvFormat {
    /// Bytes per number.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
            Self::Int8 => 1.0,
        }
    }
}

const GB: f64 = 1e9;
/// The engine keeps norms, biases and channel scales in f32, and group scales in bf16.
const VECTOR_BYTES: f64 = 4.0;
const CHANNEL_SCALE_BYTES: f64 = 4.0;
const INT4_SCALE_BYTES: f64 = 2.0;
/// Input embeddings are never quantized.
const STORED_BYTES: f64 = 2.0;

/// The memory of one model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WeightMemory {
    /// Number of parameters; tied ones count once.
    pub parameters: u64,
    /// All parameters at the format's width, GB.
    pub weights_gb: f64,
    /// Scales of quantized projections, GB.
    pub scales_gb: f64,
    /// Additional memory for what the engine does not quantize: input embeddings, norms and biases, GB.
    pub unquantized_gb: f64,
    /// The sum of the three, which has to fit into memory, GB.
    pub resident_gb: f64,
    /// The part that each forward reads, GB: all except the input embeddings.
    pub read_gb: f64,
}

impl WeightMemory {
    /// The memory of `shape` in `format`.
    pub fn of(shape: &ModelShape, format: Format) -> Self {
        let parameters = shape.num_parameters();
        let weights_gb = parameters as f64 * format.bytes() / GB;
        let vocabulary = shape.vocabulary_projection();
        let projections = shape.layer_projections();
        let all = projections.iter().chain([&vocabulary]);
        let channels = |p: &Projection| p.channel_scales() as f64 * CHANNEL_SCALE_BYTES / GB;
        let scales_gb = match format {
            Format::F32 | Format::Bf16 => 0.0,
            Format::Fp8 => projections.iter().map(channels).sum(),
            Format::Int8 => all.map(channels).sum(),
            Format::Int4 => all.map(|p| p.int4_scales()).sum::<u64>() as f64 * INT4_SCALE_BYTES / GB,
        };
        let of_layers = projections.iter().map(Projection::weights).sum::<u64>() as f64 * format.bytes();
        let multiplied_gb = (of_layers + vocabulary.weights() as f64 * format.of_vocabulary().bytes()) / GB;
        let vectors_gb = shape.vectors() as f64 * VECTOR_BYTES / GB;
        // A tied table is also the output projection; when quantized, both exist separately.
        let table_gb = match format {
            _ if shape.tied && !format.copies_table() => 0.0,
            Format::Fp8 | Format::Int8 | Format::Int4 => shape.embedding() as f64 * STORED_BYTES / GB,
            Format::F32 | Format::Bf16 => shape.embedding() as f64 * format.bytes() / GB,
        };
        let read_gb = multiplied_gb + vectors_gb + scales_gb;
        let resident_gb = read_gb + table_gb;
        let unquantized_gb = resident_gb - weights_gb - scales_gb;
        Self { parameters, weights_gb, scales_gb, unquantized_gb, resident_gb, read_gb }
    }
}

/// KV bytes per token, summed over all `ranks`: with more ranks than KV heads, each head is replicated.
pub fn kv_bytes_per_token(shape: &ModelShape, format: KvFormat, ranks: u32) -> f64 {
    let copies = (u64::from(ranks) / shape.num_kv_heads).max(1);
    (shape.kv_numbers_per_token() * copies) as f64 * format.bytes()
}
