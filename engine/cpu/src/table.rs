//! The embedding table: rows as stored, or the panels of a projection that uses the same matrix, so that tied
//! embeddings are in memory once.

use std::sync::Arc;

use half::bf16;

use super::FloatMatrix;
use super::threads::{SharedSliceMut, Threads};
use crate::KernelError;
use crate::elementwise::as_factor;
use crate::matrix::{Matrix, MatrixData, MatrixFormat, NumbersMut, RowBlocks};

/// `[vocab, hidden]`; shared by ranks.
#[derive(Debug, Clone)]
pub enum Table {
    /// Rows as stored.
    Rows(Matrix),
    /// Panels of the vocabulary projection, which is the same matrix.
    Panels(Arc<FloatMatrix>),
}

impl Table {
    /// Reads a table into memory, row by row as it is stored, on all threads.
    pub fn load(format: MatrixFormat, rows: &dyn RowBlocks, threads: &Threads) -> Result<Self, KernelError> {
        let shape = [rows.rows(), rows.columns()];
        let data = match format {
            MatrixFormat::F32 => {
                MatrixData::from(fill(rows, threads, |out: &mut [f32]| NumbersMut::F32(out))?)
            }
            MatrixFormat::Bf16 => {
                MatrixData::from(fill(rows, threads, |out: &mut [bf16]| NumbersMut::Bf16(out))?)
            }
        };
        Ok(Self::Rows(Matrix::new(data, shape)))
    }

    /// Number of elements per row.
    pub fn columns(&self) -> usize {
        match self {
            Self::Rows(matrix) => matrix.columns(),
            Self::Panels(matrix) => matrix.k(),
        }
    }

    /// Writes row `id`, widened to f32. A bf16 row is rounded to product factors in both forms.
    pub(super) fn row(&self, id: usize, out: &mut [f32]) {
        let matrix = match self {
            Self::Rows(matrix) => matrix,
            Self::Panels(matrix) => return matrix.row(id, out),
        };
        let row = id * matrix.columns()..(id + 1) * matrix.columns();
        match matrix.data() {
            MatrixData::F32(numbers) => out.copy_from_slice(&numbers.as_slice()[row]),
            MatrixData::Bf16(numbers) => {
                out.iter_mut()
                    .zip(&numbers.as_slice()[row])
                    .for_each(|(out, x)| *out = as_factor(*x).to_f32());
            }
        }
    }
}

fn fill<T: bytemuck::Zeroable + Send>(
    rows: &dyn RowBlocks,
    threads: &Threads,
    place: impl Fn(&mut [T]) -> NumbersMut<'_> + Sync,
) -> Result<Vec<T>, KernelError> {
    let columns = rows.columns();
    let mut numbers: Vec<T> = bytemuck::zeroed_vec(rows.rows() * columns);
    let shared = SharedSliceMut::new(&mut numbers);
    threads.try_for_ranges(rows.rows(), |range| {
        // SAFETY: ranges of rows are disjoint.
        let out = unsafe { shared.slice_mut(range.start * columns..range.end * columns) };
        rows.read(range, place(out))
    })?;
    Ok(numbers)
}
