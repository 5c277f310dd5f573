//! safetensors files, mapped into memory -> named tensors whose shape and dtype were checked. A matrix that
//! is stored in the wanted format is used where it lies; others are converted, or
//! handed out row by row to be quantized. Nothing is allocated by what a
//! file claims: sizes come from config.json, are compared with the file's, and the file's own are covered by
//! its length.
//!
//! A checkpoint must not be changed while it is in use: a file cut short under the map ends the process
//! (SIGBUS).

mod buffer;
mod checkpoint;
mod digest;
mod format;
mod random;
mod source;

use half::bf16;

pub(crate) use buffer::{Buffer, Matrix, MatrixData};
pub(crate) use checkpoint::Checkpoint;
use checkpoint::{StoredDtype, StoredTensor};
pub(crate) use format::{Formats, LinearFormat, MatrixFormat, QuantizedFormat};
pub(crate) use random::RandomTensors;
pub(crate) use source::{RowReader, TensorSource};

use crate::EngineError;

impl Checkpoint {
    /// bf16 only where every tensor is bf16 already: as stored never loses anything.
    pub(crate) fn stored_format(&self) -> MatrixFormat {
        if self.all_bf16() { MatrixFormat::Bf16 } else { MatrixFormat::F32 }
    }

    /// The numbers of a tensor of any shape, widened to f32.
    pub(crate) fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        let tensor = self.tensor(name, shape)?;
        Ok(to_f32(tensor.dtype, tensor.bytes))
    }
}

impl TensorSource for Checkpoint {
    fn matrix(&self, name: &str, shape: [usize; 2], format: MatrixFormat) -> Result<Matrix, EngineError> {
        let tensor = self.tensor(name, &shape)?;
        let widened = |tensor: &StoredTensor<'_>| to_f32(tensor.dtype, tensor.bytes);
        let data = match format {
            MatrixFormat::F32 => MatrixData::F32(match tensor.dtype {
                StoredDtype::F32 => Buffer::mapped_or_copied(&tensor),
                _ => Buffer::Owned(widened(&tensor).into()),
            }),
            MatrixFormat::Bf16 => MatrixData::Bf16(match tensor.dtype {
                StoredDtype::Bf16 => Buffer::mapped_or_copied(&tensor),
                _ => Buffer::Owned(widened(&tensor).into_iter().map(bf16::from_f32).collect()),
            }),
        };
        Ok(Matrix::new(data, shape))
    }

    fn rows<'a>(&'a self, name: &str, shape: [usize; 2]) -> Result<RowReader<'a>, EngineError> {
        let StoredTensor { dtype, bytes, .. } = self.tensor(name, &shape)?;
        let row_bytes = bytes.len() / shape[0];
        Ok(Box::new(move |row| to_f32(dtype, &bytes[row * row_bytes..(row + 1) * row_bytes])))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        self.numbers(name, &[len])
    }
}

/// Every stored format widens to f32 exactly. Elements are read byte by byte, for nothing promises their
/// alignment.
fn to_f32(dtype: StoredDtype, bytes: &[u8]) -> Vec<f32> {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        StoredDtype::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        StoredDtype::F16 => pairs().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
        StoredDtype::Bf16 => pairs().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
    }
}
