//! Activations to int8, symmetric, each row by itself and in it each K-slice (docs/contract.md C1), in the
//! padded order of the weights they will meet.

use super::layout::KLayout;
use super::pack::int8_scale;
use super::{PackedMatrix, shift};
use crate::cpu::dispatch::{Isa, Kernel};
use crate::cpu::lanes::Lanes;
use crate::cpu::threads::{Shared, Threads};

/// Adding it rounds a small f32 to an integer, ties to even, and leaves that in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Rows of quantized activations; kept, so that its memory is.
#[derive(Debug, Default)]
pub(in crate::cpu) struct QuantizedRows {
    /// `[row][padded k]`.
    pub(super) values: Vec<i8>,
    /// `[row][piece]`: what the shift of the weights adds to the sum over the piece, negated.
    pub(super) corrections: Vec<i32>,
    /// `[row][slice]`.
    pub(super) scales: Vec<f32>,
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
        self.values.resize(rows * padded, 0);
        self.corrections.resize(rows * pieces, 0);
        self.scales.resize(rows * slices, 0.0);
        let values = Shared::new(&mut self.values);
        let corrections = Shared::new(&mut self.corrections);
        let scales = Shared::new(&mut self.scales);
        threads.for_ranges(rows, 1, 4 * x.len(), |range| {
            for row in range {
                // SAFETY: each row is quantized once, and its parts are its own.
                let (values, corrections, scales) = unsafe {
                    (
                        values.slice_mut(row * padded..(row + 1) * padded),
                        corrections.slice_mut(row * pieces..(row + 1) * pieces),
                        scales.slice_mut(row * slices..(row + 1) * slices),
                    )
                };
                let x = &x[row * k..(row + 1) * k];
                isa.run(QuantizeRow { x, layout, values, corrections, scales });
            }
        });
    }
}

/// One row.
struct QuantizeRow<'a> {
    x: &'a [f32],
    layout: &'a KLayout,
    values: &'a mut [i8],
    corrections: &'a mut [i32],
    scales: &'a mut [f32],
}

impl Kernel for QuantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let shift = shift(self.layout.format());
        for (slice, range) in self.layout.slices().iter().enumerate() {
            let pieces = &self.layout.pieces()[range.clone()];
            let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
                self.scales[slice] = 0.0;
                continue;
            };
            let (scale, inverse) = int8_scale(&self.x[first.k.start..last.k.end]);
            self.scales[slice] = scale;
            for (index, piece) in range.clone().zip(pieces) {
                let (filled, padding) =
                    self.values[piece.start..piece.start + piece.len].split_at_mut(piece.k.len());
                let sum = quantize(&self.x[piece.k.clone()], inverse, filled);
                padding.fill(0);
                self.corrections[index] = sum.wrapping_mul(shift).wrapping_neg();
            }
        }
    }
}

/// Rounds to the nearest step and returns the sum. No step is past 127: the scale was made of the largest.
#[inline(always)]
fn quantize(x: &[f32], inverse: f32, steps: &mut [i8]) -> i32 {
    let mut sum = 0i32;
    for (step, x) in steps.iter_mut().zip(x) {
        let rounded = (x * inverse + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i8;
        *step = rounded;
        sum = sum.wrapping_add(i32::from(rounded));
    }
    sum
}
