//! Rows of matrices as FP8 (E4M3) codes with a scale per row: as stored, or quantized by row if they are
//! stored in another format (docs/contract.md C1). Scales are kept separate: products apply them to finished
//! sums.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use cpu_kernels::{KernelError, NumbersMut, RowBlocks};

use super::checkpoint::StoredTensor;
use super::fp8::{StoredScales, widen};
use super::{StackedRows, TensorPart, TensorSource, chunks_of_rows, for_each_row};
use crate::EngineError;

/// The largest number: exponent 8, fraction 6/8. A fraction of 7/8 would be a NaN.
const LARGEST: f32 = 448.0;
const LARGEST_CODE: u8 = 0x7e;
/// A row whose largest number is smaller is treated as zero.
const SMALLEST: f32 = 1e-30;

/// Destination of rows. A row with a number that is not finite gets zeros and a NaN as its scale, which makes
/// every result a NaN.
#[derive(Debug)]
pub(crate) struct Fp8Rows<'a> {
    /// `[rows, columns]`.
    pub(crate) codes: &'a mut [u8],
    /// `[rows]`: scales of whole rows, whichever columns are requested.
    pub(crate) scales: &'a mut [f32],
}

impl Fp8Rows<'_> {
    /// Writes the requested columns of row `row`.
    fn put(&mut self, row: usize, codes: &[u8], scale: f32) {
        let out = &mut self.codes[row * codes.len()..][..codes.len()];
        let bad = !scale.is_finite();
        if bad {
            out.fill(0)
        } else {
            out.copy_from_slice(codes)
        }
        self.scales[row] = if bad { f32::NAN } else { scale };
    }

    /// Sets every number to +0.
    pub(crate) fn fill_with_zeros(&mut self) {
        self.codes.fill(0);
        self.scales.fill(0.0);
    }

    /// The part for `rows`, with `columns` numbers per row.
    pub(crate) fn part(&mut self, rows: Range<usize>, columns: usize) -> Fp8Rows<'_> {
        let codes = &mut self.codes[rows.start * columns..rows.end * columns];
        Fp8Rows { codes, scales: &mut self.scales[rows] }
    }
}

/// Reads rows that are stored as FP8, with a scale per row or per tensor; see [`TensorSource::read_fp8`].
pub(super) fn read(
    tensor: &StoredTensor<'_>,
    scales: &StoredScales<'_>,
    part: &TensorPart,
    rows: Range<usize>,
    mut out: Fp8Rows<'_>,
) -> Result<(), EngineError> {
    let (first_row, first) = (part.rows.start, rows.start);
    let scales = scales.read(first_row + rows.start..first_row + rows.end, part.shape[1])?;
    // Reads whole rows, so that ranks that share a row agree on whether it has a NaN.
    for_each_row(tensor, &whole_rows(part), rows, |row, codes| {
        let has_nan = codes.iter().any(|code| code & 0x7f == 0x7f);
        let scale = if has_nan { f32::NAN } else { scales.of(first_row + row, 0) };
        out.put(row - first, &codes[part.columns.clone()], scale);
    })
}

/// Quantizes rows that are not stored as FP8: the largest number of a whole row becomes 448.
pub(super) fn quantize(
    source: &(impl TensorSource + ?Sized),
    part: &TensorPart,
    rows: Range<usize>,
    mut out: Fp8Rows<'_>,
) -> Result<(), EngineError> {
    let (whole, width) = (whole_rows(part), part.shape[1]);
    let mut numbers = Vec::new();
    for chunk in chunks_of_rows(rows.clone(), width * size_of::<f32>()) {
        numbers.resize(chunk.len() * width, 0.0);
        source.read(&whole, chunk.clone(), NumbersMut::F32(&mut numbers))?;
        for (row, numbers) in chunk.zip(numbers.chunks_exact(width.max(1))) {
            let (codes, scale) = quantize_row(numbers);
            out.put(row - rows.start, &codes[part.columns.clone()], scale);
        }
    }
    Ok(())
}

fn whole_rows(part: &TensorPart) -> TensorPart {
    TensorPart { columns: 0..part.shape[1], ..part.clone() }
}

/// Quantizes a row: its codes and its scale.
fn quantize_row(row: &[f32]) -> (Vec<u8>, f32) {
    let largest = row.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    if row.iter().any(|x| !x.is_finite()) {
        return (vec![0; row.len()], f32::NAN);
    }
    if largest < SMALLEST {
        return (vec![0; row.len()], 0.0);
    }
    let inverse_scale = LARGEST / largest;
    (row.iter().map(|x| round_to_fp8(x * inverse_scale)).collect(), largest / LARGEST)
}

