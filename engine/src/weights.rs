//! safetensors files -> named tensors whose shape and dtype were checked, copied into memory of our own, so that what
//! becomes of the files later is of no matter. Nothing is allocated by what a file claims: sizes come from
//! config.json, are compared with the file's, and the file's own are covered by its length.

mod checkpoint;
mod digest;
mod format;
mod matrix;
mod random;
mod source;

use half::bf16;

pub(crate) use checkpoint::Checkpoint;
use checkpoint::{StoredDtype, StoredTensor};
pub(crate) use format::{Formats, LinearFormat, MatrixFormat, QuantizedFormat};
pub(crate) use matrix::{Matrix, MatrixData};
pub(crate) use random::RandomTensors;
pub(crate) use source::{LinearTensors, RowReader, TensorPart, TensorSource};

use crate::EngineError;

/// What is read at a time where numbers are converted on the way.
const CHUNK_BYTES: usize = 1 << 20;

impl Checkpoint {
    /// bf16 only where every tensor is bf16 already: as stored never loses anything.
    pub(crate) fn stored_format(&self) -> MatrixFormat {
        if self.all_bf16() { MatrixFormat::Bf16 } else { MatrixFormat::F32 }
    }

    /// The numbers of a tensor of any shape, widened to f32.
    pub(crate) fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        let tensor = self.tensor(name, shape)?;
        let mut bytes = vec![0; tensor.num_bytes()];
        tensor.read(0, &mut bytes)?;
        Ok(to_f32(tensor.dtype, &bytes))
    }
}

impl TensorSource for Checkpoint {
    fn matrix(&self, part: &TensorPart, format: MatrixFormat) -> Result<Matrix, EngineError> {
        let tensor = self.tensor(&part.name, &part.shape)?;
        let data = match (format, tensor.dtype) {
            (MatrixFormat::F32, StoredDtype::F32) => MatrixData::from(read_as_stored::<f32>(&tensor, part)?),
            (MatrixFormat::Bf16, StoredDtype::Bf16) => {
                MatrixData::from(read_as_stored::<bf16>(&tensor, part)?)
            }
            (MatrixFormat::F32, _) => MatrixData::from(read_as(&tensor, part, |x| x)?),
            (MatrixFormat::Bf16, _) => MatrixData::from(read_as(&tensor, part, bf16::from_f32)?),
        };
        Ok(Matrix::new(data, [part.rows.len(), part.columns.len()]))
    }

    fn rows<'a>(&'a self, part: &TensorPart) -> Result<RowReader<'a>, EngineError> {
        let tensor = self.tensor(&part.name, &part.shape)?;
        let (dtype, row_bytes) = (tensor.dtype, tensor.row_bytes(part));
        let mut bytes = vec![0; part.rows.len() * row_bytes];
        tensor.read(part.rows.start * row_bytes, &mut bytes)?;
        Ok(Box::new(move |row| to_f32(dtype, &bytes[row * row_bytes..(row + 1) * row_bytes])))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        self.numbers(name, &[len])
    }
}

/// Numbers whose format is the stored one; whole rows are read to where they stay.
fn read_as_stored<T: bytemuck::Pod>(
    tensor: &StoredTensor<'_>,
    part: &TensorPart,
) -> Result<Vec<T>, EngineError> {
    const { assert!(cfg!(target_endian = "little"), "safetensors are little-endian, and so must the machine be") };
    let row_bytes = tensor.row_bytes(part);
    let mut numbers: Vec<T> = bytemuck::zeroed_vec(part.rows.len() * part.columns.len());
    if part.columns.len() == part.shape[1] {
        tensor.read(part.rows.start * row_bytes, bytemuck::cast_slice_mut(&mut numbers))?;
        return Ok(numbers);
    }
    let wanted = part.columns.start * size_of::<T>()..part.columns.end * size_of::<T>();
    let mut out = numbers.chunks_exact_mut(part.columns.len());
    tensor.for_rows(part, CHUNK_BYTES, |row| {
        if let Some(out) = out.next() {
            bytemuck::cast_slice_mut(out).copy_from_slice(&row[wanted.clone()]);
        }
    })?;
    Ok(numbers)
}

/// Numbers that are converted on the way.
fn read_as<T>(
    tensor: &StoredTensor<'_>,
    part: &TensorPart,
    convert: impl Fn(f32) -> T,
) -> Result<Vec<T>, EngineError> {
    let mut numbers = Vec::with_capacity(part.rows.len() * part.columns.len());
    let size = tensor.dtype.size();
    tensor.for_rows(part, CHUNK_BYTES, |row| {
        let wanted = &row[part.columns.start * size..part.columns.end * size];
        numbers.extend(to_f32(tensor.dtype, wanted).into_iter().map(&convert));
    })?;
    Ok(numbers)
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
