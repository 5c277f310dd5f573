//! Where a model's tensors come from: the files of a checkpoint, or a generator where only the shapes matter.

use std::ops::Range;

use crate::EngineError;
use crate::k_slices::KSlices;
use crate::weights::{LinearFormat, Matrix, MatrixFormat};

/// Reads rows of a matrix, widened to f32.
pub(crate) type RowReader<'a> = Box<dyn Fn(usize) -> Vec<f32> + Sync + 'a>;

/// A stored matrix, and what of it is wanted: all of it, or what one rank of several holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorPart {
    pub(crate) name: String,
    /// `[rows, columns]`, as stored.
    pub(crate) shape: [usize; 2],
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

impl TensorPart {
    /// All of a matrix.
    pub(crate) fn whole(name: String, shape: [usize; 2]) -> Self {
        Self { name, shape, rows: 0..shape[0], columns: 0..shape[1] }
    }
}

/// Named tensors of checked shape.
pub(crate) trait TensorSource: Sync {
    /// A part of a matrix of floats, row-major.
    fn matrix(&self, part: &TensorPart, format: MatrixFormat) -> Result<Matrix, EngineError>;

    /// The rows of a part one by one, counted from the part's first but with all their columns, for whoever
    /// makes something else of them.
    fn rows<'a>(&'a self, part: &TensorPart) -> Result<RowReader<'a>, EngineError>;

    /// A vector, always f32: norms and biases are too small to save on.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError>;
}

/// Matrices that share their input, as a backend loads them.
pub(crate) struct LinearTensors<'a> {
    pub(crate) source: &'a dyn TensorSource,
    pub(crate) format: LinearFormat,
    /// Their outputs lie one behind the other in a row; all have the columns that `slices` cover.
    pub(crate) parts: Vec<TensorPart>,
    /// One number for each output.
    pub(crate) bias: Option<Vec<f32>>,
    /// How the sums are cut, in columns of the whole matrix.
    pub(crate) slices: KSlices,
    /// Whether other ranks hold the rest of the sums: scales of channels and the bias then come after them.
    pub(crate) partial: bool,
}

/// Rows of several matrices that stand one on the other, with all columns.
pub(crate) struct WholeRows<'a>(Vec<(RowReader<'a>, usize)>);

impl LinearTensors<'_> {
    /// The parts as floats.
    pub(crate) fn matrices(&self, format: MatrixFormat) -> Result<Vec<Matrix>, EngineError> {
        self.parts.iter().map(|part| self.source.matrix(part, format)).collect()
    }

    /// The rows of the parts.
    pub(crate) fn whole_rows(&self) -> Result<WholeRows<'_>, EngineError> {
        let rows = self.parts.iter().map(|part| Ok((self.source.rows(part)?, part.rows.len())));
        Ok(WholeRows(rows.collect::<Result<_, EngineError>>()?))
    }
}

impl WholeRows<'_> {
    /// Of all matrices together.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|(_, rows)| rows).sum()
    }

    pub(crate) fn row(&self, mut row: usize) -> Vec<f32> {
        for (read, rows) in &self.0 {
            if row < *rows {
                return read(row);
            }
            row -= rows;
        }
        unreachable!("rows are counted by the same heights")
    }
}
