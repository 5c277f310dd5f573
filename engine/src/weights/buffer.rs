//! Who owns a matrix's numbers: the mapped file, or us.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use memmap2::Mmap;

use super::checkpoint::StoredTensor;

/// Numbers in a mapped file or in memory of our own.
#[derive(Debug, Clone)]
pub(crate) enum Buffer<T> {
    /// Checked once to be aligned for `T` and of whole elements.
    Mapped { map: Arc<Mmap>, bytes: Range<usize> },
    /// Shared, for tied embeddings are one matrix with two uses.
    Owned(Arc<[T]>),
}

impl<T: bytemuck::Pod> Buffer<T> {
    /// Borrows the stored numbers where they are aligned, else copies them. The stored dtype is `T`'s,
    /// little-endian as the machine must be.
    pub(super) fn mapped_or_copied(tensor: &StoredTensor<'_>) -> Self {
        const {
            assert!(
                cfg!(target_endian = "little"),
                "safetensors are little-endian, and so must the machine be"
            )
        };
        match bytemuck::try_cast_slice::<u8, T>(tensor.bytes) {
            Ok(_) => Self::Mapped { map: Arc::clone(tensor.map), bytes: tensor.range.clone() },
            Err(_) => {
                let mut numbers = vec![T::zeroed(); tensor.bytes.len() / size_of::<T>()];
                bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(tensor.bytes);
                Self::Owned(numbers.into())
            }
        }
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        match self {
            Self::Mapped { map, bytes } => bytemuck::cast_slice(&map[bytes.clone()]),
            Self::Owned(numbers) => numbers,
        }
    }
}

/// A matrix's numbers in their format.
#[derive(Debug, Clone)]
pub(crate) enum MatrixData {
    F32(Buffer<f32>),
    Bf16(Buffer<bf16>),
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
