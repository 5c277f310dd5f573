//! Weights of a linear layer, in one of the layouts that the kernels stream.

use std::sync::Arc;

use crate::floats::FloatMatrix;
use crate::packed::PackedMatrix;

/// Packed weights.
#[derive(Debug)]
pub enum LinearWeights {
    /// Shared with the embedding table if they are the same.
    Floats(Arc<FloatMatrix>),
    /// int8 or int4.
    Packed(PackedMatrix),
}

/// Matrices with the same input, as one `[width, k]`.
#[derive(Debug)]
pub struct Linear {
    /// `[width, k]`.
    pub weights: LinearWeights,
    /// `[width]`: factors of the finished sums of float weights, applied before the bias. Packed weights have
    /// their own scales.
    pub scales: Option<Vec<f32>>,
    /// `[width]`.
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    /// Length of an input row.
    pub fn k(&self) -> usize {
        match &self.weights {
            LinearWeights::Floats(matrix) => matrix.k(),
            LinearWeights::Packed(matrix) => matrix.k(),
        }
    }

    /// Length of an output row.
    pub fn width(&self) -> usize {
        match &self.weights {
            LinearWeights::Floats(matrix) => matrix.width(),
            LinearWeights::Packed(matrix) => matrix.width(),
        }
    }

    /// Bytes that a product reads, activations excluded.
    pub fn bytes(&self) -> u64 {
        let weights = match &self.weights {
            LinearWeights::Floats(matrix) => matrix.bytes(),
            LinearWeights::Packed(matrix) => matrix.bytes(),
        };
        let vectors = [&self.scales, &self.bias].into_iter().flatten();
        weights + vectors.map(|vector| size_of_val(vector.as_slice()) as u64).sum::<u64>()
    }
}
