//! Activations in the order in which the kernel takes them: tiles of a few rows, in a tile the rows' numbers side by
//! side for each k, with K padded as the panels are. What goes with bf16 weights is rounded to bf16 on the way.

use std::ops::Range;

use super::{FloatMatrix, STEP, Slice};
use crate::dispatch::{Isa, Kernel};
use crate::elementwise::round_to_bf16;
use crate::lanes::{Element, Lanes};
use crate::matrix::MatrixFormat;
use crate::threads::{Shared, Threads};
use crate::tiles::Tiles;

/// Rows in tiles; kept, so that its memory is.
#[derive(Debug, Default)]
pub(crate) struct TiledRows {
    /// `[tile][padded k][row of the tile]`.
    pub(super) values: Vec<f32>,
    pub(super) tiles: Tiles,
}

impl TiledRows {
    /// Replaces what it holds by `x` `[rows, k]`, as `weights` wants it.
    pub(crate) fn fill(&mut self, weights: &FloatMatrix, x: &[f32], (isa, threads): (Isa, &Threads)) {
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

/// Columns that are dealt out row by row before the next ones, so that where they go stays in the first-level cache.
const DEALT: usize = 64;

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
            for (block, out) in part.chunks_mut(DEALT * rows).enumerate() {
                for (r, row) in x.chunks_exact(k).enumerate() {
                    let row = &row[slice.k.clone()][block * DEALT..];
                    deal::<ROUND>(&row[..row.len().min(DEALT)], (&mut *out, rows, r));
                }
            }
            if !slice.k.len().is_multiple_of(STEP) {
                let padding = part.len() - rows;
                part[padding..].fill(0.0);
            }
        }
    }
}

/// Puts numbers where row `r` of a tile of `rows` has them.
#[inline(always)]
fn deal<const ROUND: bool>(numbers: &[f32], (out, rows, r): (&mut [f32], usize, usize)) {
    let mut dealt = [0.0; DEALT];
    for (dealt, &x) in dealt.iter_mut().zip(numbers) {
        *dealt = if ROUND { round_to_bf16(x).widen() } else { x };
    }
    let dealt = &dealt[..numbers.len()];
    match rows {
        1 => out[..dealt.len()].copy_from_slice(dealt),
        _ => out.chunks_exact_mut(rows).zip(dealt).for_each(|(out, x)| out[r] = *x),
    }
}
