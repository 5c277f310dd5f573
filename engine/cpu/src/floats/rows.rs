//! Activations packed in the order in which the kernel reads them: tiles of a few rows, with the rows' words
//! interleaved within each step, and K padded as in the panels. For bf16 weights they are rounded to bf16.

use std::ops::Range;

use half::bf16;

use super::mat_mul::with_rows;
use super::steps::{PACK_CHUNK, Pairs, PanelFormat};
use super::{FloatMatrix, PackedChain, STEP};
use crate::dispatch::{Isa, Kernel};
use crate::matrix::MatrixFormat;
use crate::simd::F32x16;
use crate::threads::{SharedSliceMut, Threads};
use crate::tiles::Tiles;

/// Most rows of a tile: as many as `with_rows` has arms.
const MAX_TILE_ROWS: usize = 12;

/// Rows in tiles; reused by the next product without a new allocation.
#[derive(Debug, Default)]
pub(crate) struct TiledRows {
    /// `[tile][step][word of the step][row of the tile]`: f32 numbers, or a step's pair of bf16 in one word.
    pub(super) words: Vec<u32>,
    pub(super) tiles: Tiles,
}

/// Writes parts of [`TiledRows`] from several threads.
pub(crate) struct TiledRowsWriter<'a> {
    words: SharedSliceMut<'a, u32>,
    tiles: Tiles,
    format: MatrixFormat,
    words_per_step: usize,
    steps: usize,
    isa: Isa,
}

impl TiledRows {
    /// Makes room for `rows` rows, the input of a product with `weights`. Every part must then be written.
    pub(crate) fn writer(&mut self, weights: &FloatMatrix, rows: usize, isa: Isa) -> TiledRowsWriter<'_> {
        let pairs = weights.format == MatrixFormat::Bf16 && isa.has_bf16_dot();
        let words_per_step = if pairs { Pairs::WORDS } else { STEP };
        self.tiles = Tiles::new(rows, isa.tile_rows());
        self.words.resize(rows * weights.steps() * words_per_step, 0);
        TiledRowsWriter {
            words: SharedSliceMut::new(&mut self.words),
            tiles: self.tiles,
            format: weights.format,
            words_per_step,
            steps: weights.steps(),
            isa,
        }
    }

    /// Replaces the content by `x` `[rows, k]`, in the format that `weights` needs.
    pub(crate) fn fill(&mut self, weights: &FloatMatrix, x: &[f32], (isa, threads): (Isa, &Threads)) {
        let (k, chains) = (weights.k, &weights.chains);
        let writer = self.writer(weights, x.len() / k, isa);
        // By chains, so that the threads share the work of a single tile, too.
        threads.for_ranges(writer.tiles.len() * chains.len(), 1, 2 * x.len(), |range| {
            for item in range {
                let (tile, PackedChain { of, steps }) = (item / chains.len(), &chains[item % chains.len()]);
                // SAFETY: every chain of every tile is written once.
                unsafe { writer.write(tile, (x, k), (of.k.clone(), steps.clone())) };
            }
        });
    }
}

impl TiledRowsWriter<'_> {
    /// Writes some columns of all rows as consecutive steps from `first_step` on; `x` has rows of `stride`
    /// numbers, `columns` are positions in them, of whole steps.
    ///
    /// # Safety
    /// No other thread writes these steps.
    pub(crate) unsafe fn write_columns(
        &self,
        (x, stride): (&[f32], usize),
        columns: Range<usize>,
        first_step: usize,
    ) {
        let steps = first_step..first_step + columns.len() / STEP;
        for tile in 0..self.tiles.len() {
            // SAFETY: guaranteed by the caller.
            unsafe { self.write(tile, (x, stride), (columns.clone(), steps.clone())) };
        }
    }

    /// # Safety
    /// No other thread writes these steps of the tile.
    unsafe fn write(
        &self,
        tile: usize,
        (x, stride): (&[f32], usize),
        (columns, steps): (Range<usize>, Range<usize>),
    ) {
        let rows = self.tiles.rows(tile);
        let start = |step: usize| (rows.start * self.steps + step * rows.len()) * self.words_per_step;
        // SAFETY: guaranteed by the caller.
        let out = unsafe { self.words.slice_mut(start(steps.start)..start(steps.end)) };
        let x = &x[rows.start * stride..rows.end * stride];
        self.isa.run_floats(Fill { format: self.format, x, stride, columns, out });
    }
}

/// Kernel that packs some columns of a tile.
struct Fill<'a> {
    format: MatrixFormat,
    /// `[rows of the tile, stride]`.
    x: &'a [f32],
    stride: usize,
    /// Positions in a row of `x`.
    columns: Range<usize>,
    /// `[step][word of the step][row of the tile]`.
    out: &'a mut [u32],
}

impl Kernel for Fill<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        const { assert!(V::TILE_ROWS <= MAX_TILE_ROWS, "a tile has more rows than `with_rows` has arms") };
        match self.format {
            MatrixFormat::F32 => self.fill::<V, f32>(),
            MatrixFormat::Bf16 if V::HAS_BF16_DOT => self.fill::<V, Pairs>(),
            MatrixFormat::Bf16 => self.fill::<V, bf16>(),
        }
    }
}

impl Fill<'_> {
    #[inline(always)]
    fn fill<V: F32x16, W: PanelFormat>(self) {
        macro_rules! rows {
            ($rows:literal) => {
                self.fill_rows::<W, $rows>()
            };
        }
        with_rows!(V, self.x.len() / self.stride, rows)
    }

    /// Converts `PACK_CHUNK` columns at a time row by row before interleaving them, so that both buffers stay
    /// in the L1 cache.
    #[inline(always)]
    fn fill_rows<W: PanelFormat, const R: usize>(self) {
        let chunk_words = PACK_CHUNK / STEP * W::WORDS;
        let mut words = [[0; PACK_CHUNK]; R];
        let mut rows: [&[f32]; R] =
            std::array::from_fn(|row| &self.x[row * self.stride..][self.columns.clone()]);
        for out in self.out.as_chunks_mut::<R>().0.chunks_mut(chunk_words) {
            for (words, row) in words.iter_mut().zip(&mut rows) {
                *words = match row.split_first_chunk() {
                    Some((numbers, rest)) => {
                        *row = rest;
                        W::words(numbers)
                    }
                    // The padding of a chain of odd length is a zero.
                    None => {
                        let mut numbers = [0.0; PACK_CHUNK];
                        numbers[..row.len()].copy_from_slice(row);
                        W::words(&numbers)
                    }
                };
            }
            for (word, out) in out.iter_mut().enumerate() {
                *out = std::array::from_fn(|row| words[row][word]);
            }
        }
    }
}
