//! safetensors files, mapped into memory -> named tensors whose shape and dtype were checked. A matrix that
//! is stored in the wanted format is used where it lies; others are converted. Nothing is allocated by what a
//! file claims: sizes come from config.json, are compared with the file's, and the file's own are covered by
//! its length.
//!
//! A checkpoint must not be changed while it is in use: a file cut short under the map ends the process
//! (SIGBUS).

mod buffer;
mod checkpoint;
mod digest;

use half::bf16;

pub(crate) use buffer::{Buffer, Matrix, MatrixData};
pub(crate) use checkpoint::Checkpoint;
use checkpoint::{StoredDtype, StoredTensor};

use crate::{EngineError, WeightFormat};

/// What matrices are held as, once [`WeightFormat::AsStored`] is resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MatrixFormat {
    F32,
    Bf16,
}

impl MatrixFormat {
    /// The name that goes into `numerics_id`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

impl Checkpoint {
    /// bf16 only where every tensor is bf16 already: as stored never loses anything.
    pub(crate) fn resolve(&self, wanted: WeightFormat) -> MatrixFormat {
        match wanted {
            WeightFormat::F32 => MatrixFormat::F32,
            WeightFormat::Bf16 => MatrixFormat::Bf16,
            WeightFormat::AsStored if self.all_bf16() => MatrixFormat::Bf16,
            WeightFormat::AsStored => MatrixFormat::F32,
        }
    }

    /// A `[rows, columns]` matrix, row-major.
    pub(crate) fn matrix(
        &self,
        name: &str,
        shape: [usize; 2],
        format: MatrixFormat,
    ) -> Result<Matrix, EngineError> {
        let tensor = self.tensor(name, &shape)?;
        let data = match format {
            MatrixFormat::F32 => MatrixData::F32(match tensor.dtype {
                StoredDtype::F32 => Buffer::mapped_or_copied(&tensor),
                _ => Buffer::Owned(to_f32(&tensor).into()),
            }),
            MatrixFormat::Bf16 => MatrixData::Bf16(match tensor.dtype {
                StoredDtype::Bf16 => Buffer::mapped_or_copied(&tensor),
                _ => Buffer::Owned(to_f32(&tensor).into_iter().map(bf16::from_f32).collect()),
            }),
        };
        Ok(Matrix::new(data, shape))
    }

    /// The numbers of a tensor of any shape, widened to f32.
    pub(crate) fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        Ok(to_f32(&self.tensor(name, shape)?))
    }

    /// A vector, always f32: norms and biases are too small to save on.
    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        self.numbers(name, &[len])
    }
}

/// Every stored format widens to f32 exactly. Elements are read byte by byte, for nothing promises their
/// alignment.
fn to_f32(tensor: &StoredTensor<'_>) -> Vec<f32> {
    let pairs = || tensor.bytes.as_chunks::<2>().0.iter();
    match tensor.dtype {
        StoredDtype::F32 => tensor.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        StoredDtype::F16 => pairs().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
        StoredDtype::Bf16 => pairs().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
    }
}
