//! A matrix before it is packed for kernels: its number format, its numbers in our own memory, and the
//! interface to read rows that are stored elsewhere.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use crate::KernelError;

/// Number format of a float matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixFormat {
    /// 32 bits.
    F32,
    /// The upper 16 of those bits.
    Bf16,
}

impl MatrixFormat {
    /// Name that is hashed into `numerics_id`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes per number.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::Bf16 => size_of::<bf16>(),
        }
    }
}

/// Format that a matrix is quantized to at load (docs/contract.md C1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantizedFormat {
    /// One scale per output channel.
    Int8,
    /// One scale per output channel and 32 numbers along K.
    Int4,
}

/// Numbers of a matrix; shared, since tied embeddings are one matrix with two uses.
#[derive(Debug, Clone)]
pub enum MatrixData {
    /// `[rows * columns]`.
    F32(Arc<Vec<f32>>),
    /// `[rows * columns]`.
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
pub struct Matrix {
    data: MatrixData,
    shape: [usize; 2],
}

impl Matrix {
    /// Creates a matrix of `shape` `[rows, columns]`, which `data` must match.
    pub fn new(data: MatrixData, shape: [usize; 2]) -> Self {
        Self { data, shape }
    }

    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Number of inputs.
    pub fn columns(&self) -> usize {
        self.shape[1]
    }

    /// The numbers, row by row.
    pub fn data(&self) -> &MatrixData {
        &self.data
    }
}

/// Destination of a read, in the wanted format.
#[derive(Debug)]
pub enum NumbersMut<'a> {
    /// Not rounded.
    F32(&'a mut [f32]),
    /// Rounded to the nearest, ties to even.
    Bf16(&'a mut [bf16]),
}

impl NumbersMut<'_> {
    /// Number of elements to read.
    #[expect(clippy::len_without_is_empty, reason = "no caller needs is_empty")]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::Bf16(numbers) => numbers.len(),
        }
    }

    /// Writes numbers from index `at` on.
    pub fn put(&mut self, at: usize, numbers: impl Iterator<Item = f32>) {
        match self {
            Self::F32(out) => out[at..].iter_mut().zip(numbers).for_each(|(out, x)| *out = x),
            Self::Bf16(out) => {
                out[at..].iter_mut().zip(numbers).for_each(|(out, x)| *out = bf16::from_f32(x))
            }
        }
    }

    /// Sets every number to +0.
    pub fn fill_with_zeros(&mut self) {
        match self {
            Self::F32(numbers) => numbers.fill(0.0),
            Self::Bf16(numbers) => numbers.fill(bf16::ZERO),
        }
    }

    /// A range of the destination.
    pub fn part(&mut self, range: Range<usize>) -> NumbersMut<'_> {
        match self {
            Self::F32(numbers) => NumbersMut::F32(&mut numbers[range]),
            Self::Bf16(numbers) => NumbersMut::Bf16(&mut numbers[range]),
        }
    }
}

/// Rows to be packed, read block by block and by several threads in parallel.
pub trait RowBlocks: Sync {
    /// Number of rows.
    fn rows(&self) -> usize;

    /// Number of columns.
    fn columns(&self) -> usize;

    /// Fills `out` with consecutive rows. Errors are passed on in [`KernelError::Rows`].
    fn read(&self, rows: Range<usize>, out: NumbersMut<'_>) -> Result<(), KernelError>;
}

/// A matrix in memory.
impl RowBlocks for Matrix {
    fn rows(&self) -> usize {
        Matrix::rows(self)
    }

    fn columns(&self) -> usize {
        Matrix::columns(self)
    }

    fn read(&self, rows: Range<usize>, mut out: NumbersMut<'_>) -> Result<(), KernelError> {
        let range = rows.start * Matrix::columns(self)..rows.end * Matrix::columns(self);
        match (self.data(), &mut out) {
            (MatrixData::Bf16(numbers), NumbersMut::Bf16(out)) => out.copy_from_slice(&numbers[range]),
            (MatrixData::Bf16(numbers), _) => out.put(0, numbers[range].iter().map(|x| x.to_f32())),
            (MatrixData::F32(numbers), _) => out.put(0, numbers[range].iter().copied()),
        }
        Ok(())
    }
}
