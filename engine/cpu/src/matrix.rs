//! A matrix before it is laid out for kernels: its number format, its numbers in memory of our own, and how whoever has
//! the numbers elsewhere hands them over, rows at a time.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use crate::KernelError;

/// What a matrix of floats is held as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixFormat {
    /// 32 bits.
    F32,
    /// The upper 16 of them.
    Bf16,
}

impl MatrixFormat {
    /// The name that goes into `numerics_id`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of a number.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::Bf16 => size_of::<bf16>(),
        }
    }
}

/// What a matrix is quantized to while it is loaded (docs/contract.md C1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantizedFormat {
    /// One scale for each output channel.
    Int8,
    /// One scale for each output channel and 32 numbers along K.
    Int4,
}

/// A matrix's numbers in their format; shared, for tied embeddings are one matrix with two uses.
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
    /// Of `shape` `[rows, columns]`; `data` has as many numbers.
    pub fn new(data: MatrixData, shape: [usize; 2]) -> Self {
        Self { data, shape }
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Inputs.
    pub fn columns(&self) -> usize {
        self.shape[1]
    }

    /// The numbers, row by row.
    pub fn data(&self) -> &MatrixData {
        &self.data
    }
}

/// Where numbers are read to, in the format that is wanted.
#[derive(Debug)]
pub enum NumbersMut<'a> {
    /// Whole.
    F32(&'a mut [f32]),
    /// Rounded to the nearest, ties to even.
    Bf16(&'a mut [bf16]),
}

impl NumbersMut<'_> {
    /// How many are wanted.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks whether a place for rows is empty")]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::Bf16(numbers) => numbers.len(),
        }
    }

    /// Replaces numbers from `at` on.
    pub fn put(&mut self, at: usize, numbers: impl Iterator<Item = f32>) {
        match self {
            Self::F32(out) => out[at..].iter_mut().zip(numbers).for_each(|(out, x)| *out = x),
            Self::Bf16(out) => {
                out[at..].iter_mut().zip(numbers).for_each(|(out, x)| *out = bf16::from_f32(x))
            }
        }
    }

    /// Makes every number +0.
    pub fn fill_with_zeros(&mut self) {
        match self {
            Self::F32(numbers) => numbers.fill(0.0),
            Self::Bf16(numbers) => numbers.fill(bf16::ZERO),
        }
    }

    /// A range of them.
    pub fn part(&mut self, range: Range<usize>) -> NumbersMut<'_> {
        match self {
            Self::F32(numbers) => NumbersMut::F32(&mut numbers[range]),
            Self::Bf16(numbers) => NumbersMut::Bf16(&mut numbers[range]),
        }
    }
}

/// The rows of something that is laid out, read block by block and by several threads at once.
pub trait RowBlocks: Sync {
    /// How many there are.
    fn rows(&self) -> usize;

    /// Numbers in each.
    fn columns(&self) -> usize;

    /// Fills `out` with rows, one behind the other. What goes wrong is passed on in [`KernelError::Rows`].
    fn read(&self, rows: Range<usize>, out: NumbersMut<'_>) -> Result<(), KernelError>;
}

/// A matrix that is there already.
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
