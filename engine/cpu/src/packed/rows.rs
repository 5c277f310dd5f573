//! Quantizes activations to int8, symmetric, per row and K-slice (docs/contract.md C1), in the padded order
//! of the weights: tiles of a few rows, with the rows' numbers interleaved in quads along K.

use std::ops::Range;

use super::layout::{GROUP, KLayout};
use super::pack::int8_scale;
use super::{PackedMatrix, shift};
use crate::dispatch::{Isa, Kernel};
use crate::matrix::QuantizedFormat;
use crate::simd::{Element, F32x16, LANES};
use crate::threads::{SharedSliceMut, Threads};
use crate::tiles::Tiles;

/// Adding it rounds a small f32 to an integer, ties to even, and leaves that integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Adjacent numbers along K: the operand of one lane of a dot product.
pub(super) const QUAD: usize = 4;

/// Bytes per stored number for kernels that take `words` words per int8 quad; int4 always takes one byte.
pub(super) fn bytes_per_number(format: QuantizedFormat, words: usize) -> usize {
    match format {
        QuantizedFormat::Int8 => words,
        QuantizedFormat::Int4 => 1,
    }
}

/// Rows of quantized activations; reused by the next product without a new allocation.
#[derive(Debug, Default)]
pub(crate) struct QuantizedRows {
    /// `[tile][padded k / 4][row of the tile][4]`. Widened to 16 bits, two bytes per number: `[tile][padded k
    /// / 4][2][row of the tile][2]`, with the first and third number of a quad before the second and fourth.
    pub(super) values: Vec<i8>,
    /// `[tile][piece][row of the tile]`: the amount that the weights' shift adds to the sum over the piece,
    /// negated.
    pub(super) corrections: Vec<i32>,
    /// `[tile][slice][row of the tile]`.
    pub(super) scales: Vec<f32>,
    pub(super) tiles: Tiles,
}

/// Writes K-slices of [`QuantizedRows`] from several threads.
pub(crate) struct QuantizedRowsWriter<'a> {
    values: SharedSliceMut<'a, i8>,
    corrections: SharedSliceMut<'a, i32>,
    scales: SharedSliceMut<'a, f32>,
    tiles: Tiles,
    layout: &'a KLayout,
    bytes_per_number: usize,
    isa: Isa,
}

impl QuantizedRows {
    /// Makes room for `rows` rows, the input of a product with `weights`. Every slice must then be written.
    pub(crate) fn writer<'a>(
        &'a mut self,
        weights: &'a PackedMatrix,
        rows: usize,
        isa: Isa,
    ) -> QuantizedRowsWriter<'a> {
        let layout = &weights.layout;
        let bytes_per_number = bytes_per_number(layout.format(), isa.dot_words());
        self.tiles = Tiles::new(rows, isa.dot_tile_rows());
        self.values.resize(rows * layout.padded() * bytes_per_number, 0);
        self.corrections.resize(rows * layout.pieces().len(), 0);
        self.scales.resize(rows * layout.slices().len(), 0.0);
        QuantizedRowsWriter {
            values: SharedSliceMut::new(&mut self.values),
            corrections: SharedSliceMut::new(&mut self.corrections),
            scales: SharedSliceMut::new(&mut self.scales),
            tiles: self.tiles,
            layout,
            bytes_per_number,
            isa,
        }
    }

    /// Replaces the content by `x` `[rows, k]`, in the format that `weights` needs.
    pub(crate) fn fill(&mut self, weights: &PackedMatrix, x: &[f32], (isa, threads): (Isa, &Threads)) {
        let (k, slices) = (weights.layout.k(), weights.slice_columns());
        let writer = self.writer(weights, x.len() / k, isa);
        // By slices, so that the threads share the work of a single tile, too.
        threads.for_ranges(writer.tiles.len() * slices.len(), 1, 4 * x.len(), |range| {
            for item in range {
                let (tile, slice) = (item / slices.len(), item % slices.len());
                // SAFETY: each slice of each tile is written once.
                unsafe { writer.write(tile, slice, (&x[slices[slice].start..], k)) };
            }
        });
    }
}

