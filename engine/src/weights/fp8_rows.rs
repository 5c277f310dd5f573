//! Rows of matrices as FP8 (E4M3) codes with a scale per row, or one for each block of columns: as stored, or
//! quantized by row if they are stored in another format (docs/contract.md C1). Scales are kept separate:
//! products apply them to sums, finished ones or those of blocks.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use cpu_kernels::{KernelError, NumbersMut, RowBlocks, SCALE_BLOCK};

use super::checkpoint::StoredTensor;
use super::fp8::{Granularity, StoredScales, widen};
use super::{StackedRows, TensorPart, TensorSource, chunks_of_rows, for_each_row};
use crate::EngineError;

/// The largest number: exponent 8, fraction 6/8. A fraction of 7/8 would be a NaN.
const LARGEST: f32 = 448.0;
const LARGEST_CODE: u8 = 0x7e;
/// A row whose largest number is smaller is treated as zero.
const SMALLEST: f32 = 1e-30;

/// Destination of rows. A row with a number or scale that is not finite gets zeros, and NaNs as its scales,
/// which make every result a NaN.
#[derive(Debug)]
pub(crate) struct Fp8Rows<'a> {
    /// `[rows, columns]`.
    pub(crate) codes: &'a mut [u8],
    /// `[rows, scales_per_row]`.
    pub(crate) scales: &'a mut [f32],
    /// 1: the scale of a whole row, whichever columns are requested. By block: one for each block of columns
    /// that the requested ones touch.
    pub(crate) scales_per_row: usize,
}

impl Fp8Rows<'_> {
    /// Writes the requested columns of row `row`, and the row's scales, which `scale` returns by their index.
    fn put(&mut self, row: usize, codes: &[u8], is_finite: bool, scale: impl Fn(usize) -> f32) {
        let out = &mut self.codes[row * codes.len()..][..codes.len()];
        let scales = &mut self.scales[row * self.scales_per_row..][..self.scales_per_row];
        if is_finite {
            out.copy_from_slice(codes);
            scales.iter_mut().enumerate().for_each(|(i, out)| *out = scale(i));
        } else {
            out.fill(0);
            scales.fill(f32::NAN);
        }
    }

    /// Sets every number to +0.
    pub(crate) fn fill_with_zeros(&mut self) {
        self.codes.fill(0);
        self.scales.fill(0.0);
    }

    /// The part for `rows`, with `columns` numbers per row.
    pub(crate) fn part(&mut self, rows: Range<usize>, columns: usize) -> Fp8Rows<'_> {
        let (codes, per_row) = (rows.start * columns..rows.end * columns, self.scales_per_row);
        let scales = &mut self.scales[rows.start * per_row..rows.end * per_row];
        Fp8Rows { codes: &mut self.codes[codes], scales, scales_per_row: per_row }
    }
}

/// Reads rows that are stored as FP8; see [`TensorSource::read_fp8`]. Rows that are stored with a scale per row
/// or tensor have it for each block.
pub(super) fn read(
    tensor: &StoredTensor<'_>,
    scales: &StoredScales<'_>,
    part: &TensorPart,
    rows: Range<usize>,
    mut out: Fp8Rows<'_>,
) -> Result<(), EngineError> {
    let (first_row, first, first_block) = (part.rows.start, rows.start, part.columns.start / SCALE_BLOCK);
    let num_blocks = part.columns.end.div_ceil(SCALE_BLOCK) - first_block;
    assert!(
        scales.granularity != Granularity::Block || out.scales_per_row == num_blocks,
        "a model with scales by block is held with scales by block"
    );
    let scales = scales.read(first_row + rows.start..first_row + rows.end, part.shape[1])?;
    // Reads whole rows, so that ranks that share a row agree on whether it has a NaN.
    for_each_row(tensor, &whole_rows(part), rows, |row, codes| {
        let scale = |block: usize| scales.of(first_row + row, block * SCALE_BLOCK);
        let mut all_scales = (0..part.shape[1].div_ceil(SCALE_BLOCK)).map(scale);
        let is_finite =
            codes.iter().all(|code| code & 0x7f != 0x7f) && all_scales.all(|scale| scale.is_finite());
        out.put(row - first, &codes[part.columns.clone()], is_finite, |i| scale(first_block + i));
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
            out.put(row - rows.start, &codes[part.columns.clone()], scale.is_finite(), |_| scale);
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
    /// `[rows, scales_per_row]`; each thread writes the scales of the rows that it reads.
    scales: Mutex<Vec<f32>>,
    scales_per_row: usize,
}

impl<'a> WidenedRows<'a> {
    pub(crate) fn new(rows: StackedRows<'a>, scales_per_row: usize) -> Self {
        let scales = Mutex::new(vec![0.0; rows.rows() * scales_per_row]);
        Self { rows, scales, scales_per_row }
    }

    /// Takes the scales of the rows that were read.
    pub(crate) fn take_scales(&self) -> Vec<f32> {
        std::mem::take(&mut self.scales.lock().unwrap_or_else(PoisonError::into_inner))
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
        let scales_per_row = self.scales_per_row;
        let (mut codes, mut scales) = (vec![0; out.len()], vec![0.0; rows.len() * scales_per_row]);
        self.rows
            .read_fp8(rows.clone(), Fp8Rows { codes: &mut codes, scales: &mut scales, scales_per_row })
            .map_err(|error| KernelError::Rows(error.into()))?;
        out.put(0, codes.iter().map(|&code| widen(code)));
        let place = rows.start * scales_per_row..rows.end * scales_per_row;
        self.scales.lock().unwrap_or_else(PoisonError::into_inner)[place].copy_from_slice(&scales);
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
