//! Activations packed in the order in which the kernel reads them: tiles of a few rows, with the rows' words
//! interleaved within each step, and K padded as in the panels. For bf16 weights they are rounded to bf16.

use std::ops::Range;

use half::bf16;

use super::steps::{PACK_CHUNK, Pairs, PanelFormat};
use super::{FloatMatrix, STEP};
use crate::dispatch::{Isa, Kernel};
use crate::matrix::MatrixFormat;
use crate::simd::F32x16;
use crate::threads::{SharedSliceMut, Threads};
use crate::tiles::Tiles;

/// Upper limit of the rows of a tile.
const MAX_TILE_ROWS: usize = 12;

/// Rows in tiles; reused by the next product without a new allocation.
#[derive(Debug, Default)]
pub(crate) struct TiledRows {
    /// `[tile][step][word of the step][row of the tile]`: f32 numbers, or a step's pair of bf16 in one word.
    pub(super) words: Vec<u32>,
    pub(super) tiles: Tiles,
}

impl TiledRows {
    /// Replaces the content by `x` `[rows, k]`, in the format that `weights` needs.
    pub(crate) fn fill(&mut self, weights: &FloatMatrix, x: &[f32], (isa, threads): (Isa, &Threads)) {
        let pairs = weights.format == MatrixFormat::Bf16 && isa.has_bf16_dot();
        let words_per_step = if pairs { Pairs::WORDS } else { STEP };
        let (k, words) = (weights.k, weights.steps() * words_per_step);
        let rows = x.len() / k;
        let slices = &weights.slices;
        self.tiles = Tiles::new(rows, isa.tile_rows());
        self.words.resize(rows * words, 0);
        let shared = SharedSliceMut::new(&mut self.words);
        let tiles = self.tiles;
        // By slices, so that the threads share the work of a single tile, too.
        threads.for_ranges(tiles.len() * slices.len(), 1, 2 * x.len(), |range| {
            for item in range {
                let (rows, slice) = (tiles.rows(item / slices.len()), &slices[item % slices.len()]);
                let start = |step: usize| rows.start * words + step * words_per_step * rows.len();
                // SAFETY: every slice of every tile is filled once.
                let out = unsafe { shared.slice_mut(start(slice.steps.start)..start(slice.steps.end)) };
                let x = &x[rows.start * k..rows.end * k];
                isa.run_floats(Fill { format: weights.format, x, k, columns: slice.k.clone(), out });
            }
        });
    }
}

/// Kernel that packs one slice of a tile.
struct Fill<'a> {
    format: MatrixFormat,
    /// `[rows of the tile, k]`.
    x: &'a [f32],
    k: usize,
    /// Columns of the slice.
    columns: Range<usize>,
    /// `[step of the slice][word of the step][row of the tile]`.
    out: &'a mut [u32],
}

impl Kernel for Fill<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        const { assert!(V::TILE_ROWS <= MAX_TILE_ROWS, "a tile has more rows than the packing buffer") };
        match self.format {
            MatrixFormat::F32 => self.fill::<f32>(),
            MatrixFormat::Bf16 if V::HAS_BF16_DOT => self.fill::<Pairs>(),
            MatrixFormat::Bf16 => self.fill::<bf16>(),
        }
    }
}

impl Fill<'_> {
    /// Converts `PACK_CHUNK` columns at a time row by row before interleaving them, so that both buffers stay
    /// in the L1 cache.
    #[inline(always)]
    fn fill<W: PanelFormat>(self) {
        let rows = self.x.len() / self.k;
        let chunk_words = PACK_CHUNK / STEP * W::WORDS;
        let mut words = [[0; PACK_CHUNK]; MAX_TILE_ROWS];
        for (block, out) in self.out.chunks_mut(chunk_words * rows).enumerate() {
            for (words, row) in words.iter_mut().zip(self.x.chunks_exact(self.k)) {
                let row = &row[self.columns.clone()][block * PACK_CHUNK..];
                let row = &row[..row.len().min(PACK_CHUNK)];
                // The padding of a slice of odd length is a zero.
                let mut numbers = [0.0; PACK_CHUNK];
                numbers[..row.len()].copy_from_slice(row);
                *words = W::words(&numbers);
            }
            for (row, words) in words[..rows].iter().enumerate() {
                out[row..].iter_mut().step_by(rows).zip(words).for_each(|(out, &word)| *out = word);
            }
        }
    }
}
