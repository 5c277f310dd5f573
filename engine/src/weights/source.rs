//! Where a model's tensors come from: the files of a checkpoint, or a generator where only the shapes matter.

use crate::EngineError;
use crate::weights::{Matrix, MatrixFormat};

/// Reads rows of a matrix, widened to f32.
pub(crate) type RowReader<'a> = Box<dyn Fn(usize) -> Vec<f32> + Sync + 'a>;

/// Named tensors of checked shape.
pub(crate) trait TensorSource: Sync {
    /// A `[rows, columns]` matrix of floats, row-major.
    fn matrix(&self, name: &str, shape: [usize; 2], format: MatrixFormat) -> Result<Matrix, EngineError>;

    /// The rows of such a matrix one by one, for whoever makes something else of them.
    fn rows<'a>(&'a self, name: &str, shape: [usize; 2]) -> Result<RowReader<'a>, EngineError>;

    /// A vector, always f32: norms and biases are too small to save on.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError>;
}