impl QuantizedRowsWriter<'_> {
    /// Quantizes a slice of all rows. `x` begins with its first column in the first row and has `stride`
    /// numbers from one row to the next.
    ///
    /// # Safety
    /// No other thread writes this slice.
    pub(crate) unsafe fn write_slice(&self, slice: usize, (x, stride): (&[f32], usize)) {
        for tile in 0..self.tiles.len() {
            // SAFETY: guaranteed by the caller.
            unsafe { self.write(tile, slice, (x, stride)) };
        }
    }

    /// # Safety
    /// No other thread writes this slice of the tile.
    unsafe fn write(&self, tile: usize, slice: usize, (x, stride): (&[f32], usize)) {
        let (layout, bytes, rows) = (self.layout, self.bytes_per_number, self.tiles.rows(tile));
        let pieces = layout.slices()[slice].clone();
        let columns = layout.padded_range(&pieces);
        // Range of a part of each row in a buffer with `width` entries per row.
        let part_range = |width: usize, part: Range<usize>| {
            let start = rows.start * width;
            start + part.start * rows.len()..start + part.end * rows.len()
        };
        let (num_pieces, num_slices) = (layout.pieces().len(), layout.slices().len());
        let value_range = part_range(layout.padded() * bytes, columns.start * bytes..columns.end * bytes);
        // SAFETY: guaranteed by the caller; the parts of a slice of a tile belong to no other.
        let (values, corrections, scales) = unsafe {
            (
                self.values.slice_mut(value_range),
                self.corrections.slice_mut(part_range(num_pieces, pieces)),
                self.scales.slice_mut(part_range(num_slices, slice..slice + 1)),
            )
        };
        let x = (&x[rows.start * stride..], stride);
        match bytes {
            1 => self.isa.run(QuantizeSlice::<1> { x, layout, slice, values, corrections, scales }),
            _ => self.isa.run(QuantizeSlice::<2> { x, layout, slice, values, corrections, scales }),
        }
    }
}

/// Kernel that quantizes one slice of a tile, with `BYTES` bytes per number.
struct QuantizeSlice<'a, const BYTES: usize> {
    /// Numbers from the slice's first column in the tile's first row on, and the distance between rows.
    x: (&'a [f32], usize),
    layout: &'a KLayout,
    slice: usize,
    values: &'a mut [i8],
    corrections: &'a mut [i32],
    /// `[row of the tile]`.
    scales: &'a mut [f32],
}

impl<const BYTES: usize> Kernel for QuantizeSlice<'_, BYTES> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let shift = shift(self.layout.format());
        let (x, stride) = self.x;
        let rows = self.scales.len();
        let pieces = &self.layout.pieces()[self.layout.slices()[self.slice].clone()];
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return self.scales.fill(0.0) };
        let first_column = first.k.start;
        for r in 0..rows {
            let x = &x[r * stride..][..last.k.end - first_column];
            let (scale, inverse) = int8_scale(x);
            self.scales[r] = scale;
            for (index, piece) in pieces.iter().enumerate() {
                let start = piece.start - first.start;
                let bytes = start * rows * BYTES..(start + piece.len) * rows * BYTES;
                let part = &mut self.values[bytes];
                let x = &x[piece.k.start - first_column..piece.k.end - first_column];
                // SAFETY: this function's contract guarantees V's instructions.
                let sum = unsafe { quantize::<V, BYTES>(x, inverse, (part, rows, r)) };
                self.corrections[index * rows + r] = sum.wrapping_mul(shift).wrapping_neg();
            }
        }
    }
}

/// Codes that are collected before they are interleaved: a group of int4.
const CODE_CHUNK: usize = GROUP;

/// Writes the codes of a piece, in quads, to the positions of row `r` in a tile of `rows`. Returns their sum.
/// Padding becomes zero. No code exceeds 127, since the scale comes from the largest number.
///
/// # Safety
/// The CPU supports V's instructions.
#[inline(always)]
unsafe fn quantize<V: F32x16, const BYTES: usize>(
    x: &[f32],
    inverse: f32,
    (codes, rows, r): (&mut [i8], usize, usize),
) -> i32 {
    // SAFETY: guaranteed by the caller; no access goes past the numbers or the collected codes.
    let sums = unsafe {
        let (inverse, rounder, back) = (V::splat(inverse), V::splat(ROUNDER), V::splat(-ROUNDER));
        let mut sums = V::splat(0.0);
        for (x, codes) in x.chunks(CODE_CHUNK).zip(codes.chunks_mut(CODE_CHUNK * rows * BYTES)) {
            let mut chunk = [[0i8; QUAD]; CODE_CHUNK / QUAD];
            for start in (0..x.len()).step_by(LANES) {
                let (from, left) = (x.as_ptr().add(start), x.len() - start);
                let numbers: V = if left < LANES { f32::load_part(from, left) } else { V::load(from) };
                let rounded = numbers.mul(inverse).add(rounder);
                // The low byte is the code. Without the rounder the vector holds the code as f32, and sums of
                // those are exact.
                rounded.store_low_bytes(chunk.as_mut_ptr().cast::<u8>().add(start));
                sums = sums.add(rounded.add(back));
            }
            for (to, quad) in codes.chunks_exact_mut(QUAD * BYTES * rows).zip(&chunk) {
                if BYTES == 1 {
                    to[QUAD * r..QUAD * (r + 1)].copy_from_slice(quad);
                } else {
                    for (to, pair) in to.chunks_exact_mut(QUAD * rows).zip(widened(*quad)) {
                        to[QUAD * r..QUAD * (r + 1)].copy_from_slice(&pair);
                    }
                }
            }
        }
        sums.reduce_sum()
    };
    sums as i32
}

/// Widens a quad to 16 bits: the first and third number, then the second and fourth.
#[inline(always)]
fn widened(quad: [i8; QUAD]) -> [[i8; QUAD]; 2] {
    let [a, b, c, d] = quad.map(i16::from);
    bytemuck::cast([[a, c], [b, d]])
}
