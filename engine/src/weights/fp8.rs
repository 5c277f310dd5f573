//! FP8 checkpoints: matrices of eight-bit floats (E4M3: one sign bit, four exponent bits, three fraction
//! bits, no infinities) with separate scales, as llm-compressor (compressed-tensors) and DeepSeek write them.
//! This module dequantizes on reading: float times scale, rounded to f32 once (exact if the scales are bf16).
//! `fp8_rows` reads the codes unchanged. Activations are not quantized.

use std::ops::Range;

use cpu_kernels::{NumbersMut, SCALE_BLOCK};

use super::checkpoint::StoredTensor;
use super::{TensorPart, for_each_row, to_f32};
use crate::EngineError;

/// Suffixes of a scale tensor's name, after the matrix's name.
pub(super) const SCALE_NAMES: [&str; 2] = ["_scale", "_scale_inv"];

/// The numbers that share a scale. A scale is a factor, also if its tensor is named `_scale_inv`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Granularity {
    /// The whole matrix.
    Tensor,
    /// A row, which is an output channel.
    Row,
    /// 128 x 128 numbers; fewer at the edges.
    Block,
}

impl Granularity {
    /// Granularity of scales of this shape for a matrix of `[rows, columns]`; `None` if they do not fit.
    pub(super) fn of(scales: &[usize], [rows, columns]: [usize; 2]) -> Option<Self> {
        let blocks = [rows.div_ceil(SCALE_BLOCK), columns.div_ceil(SCALE_BLOCK)];
        match scales {
            [] | [1] | [1, 1] => Some(Self::Tensor),
            [n] | [n, 1] if *n == rows => Some(Self::Row),
            [n, k] if [*n, *k] == blocks => Some(Self::Block),
            _ => None,
        }
    }
}

/// Location of a matrix's scales in their file.
#[derive(Debug)]
pub(super) struct StoredScales<'a> {
    pub(super) numbers: StoredTensor<'a>,
    pub(super) granularity: Granularity,
}

impl StoredScales<'_> {
    /// Reads the scales of `rows` of a matrix with `columns` columns.
    pub(super) fn read(&self, rows: Range<usize>, columns: usize) -> Result<Scales, EngineError> {
        let (wanted, per_row) = match self.granularity {
            Granularity::Tensor => (0..1, 1),
            Granularity::Row => (rows.clone(), 1),
            Granularity::Block => {
                (rows.start / SCALE_BLOCK..rows.end.div_ceil(SCALE_BLOCK), columns.div_ceil(SCALE_BLOCK))
            }
        };
        let size = self.numbers.dtype.size();
        let mut bytes = vec![0; wanted.len() * per_row * size];
        self.numbers.read(wanted.start * per_row * size, &mut bytes)?;
        let (numbers, first) = (to_f32(self.numbers.dtype, &bytes), wanted.start);
        Ok(Scales { numbers, granularity: self.granularity, first, per_row })
    }
}

/// Scales of some rows.
pub(super) struct Scales {
    numbers: Vec<f32>,
    granularity: Granularity,
    /// Row, or row of blocks, of the first scale.
    first: usize,
    per_row: usize,
}

impl Scales {
    pub(super) fn of(&self, row: usize, column: usize) -> f32 {
        match self.granularity {
            Granularity::Tensor => self.numbers[0],
            Granularity::Row => self.numbers[row - self.first],
            Granularity::Block => {
                self.numbers[(row / SCALE_BLOCK - self.first) * self.per_row + column / SCALE_BLOCK]
            }
        }
    }
}

/// Reads rows of a matrix, as [`super::TensorSource::read`] specifies.
pub(super) fn read(
    tensor: &StoredTensor<'_>,
    scales: &StoredScales<'_>,
    part: &TensorPart,
    rows: Range<usize>,
    mut out: NumbersMut<'_>,
) -> Result<(), EngineError> {
    let columns = part.columns.len();
    if columns == 0 || rows.is_empty() {
        return Ok(());
    }
    let (first_row, first) = (part.rows.start, rows.start);
    let scales = scales.read(first_row + rows.start..first_row + rows.end, part.shape[1])?;
    for_each_row(tensor, part, rows, |row, codes| {
        let scale = |column| scales.of(first_row + row, part.columns.start + column);
        let number = |(column, &code): (usize, &u8)| widen(code) * scale(column);
        out.put((row - first) * columns, codes.iter().enumerate().map(number));
    })
}

/// Widens an eight-bit float to f32, exactly. Inlined across codegen units, since it is called for each
/// number.
#[inline]
pub(super) fn widen(byte: u8) -> f32 {
    let (exponent, fraction) = (u32::from(byte >> 3 & 15), u32::from(byte & 7));
    let sign = u32::from(byte >> 7) << 31;
    let magnitude = match (exponent, fraction) {
        (15, 7) => f32::NAN,
        // Subnormals: eighths of 2^-6.
        (0, _) => fraction as f32 / 512.0,
        // 2^(exponent - 7): the exponent bits in f32 are 127 higher.
        _ => f32::from_bits(((exponent + 120) << 23) | (fraction << 20)),
    };
    f32::from_bits(magnitude.to_bits() | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_widens_to_its_value() {
        for byte in 0..=255u8 {
            let (sign, exponent) = (if byte < 128 { 1.0 } else { -1.0 }, i32::from(byte >> 3 & 15));
            let fraction = f64::from(byte & 7) / 8.0;
            let expected = match exponent {
                0 => sign * fraction * f64::powi(2.0, -6),
                _ => sign * (1.0 + fraction) * f64::powi(2.0, exponent - 7),
            };
            let found = widen(byte);
            if byte & 127 == 127 {
                assert!(found.is_nan());
                continue;
            }
            assert_eq!(f64::from(found), expected, "{byte:#04x}");
            assert_eq!(found.is_sign_negative(), byte > 127, "{byte:#04x}");
        }
        assert_eq!((widen(0x7e), widen(0x01)), (448.0, 1.0 / 512.0));
    }

    #[test]
    fn scale_shapes_determine_the_granularity() {
        let of = |scales: &[usize]| Granularity::of(scales, [300, 257]);
        assert_eq!([of(&[]), of(&[1]), of(&[1, 1])], [Some(Granularity::Tensor); 3]);
        assert_eq!([of(&[300]), of(&[300, 1])], [Some(Granularity::Row); 2]);
        assert_eq!(of(&[3, 3]), Some(Granularity::Block));
        assert_eq!([of(&[300, 3]), of(&[257]), of(&[2, 3]), of(&[3, 3, 1])], [None; 4]);
    }
}
