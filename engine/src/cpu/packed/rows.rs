//! Activations to int8, symmetric, each row by itself and in it each K-slice (docs/contract.md C1), in the
//! padded order of the weights they will meet: tiles of a few rows, in a tile the rows' numbers side by side for each four k.

use super::layout::KLayout;
use super::pack::int8_scale;
use super::{PackedMatrix, shift};
use crate::cpu::dispatch::{Isa, Kernel};
use crate::cpu::lanes::Lanes;
use crate::cpu::threads::{Shared, Threads};
use crate::cpu::tiles::Tiles;

/// Adding it rounds a small f32 to an integer, ties to even, and leaves that in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Numbers along K that stand side by side: what one lane of a dot product takes.
pub(super) const QUAD: usize = 4;

/// Rows of quantized activations; kept, so that its memory is.
#[derive(Debug, Default)]
pub(in crate::cpu) struct QuantizedRows {
    /// `[tile][padded k / 4][row of the tile][4]`.
    pub(super) values: Vec<i8>,
    /// `[tile][piece][row of the tile]`: what the shift of the weights adds to the sum over the piece, negated.
    pub(super) corrections: Vec<i32>,
    /// `[tile][slice][row of the tile]`.
    pub(super) scales: Vec<f32>,
    pub(super) tiles: Tiles,
}

impl QuantizedRows {
    /// Replaces what it holds by `x` `[rows, k]`, as `weights` wants it.
    pub(in crate::cpu) fn fill(
        &mut self,
        weights: &PackedMatrix,
        x: &[f32],
        (isa, threads): (Isa, &Threads),
    ) {
        let layout = &weights.layout;
        let (k, padded) = (layout.k(), layout.padded());
        let (pieces, slices) = (layout.pieces().len(), layout.slices().len());
        let rows = x.len() / k;
        let tiles = Tiles::new(rows, isa.dot_tile_rows());
        self.tiles = tiles;
        self.values.resize(rows * padded, 0);
        self.corrections.resize(rows * pieces, 0);
        self.scales.resize(rows * slices, 0.0);
        let values = Shared::new(&mut self.values);
        let corrections = Shared::new(&mut self.corrections);
        let scales = Shared::new(&mut self.scales);
        threads.for_ranges(tiles.len(), 1, 4 * x.len(), |range| {
            for tile in range {
                let rows = tiles.rows(tile);
                // SAFETY: each tile is quantized once, and its parts are its own.
                let (values, corrections, scales) = unsafe {
                    (
                        values.slice_mut(rows.start * padded..rows.end * padded),
                        corrections.slice_mut(rows.start * pieces..rows.end * pieces),
                        scales.slice_mut(rows.start * slices..rows.end * slices),
                    )
                };
                let x = &x[rows.start * k..rows.end * k];
                isa.run(QuantizeTile { x, layout, values, corrections, scales });
            }
        });
    }
}

/// One tile.
struct QuantizeTile<'a> {
    x: &'a [f32],
    layout: &'a KLayout,
    values: &'a mut [i8],
    corrections: &'a mut [i32],
    scales: &'a mut [f32],
}

impl Kernel for QuantizeTile<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let shift = shift(self.layout.format());
        let k = self.layout.k();
        let rows = self.x.len() / k;
        for (r, x) in self.x.chunks_exact(k).enumerate() {
            for (slice, range) in self.layout.slices().iter().enumerate() {
                let pieces = &self.layout.pieces()[range.clone()];
                let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
                    self.scales[slice * rows + r] = 0.0;
                    continue;
                };
                let (scale, inverse) = int8_scale(&x[first.k.start..last.k.end]);
                self.scales[slice * rows + r] = scale;
                for (index, piece) in range.clone().zip(pieces) {
                    let part = &mut self.values[piece.start * rows..(piece.start + piece.len) * rows];
                    let x = &x[piece.k.clone()];
                    let sum = match rows {
                        1 => quantize(x, inverse, part),
                        _ => quantize_among(x, inverse, (part, rows, r)),
                    };
                    self.corrections[index * rows + r] = sum.wrapping_mul(shift).wrapping_neg();
                }
            }
        }
    }
}

/// Steps of a row that is alone in its tile; returns their sum. What pads the piece becomes zero.
#[inline(always)]
fn quantize(x: &[f32], inverse: f32, steps: &mut [i8]) -> i32 {
    let (filled, padding) = steps.split_at_mut(x.len());
    padding.fill(0);
    let mut sum = 0i32;
    for (step, x) in filled.iter_mut().zip(x) {
        *step = nearest_step(x * inverse);
        sum = sum.wrapping_add(i32::from(*step));
    }
    sum
}

/// Steps that are gathered before they are dealt out.
const GATHERED: usize = 64;

/// The same for row `r` of a tile of `rows`.
#[inline(always)]
fn quantize_among(x: &[f32], inverse: f32, (steps, rows, r): (&mut [i8], usize, usize)) -> i32 {
    let (whole, rest) = x.as_chunks::<GATHERED>();
    let (whole_steps, rest_steps) = steps.split_at_mut(whole.len() * GATHERED * rows);
    let mut sum = 0i32;
    for (x, steps) in whole.iter().zip(whole_steps.chunks_exact_mut(GATHERED * rows)) {
        let mut gathered = [0i8; GATHERED];
        for (step, x) in gathered.iter_mut().zip(x) {
            *step = nearest_step(x * inverse);
        }
        sum = sum.wrapping_add(deal_out(&gathered, (steps, rows, r)));
    }
    let mut gathered = [0i8; GATHERED];
    for (step, x) in gathered.iter_mut().zip(rest) {
        *step = nearest_step(x * inverse);
    }
    sum.wrapping_add(deal_out(&gathered, (rest_steps, rows, r)))
}

/// Puts steps, four by four, where row `r` of a tile has them; returns their sum. Steps past the end are zero.
#[inline(always)]
fn deal_out(gathered: &[i8; GATHERED], (steps, rows, r): (&mut [i8], usize, usize)) -> i32 {
    let quads = steps.chunks_exact_mut(QUAD * rows);
    for (to, quad) in quads.zip(gathered.as_chunks::<QUAD>().0) {
        to[QUAD * r..QUAD * (r + 1)].copy_from_slice(quad);
    }
    gathered.iter().fold(0, |sum, &step| sum.wrapping_add(i32::from(step)))
}

/// No step is past 127: the scale was made of the largest.
#[inline(always)]
fn nearest_step(x: f32) -> i8 {
    (x + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i8
}
