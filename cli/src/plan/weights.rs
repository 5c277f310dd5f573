//! What a model holds in memory: weights by format, the scales of quantized ones, what is never quantized, keys and values.
//!
//! `weights` counts every parameter at its format's width, as published sums do. What a server holds besides is kept apart: scales,
//! and what the engine does not quantize (the table of input embeddings, norms, biases).

use engine::ModelShape;
use serde::Serialize;

/// What weights are held as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    Bf16,
    /// 8-bit integers, an f32 scale for each output.
    Int8,
    /// 4-bit integers, a bf16 scale for each group of 32.
    Int4,
}

impl Format {
    /// As on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Bytes of one weight, without scales.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
            Self::Int8 => 1.0,
            Self::Int4 => 0.5,
        }
    }

    fn is_quantized(self) -> bool {
        matches!(self, Self::Int8 | Self::Int4)
    }
}

/// What keys and values are held as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum KvFormat {
    /// 32-bit floats.
    F32,
    /// 16-bit floats: what the engine holds beside every weight format but f32.
    Bf16,
    /// One byte: what other engines call fp8 or int8 KV.
    Int8,
}

impl KvFormat {
    /// Bytes of one number.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
            Self::Int8 => 1.0,
        }
    }
}

const GB: f64 = 1e9;
/// The engine holds norms and biases in f32, scales of channels too, scales of groups in bf16.
const VECTOR_BYTES: f64 = 4.0;
const INT8_SCALE_BYTES: f64 = 4.0;
const INT4_SCALE_BYTES: f64 = 2.0;
/// A table of input embeddings is never quantized.
const STORED_BYTES: f64 = 2.0;

/// The memory of one model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Weights {
    /// Parameters, tied ones once.
    pub parameters: u64,
    /// Every parameter at the format's width, GB.
    pub weights_gb: f64,
    /// Scales of quantized projections, GB.
    pub scales_gb: f64,
    /// What the engine holds above that: input embeddings, norms and biases, which are not quantized, GB.
    pub unquantized_gb: f64,
    /// All three: what has to fit, GB.
    pub resident_gb: f64,
    /// Of that, what each forward reads, GB: all but the table of input embeddings.
    pub read_gb: f64,
}

impl Weights {
    /// The memory of `shape` in `format`.
    pub fn of(shape: &ModelShape, format: Format) -> Self {
        let parameters = shape.num_parameters();
        let weights_gb = parameters as f64 * format.bytes() / GB;
        let vocabulary = shape.vocabulary_projection();
        let projections = shape.layer_projections();
        let all = projections.iter().chain([&vocabulary]);
        let scales_gb = match format {
            Format::F32 | Format::Bf16 => 0.0,
            Format::Int8 => all.map(|p| p.int8_scales()).sum::<u64>() as f64 * INT8_SCALE_BYTES / GB,
            Format::Int4 => all.map(|p| p.int4_scales()).sum::<u64>() as f64 * INT4_SCALE_BYTES / GB,
        };
        let multiplied_gb = shape.multiplied() as f64 * format.bytes() / GB;
        let vectors_gb = shape.vectors() as f64 * VECTOR_BYTES / GB;
        // A tied table is read as the last projection; quantized, it is that and the table.
        let table_gb = match (format.is_quantized(), shape.tied) {
            (true, _) => shape.embedding() as f64 * STORED_BYTES / GB,
            (false, true) => 0.0,
            (false, false) => shape.embedding() as f64 * format.bytes() / GB,
        };
        let read_gb = multiplied_gb + vectors_gb + scales_gb;
        let resident_gb = read_gb + table_gb;
        let unquantized_gb = resident_gb - weights_gb - scales_gb;
        Self { parameters, weights_gb, scales_gb, unquantized_gb, resident_gb, read_gb }
    }
}

/// Bytes of keys and values of one token, on all of `ranks` together: a KV head that is split over more ranks than there are
/// heads is held by each of them.
pub fn kv_bytes_per_token(shape: &ModelShape, format: KvFormat, ranks: u32) -> f64 {
    let copies = (u64::from(ranks) / shape.num_kv_heads).max(1);
    (shape.kv_numbers_per_token() * copies) as f64 * format.bytes()
}
