//! Activations in the order in which the kernel takes them: tiles of a few rows, in a tile the rows' numbers side by
//! side for each k, with K padded as the panels are. What goes with bf16 weights is rounded to bf16 on the way.

use std::ops::Range;

use super::{FloatMatrix, STEP, Slice};
use crate::cpu::dispatch::{Isa, Kernel};
use crate::cpu::elementwise::round_to_bf16;
use crate::cpu::lanes::{Element, Lanes};
use crate::cpu::threads::{Shared, Threads};
use crate::cpu::tiles::Tiles;
use crate::weights::MatrixFormat;

/// Rows in tiles; kept, so that its memory is.
#[derive(Debug, Default)]
pub(in crate::cpu) struct TiledRows {
    /// `[tile][padded k][row of the tile]`.
    pub(super) values: Vec<f32>,
    pub(super) tiles: Tiles,
}

impl TiledRows {
    /// Replaces what it holds by `x` `[rows, k]`, as `weights` wants it.
    pub(in crate::cpu) fn fill(&mut self, weights: &FloatMatrix, x: &[f32], (isa, threads): (Isa, &Threads)) {
        let (k, padded) = (weights.k, weights.steps() * STEP);
        let rows = x.len() / k;
        self.tiles = Tiles::new(rows, isa.tile_rows());
        self.values.resize(rows * padded, 0.0);
        let values = Shared::new(&mut self.values);
        let tiles = self.tiles;
        threads.for_ranges(tiles.len(), 1, 2 * x.len(), |range| {
            for tile in range {
                let rows = tiles.rows(tile);
                // SAFETY: every tile is filled once.
                let out = unsafe { values.slice_mut(rows.start * padded..rows.end * padded) };
                let x = &x[rows.start * k..rows.end * k];
                let slices = &weights.slices;
                match weights.format {
                    MatrixFormat::Bf16 => isa.run(Fill::<true> { x, k, slices, out }),
                    MatrixFormat::F32 => isa.run(Fill::<false> { x, k, slices, out }),
                }
            }
        });
    }
}

/// One tile.
struct Fill<'a, const ROUND: bool> {
    /// `[rows of the tile, k]`.
    x: &'a [f32],
    k: usize,
    slices: &'a [Slice],
    out: &'a mut [f32],
}

impl<const ROUND: bool> Kernel for Fill<'_, ROUND> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let Self { x, k, slices, out } = self;
        let rows = x.len() / k;
        for slice in slices {
            let Range { start, end } = slice.steps;
            let part = &mut out[start * STEP * rows..end * STEP * rows];
            for (r, row) in x.chunks_exact(k).enumerate() {
                let row = &row[slice.k.clone()];
                if rows == 1 {
                    for (out, &x) in part.iter_mut().zip(row) {
                        *out = if ROUND { round_to_bf16(x).widen() } else { x };
                    }
                } else {
                    for (out, &x) in part.chunks_exact_mut(rows).zip(row) {
                        out[r] = if ROUND { round_to_bf16(x).widen() } else { x };
                    }
                }
            }
            if !slice.k.len().is_multiple_of(STEP) {
                let padding = part.len() - rows;
                part[padding..].fill(0.0);
            }
        }
    }
}
