//! A matrix's numbers, in memory of our own.

use std::sync::Arc;

use half::bf16;

/// A matrix's numbers in their format; shared, for tied embeddings are one matrix with two uses.
#[derive(Debug, Clone)]
pub(crate) enum MatrixData {
    F32(Arc<Vec<f32>>),
    Bf16(Arc<Vec<bf16>>),
}

impl From<Vec<f32>> for MatrixData {
    fn from(numbers: Vec<f32>) -> Self {
        Self::F32(Arc::new(numbers))
    }
}

impl From<Vec<bf16>> for MatrixData {
    fn from(numbers: Vec<bf16>) -> Self {
        Self::Bf16(Arc::new(numbers))
    }
}

/// `[rows, columns]`, row-major: a weight matrix maps `columns` inputs to `rows` outputs.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    data: MatrixData,
    shape: [usize; 2],
}

impl Matrix {
    pub(crate) fn new(data: MatrixData, shape: [usize; 2]) -> Self {
        Self { data, shape }
    }

    pub(crate) fn rows(&self) -> usize {
        self.shape[0]
    }

    pub(crate) fn columns(&self) -> usize {
        self.shape[1]
    }

    pub(crate) fn data(&self) -> &MatrixData {
        &self.data
    }
}