/// Rounds to the nearest eight-bit float, ties to even; saturates at the largest one.
#[inline]
fn round_to_fp8(x: f32) -> u8 {
    let (sign, size) = ((x.to_bits() >> 24) as u8 & 0x80, x.abs());
    // Subnormals are multiples of 2^-9; eight of them make the smallest normal number.
    if size < 1.0 / 64.0 {
        return sign | (size * 512.0).round_ties_even() as u8;
    }
    let bits = size.to_bits();
    let rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    // The exponent bias of f32 is larger by 120.
    sign | (rounded - (120 << 3)).min(u32::from(LARGEST_CODE)) as u8
}

/// Adapts FP8 rows to the bf16 packer: unscaled values, which bf16 represents exactly. Collects the scales.
pub(crate) struct WidenedRows<'a> {
    rows: StackedRows<'a>,
    /// `[rows]`; each thread writes the scales of the rows that it reads.
    scales: Mutex<Vec<f32>>,
}

impl<'a> WidenedRows<'a> {
    pub(crate) fn new(rows: StackedRows<'a>) -> Self {
        let scales = Mutex::new(vec![0.0; rows.rows()]);
        Self { rows, scales }
    }

    /// The scales of the rows that were read.
    pub(crate) fn into_scales(self) -> Vec<f32> {
        self.scales.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RowBlocks for WidenedRows<'_> {
    fn rows(&self) -> usize {
        self.rows.rows()
    }

    fn columns(&self) -> usize {
        self.rows.columns()
    }

    fn read(&self, rows: Range<usize>, mut out: NumbersMut<'_>) -> Result<(), KernelError> {
        let (mut codes, mut scales) = (vec![0; out.len()], vec![0.0; rows.len()]);
        self.rows
            .read_fp8(rows.clone(), Fp8Rows { codes: &mut codes, scales: &mut scales })
            .map_err(|error| KernelError::Rows(error.into()))?;
        out.put(0, codes.iter().map(|&code| widen(code)));
        self.scales.lock().unwrap_or_else(PoisonError::into_inner)[rows].copy_from_slice(&scales);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn every_code_round_trips_through_bf16() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(bf16::from_f32(widen(code)).to_f32().to_bits(), widen(code).to_bits(), "{code:#04x}");
            assert_eq!(round_to_fp8(widen(code)), code, "{code:#04x}");
        }
    }

    /// The twin searches all codes.
    #[test]
    fn numbers_round_to_the_nearest_code() {
        let nearest = |x: f32| {
            let far = |code: &u8| (f64::from(widen(*code)) - f64::from(x.abs())).abs();
            let best = (0..=LARGEST_CODE).map(|code| far(&code)).fold(f64::INFINITY, f64::min);
            let mut found = (0..=LARGEST_CODE).filter(|code| far(code) == best);
            let first = found.next().unwrap();
            let even = found.next().filter(|_| first % 2 == 1).unwrap_or(first);
            even | if x.is_sign_negative() { 0x80 } else { 0 }
        };
        for code in 0..LARGEST_CODE {
            let (below, above) = (widen(code), widen(code + 1));
            for part in [0.0, 0.25, 0.499, 0.5, 0.501, 0.75] {
                let x = below + (above - below) * part;
                assert_eq!([round_to_fp8(x), round_to_fp8(-x)], [nearest(x), nearest(-x)], "{x}");
            }
        }
        assert_eq!([round_to_fp8(449.0), round_to_fp8(-1e9), round_to_fp8(1e-20)], [0x7e, 0xfe, 0]);
    }

    #[test]
    fn a_row_is_scaled_by_its_largest_number() {
        let (codes, scale) = quantize_row(&[0.5, -1.75, 0.0, 1.0]);
        assert_eq!((codes[1], scale), (0xfe, 1.75 / 448.0));
        assert_eq!(codes.iter().map(|&code| widen(code) * scale).collect::<Vec<_>>(), [0.5, -1.75, 0.0, 1.0]);
        assert_eq!(quantize_row(&[1e-31, 0.0]), (vec![0, 0], 0.0));
        let (codes, scale) = quantize_row(&[1.0, f32::INFINITY]);
        assert!(codes == [0, 0] && scale.is_nan());
    }
}
