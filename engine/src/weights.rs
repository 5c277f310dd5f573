//! safetensors files -> named tensors with checked shape and dtype, copied into our own memory, so that later
//! changes to the files have no effect. No allocation size comes from a file's header unchecked: sizes come
//! from config.json and are compared with the file's, and the file's own sizes are bounded by its length.

mod checkpoint;
mod contents;
mod digest;
mod format;
mod fp8;
mod fp8_rows;
mod random;
mod source;

use std::ops::Range;

use cpu_kernels::NumbersMut;
use half::bf16;

pub(crate) use checkpoint::Checkpoint;
use checkpoint::{StoredDtype, StoredTensor};
pub(crate) use format::{Formats, Fp8Scales, LinearFormat, ModelSpec};
pub(crate) use fp8_rows::{Fp8Rows, WidenedRows};
pub(crate) use random::RandomTensors;
pub(crate) use source::{LinearTensors, RowSeeds, StackedRows, TensorPart, TensorSource};

use crate::EngineError;

/// Bytes to read at a time when numbers are converted: small enough to stay in a cache.
const CHUNK_BYTES: usize = 1 << 17;

impl Checkpoint {
    /// Reads a tensor of any shape, widened to f32.
    pub(crate) fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        if let &[rows, columns] = shape {
            let part = TensorPart::whole(name.to_owned(), [rows, columns]);
            let mut numbers = vec![0.0; rows * columns];
            self.check(&part)?;
            self.read(&part, 0..rows, NumbersMut::F32(&mut numbers))?;
            return Ok(numbers);
        }
        let tensor = self.tensor(name, shape)?;
        let mut bytes = vec![0; tensor.num_bytes()];
        tensor.read(0, &mut bytes)?;
        Ok(to_f32(tensor.dtype, &bytes))
    }
}

impl TensorSource for Checkpoint {
    fn check(&self, part: &TensorPart) -> Result<(), EngineError> {
        self.tensor(&part.name, &part.shape).map(drop)
    }

    fn read(
        &self,
        part: &TensorPart,
        rows: Range<usize>,
        mut out: NumbersMut<'_>,
    ) -> Result<(), EngineError> {
        const {
            assert!(
                cfg!(target_endian = "little"),
                "safetensors files are little-endian, so the machine must be too"
            )
        };
        let tensor = self.tensor(&part.name, &part.shape)?;
        match (&mut out, tensor.dtype) {
            (NumbersMut::F32(out), StoredDtype::F32) => {
                read_as_stored(&tensor, part, rows, bytemuck::cast_slice_mut(out))
            }
            (NumbersMut::Bf16(out), StoredDtype::Bf16) => {
                read_as_stored(&tensor, part, rows, bytemuck::cast_slice_mut(out))
            }
            _ => match &tensor.scales {
                Some(scales) => fp8::read(&tensor, scales, part, rows, out),
                None => read_converted(&tensor, part, rows, out),
            },
        }
    }

    fn read_fp8(&self, part: &TensorPart, rows: Range<usize>, out: Fp8Rows<'_>) -> Result<(), EngineError> {
        let tensor = self.tensor(&part.name, &part.shape)?;
        match &tensor.scales {
            Some(scales) => fp8_rows::read(&tensor, scales, part, rows, out),
            None => fp8_rows::quantize(self, part, rows, out),
        }
    }

    fn stores_fp8(&self, name: &str) -> bool {
        self.is_fp8(name)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        self.numbers(name, &[len])
    }
}

/// Reads numbers that are stored in the requested format directly into `out`.
fn read_as_stored(
    tensor: &StoredTensor<'_>,
    part: &TensorPart,
    rows: Range<usize>,
    out: &mut [u8],
) -> Result<(), EngineError> {
    let wanted_bytes = part.columns.len() * tensor.dtype.size();
    if wanted_bytes == tensor.row_bytes(part) {
        return tensor.read(tensor.offset(part, rows.start), out);
    }
    if wanted_bytes == 0 {
        return Ok(());
    }
    rows.zip(out.chunks_exact_mut(wanted_bytes))
        .try_for_each(|(row, out)| tensor.read(tensor.offset(part, row), out))
}

/// Splits rows into runs that are read at a time.
fn chunks_of_rows(rows: Range<usize>, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let at_once = (CHUNK_BYTES / row_bytes.max(1)).max(1);
    rows.clone().step_by(at_once).map(move |first| first..rows.end.min(first + at_once))
}

/// Reads the part's columns of `rows` and passes each row's bytes, with the row's number, to `use_row`.
fn for_each_row(
    tensor: &StoredTensor<'_>,
    part: &TensorPart,
    rows: Range<usize>,
    mut use_row: impl FnMut(usize, &[u8]),
) -> Result<(), EngineError> {
    let (row_bytes, wanted_bytes) = (tensor.row_bytes(part), part.columns.len() * tensor.dtype.size());
    if wanted_bytes == 0 {
        return Ok(());
    }
    let mut bytes = Vec::new();
    for chunk in chunks_of_rows(rows, row_bytes) {
        // All bytes from the first requested number of the first row to the last requested one of the last
        // row, including the others in between.
        bytes.resize((chunk.len() - 1) * row_bytes + wanted_bytes, 0);
        tensor.read(tensor.offset(part, chunk.start), &mut bytes)?;
        for (row, bytes) in chunk.zip(bytes.chunks(row_bytes)) {
            use_row(row, &bytes[..wanted_bytes]);
        }
    }
    Ok(())
}

/// Reads numbers and converts them.
fn read_converted(
    tensor: &StoredTensor<'_>,
    part: &TensorPart,
    rows: Range<usize>,
    mut out: NumbersMut<'_>,
) -> Result<(), EngineError> {
    let (first, columns) = (rows.start, part.columns.len());
    for_each_row(tensor, part, rows, |row, bytes| {
        put_widened(&mut out, (row - first) * columns, tensor.dtype, bytes);
    })
}

/// Widens stored numbers to f32, which is exact, and writes them to `out` from index `at` on. Decodes element
/// by element from bytes, since their alignment is not guaranteed.
fn put_widened(out: &mut NumbersMut<'_>, at: usize, dtype: StoredDtype, bytes: &[u8]) {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        StoredDtype::F32 => out.put(at, bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
        StoredDtype::F16 => out.put(at, pairs().map(|b| half::f16::from_le_bytes(*b).to_f32())),
        StoredDtype::Bf16 => out.put(at, pairs().map(|b| bf16::from_le_bytes(*b).to_f32())),
        StoredDtype::Fp8 => out.put(at, bytes.iter().map(|&byte| fp8::widen(byte))),
    }
}

fn to_f32(dtype: StoredDtype, bytes: &[u8]) -> Vec<f32> {
    let mut numbers = vec![0.0; bytes.len() / dtype.size()];
    put_widened(&mut NumbersMut::F32(&mut numbers), 0, dtype, bytes);
    numbers
}
