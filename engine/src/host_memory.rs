//! Checks that a model's weights fit in free memory before they are read. Otherwise the system would
//! overcommit and later kill the process without a message.

use cpu_kernels::{MatrixFormat, QuantizedFormat, SCALE_BLOCK};

use crate::EngineError;
use crate::model_config::ModelConfig;
use crate::model_shape::ModelShape;
use crate::system_memory::free_bytes;
use crate::weights::{Formats, Fp8Scales, LinearFormat};

/// Refuses a model whose weights, an equal part of them on each of `nodes`, need more memory than is free,
/// and warns if its KV does not fit beside them: that memory is taken as sequences grow. Accepts any model if
/// the system does not report free memory.
pub(crate) fn check_fits(
    config: &ModelConfig,
    formats: Formats,
    kv_memory_bytes: u64,
    nodes: usize,
) -> Result<(), EngineError> {
    let (weights, free) = (weight_bytes(config, formats) / nodes as u64, free_bytes());
    fits(weights, free)?;
    if fits(weights.saturating_add(kv_memory_bytes), free).is_err() {
        tracing::warn!(
            weights,
            kv_memory_bytes,
            free,
            "KV may not fit beside the weights: lower --kv-memory"
        );
    }
    Ok(())
}

fn fits(needed: u64, free: Option<u64>) -> Result<(), EngineError> {
    match free {
        Some(free) if needed > free => Err(EngineError::NotEnoughMemory { needed, free }),
        _ => Ok(()),
    }
}

/// Lower bound of the bytes that the weights take in memory.
fn weight_bytes(config: &ModelConfig, formats: Formats) -> u64 {
    let shape = ModelShape::of(config);
    let of_layers = shape.layer_projections().map(|projection| (projection, formats.linear));
    let projections = of_layers.into_iter().chain([(shape.vocabulary_projection(), formats.vocabulary())]);
    let linear: u64 = projections
        .map(|(projection, format)| match format {
            // Stored as bf16 on the CPU (see `host`).
            LinearFormat::Fp8(by) => {
                let scales = match by {
                    Fp8Scales::Channels => projection.channel_scales(),
                    Fp8Scales::Blocks => projection.weights() / SCALE_BLOCK as u64,
                };
                projection.weights() * MatrixFormat::Bf16.size() as u64 + scales * size_of::<f32>() as u64
            }
            LinearFormat::Float(format) => projection.weights() * format.size() as u64,
            LinearFormat::Quantized(QuantizedFormat::Int8) => {
                projection.weights() + projection.channel_scales() * size_of::<f32>() as u64
            }
            LinearFormat::Quantized(QuantizedFormat::Int4) => {
                projection.weights() / 2 + projection.int4_scales() * MatrixFormat::Bf16.size() as u64
            }
        })
        .sum();
    let is_tied_table = shape.tied && formats.ties();
    let table = if is_tied_table { 0 } else { shape.embedding() * formats.embedding.size() as u64 };
    linear + table + shape.vectors() * size_of::<f32>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WeightFormat;

    #[test]
    fn weights_that_do_not_fit_are_rejected_with_both_numbers() {
        assert!(fits(10, Some(10)).is_ok() && fits(10, None).is_ok());
        let text = fits(38_400_000_000, Some(21_000_000_000)).unwrap_err().to_string();
        assert!(text.contains("38.4 GB") && text.contains("21.0 GB") && text.contains("int4"), "{text}");
    }

    #[test]
    fn bytes_follow_the_format() {
        let config = crate::model_config::tests::tiny();
        let bytes = |wanted| weight_bytes(&config, Formats::resolve(wanted, MatrixFormat::Bf16));
        let parameters = config.num_parameters();
        let vectors = 2 * config.norm_numbers();
        assert_eq!(bytes(WeightFormat::F32), 4 * parameters);
        assert_eq!(bytes(WeightFormat::Bf16), 2 * parameters + vectors);
        let scales: u64 =
            ModelShape::of(&config).layer_projections().iter().map(|p| p.channel_scales()).sum();
        assert_eq!(bytes(WeightFormat::Fp8), bytes(WeightFormat::Bf16) + 4 * scales);
        let (int8, int4) = (bytes(WeightFormat::Int8), bytes(WeightFormat::Int4));
        assert!(int4 < int8 && int8 < 2 * parameters, "{int4} {int8} {parameters}");
    }
}
