//! Compute-bound GEMM of many row tiles with packed floats. K is split into K blocks. A K block of a panel
//! stays in the L1 cache while all tiles of a row block use it; bf16 that is not multiplied by pairs is
//! widened to f32 once. The row block's activations stay in the L2 cache while all panels use them. Every
//! tile prefetches its share of the next K block.
//!
//! A sum is stored at the end of a K block and reloaded unchanged, so K blocks change no bit.

use std::marker::PhantomData;
use std::ops::Range;

use super::mat_mul::{FloatMatMul, with_rows};
use super::steps::{PanelNumbers, Steps};
use super::{PANEL, PANEL_VECTORS, STEP};
use crate::dispatch::Kernel;
use crate::k_slices::NUM_SLICES;
use crate::lanes::{LANES, Lanes};
use crate::lines::{Fetch, Line, Nothing, Share};
use crate::tiles::Tiles;

/// Maximum activation words of a row block: two thirds of an L2 cache.
const BLOCK_WORDS: usize = 352 * 1024;
/// Maximum bytes of a K block in the format that is multiplied: half of an L1 cache.
const WINDOW_BYTES: usize = 24 * 1024;
/// Minimum number of tiles for which a K block is widened beforehand.
const WIDEN_TILES: usize = 4;
/// Levels of partial sums kept for the tree of slices.
const TREE_LEVELS: usize = 3;

/// A range of steps within a slice.
struct Window {
    steps: Range<usize>,
    slice: usize,
    begins_slice: bool,
    ends_slice: bool,
}

/// State of a product between K blocks: accumulators and the widened K block.
pub(super) struct Blocked<'a> {
    product: &'a FloatMatMul<'a>,
    windows: Vec<Window>,
    /// The current K block as f32 steps, if it is widened.
    wide: Vec<f32>,
    /// `[TREE_LEVELS + 1][tile][vector][row of the tile][LANES]`: accumulators of the current slice, and
    /// partial sums of the tree.
    sums: Vec<f32>,
}

/// Position of a tile: K block, panel and row.
struct At<'a> {
    window: &'a Window,
    panel: usize,
    /// First row.
    row: usize,
}

/// Micro-kernel for a tile of R rows in one K block of a panel, with steps packed as W.
struct TileOfBlock<'a, 'b, W, const R: usize> {
    blocked: &'b mut Blocked<'a>,
    at: At<'b>,
    steps: Steps,
    fetch: Share,
    numbers: PhantomData<W>,
}

impl<W: PanelNumbers, const R: usize> Kernel for TileOfBlock<'_, '_, W, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        // SAFETY: this function's contract guarantees V's instructions; it is created for a tile and steps of
        // this kind.
        unsafe { self.blocked.rows::<V, W, R>(&self.at, self.steps, self.fetch) };
    }
}

impl<'a> Blocked<'a> {
    pub(super) fn new<W: PanelNumbers>(product: &'a FloatMatMul<'a>) -> Self {
        let most = WINDOW_BYTES / if W::WIDENS { f32::STEP_BYTES } else { W::STEP_BYTES };
        let mut windows = Vec::new();
        for (slice, of) in product.weights.slices.iter().enumerate() {
            let cut = Tiles::new(of.steps.len(), most);
            // An empty slice gets a K block too, since it is a leaf of the tree.
            let count = cut.len().max(1);
            for i in 0..count {
                let steps = if cut.len() == 0 { 0..0 } else { cut.rows(i) };
                let steps = of.steps.start + steps.start..of.steps.start + steps.end;
                windows.push(Window { steps, slice, begins_slice: i == 0, ends_slice: i + 1 == count });
            }
        }
        let sums = (TREE_LEVELS + 1) * product.x.tiles.num_rows() * PANEL;
        let wide = if W::WIDENS { most * STEP * PANEL } else { 0 };
        Self { product, windows, wide: vec![0.0; wide], sums: vec![0.0; sums] }
    }

    /// # Safety
    /// The CPU supports V's instructions; the matrix is packed as W, tiles and columns are the product's.
    #[inline(always)]
    pub(super) unsafe fn multiply<V: Lanes, W: PanelNumbers>(mut self) {
        let (steps, tiles) = (self.product.weights.steps(), self.product.x.tiles);
        let most = (BLOCK_WORDS / (steps * W::WORDS * V::TILE_ROWS).max(1)).max(1);
        let blocks = Tiles::new(tiles.len(), most);
        let windows = std::mem::take(&mut self.windows);
        for block in 0..blocks.len() {
            let block = blocks.rows(block);
            for panel in self.product.panels() {
                for window in &windows {
                    // SAFETY: guaranteed by the caller.
                    unsafe { self.window::<V, W>((panel, window), block.clone()) };
                }
            }
        }
    }

    /// Multiplies one K block of a panel with a block of tiles.
    ///
    /// # Safety
    /// As for `multiply`; the tiles, the panel and the K block exist.
    #[inline(always)]
    unsafe fn window<V: Lanes, W: PanelNumbers>(
        &mut self,
        (panel, window): (usize, &Window),
        block: Range<usize>,
    ) {
        let weights = self.product.weights;
        let (count, tiles) = (window.steps.len(), self.product.x.tiles);
        let start = (panel * weights.steps() + window.steps.start) * W::STEP_BYTES;
        let lines = self.product.lines();
        let widened = W::WIDENS && block.len() >= WIDEN_TILES;
        // SAFETY: guaranteed by the caller; the K block's steps begin at `start`, and `wide` has space for
        // them.
        unsafe {
            if widened {
                self.widen::<V, W>(lines.add(start), count);
            }
            let next = lines.wrapping_add(start + count * W::STEP_BYTES);
            let next_lines = count * W::STEP_BYTES / size_of::<Line>();
            for tile in block.clone() {
                let rows = tiles.rows(tile);
                let at = At { window, panel, row: rows.start };
                let fetch = Share::new(next, next_lines, (tile - block.start, block.len()));
                let first_vector = 0;
                if widened {
                    let wide = self.wide.as_ptr().cast();
                    let steps = Steps { lines: wide, start: 0, count, apart: 0, first_vector };
                    self.tile::<V, f32>((at, rows.len()), steps, fetch);
                } else {
                    let steps = Steps { lines, start, count, apart: 0, first_vector };
                    self.tile::<V, W>((at, rows.len()), steps, fetch);
                }
            }
        }
    }

    /// # Safety
    /// The CPU supports V's instructions; `count` steps, packed as W, lie at `from`, and `wide` has space for
    /// them.
    #[inline(always)]
    unsafe fn widen<V: Lanes, W: PanelNumbers>(&mut self, from: *const u8, count: usize) {
        let wide = self.wide.as_mut_ptr();
        for step in 0..count {
            for vector in 0..PANEL_VECTORS {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let to = wide.add(step * STEP * PANEL + vector * LANES);
                    for number in 0..STEP {
                        let numbers = W::load::<V>(from.add(step * W::STEP_BYTES), vector, number);
                        numbers.store(to.add(number * PANEL));
                    }
                }
            }
        }
    }

    /// # Safety
    /// The CPU supports V's instructions; `at` is a tile of `rows` rows, the steps are those of its K block,
    /// packed as W.
    #[inline(always)]
    unsafe fn tile<V: Lanes, W: PanelNumbers>(
        &mut self,
        (at, rows): (At<'_>, usize),
        steps: Steps,
        fetch: Share,
    ) {
        macro_rules! rows {
            ($rows:literal) => {
                V::run_apart(TileOfBlock::<W, $rows> {
                    blocked: self,
                    at,
                    steps,
                    fetch,
                    numbers: PhantomData,
                })
            };
        }
        // SAFETY: guaranteed by the caller; an arm takes exactly the number of rows.
        unsafe { with_rows!(V, rows, rows) }
    }

    /// Multiplies all vectors of a tile of R rows in one K block.
    ///
    /// # Safety
    /// As for `tile`.
    #[inline(always)]
    unsafe fn rows<V: Lanes, W: PanelNumbers, const R: usize>(
        &mut self,
        at: &At<'_>,
        mut steps: Steps,
        fetch: Share,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if V::TILE_VECTORS == PANEL_VECTORS {
                self.vectors::<V, W, R, PANEL_VECTORS>(at, &steps, fetch);
            } else {
                self.vectors::<V, W, R, 1>(at, &steps, fetch);
                for vector in 1..PANEL_VECTORS {
                    steps.first_vector = vector;
                    self.vectors::<V, W, R, 1>(at, &steps, Nothing);
                }
            }
        }
    }

    /// Multiplies M vectors of a tile of R rows in one K block.
    ///
    /// # Safety
    /// As for `tile`.
    #[inline(always)]
    unsafe fn vectors<V: Lanes, W: PanelNumbers, const R: usize, const M: usize>(
        &mut self,
        at: &At<'_>,
        steps: &Steps,
        fetch: impl Fetch,
    ) {
        let weights = self.product.weights;
        let level_len = self.product.x.tiles.num_rows() * PANEL;
        let place = at.row * PANEL + steps.first_vector * R * LANES;
        // SAFETY: guaranteed by the caller; every tile has separate accumulators at each level.
        unsafe {
            let under_way = self.sums.as_mut_ptr().add(place);
            let mut sums = [[V::splat(0.0); R]; M];
            if !at.window.begins_slice {
                for (m, sums) in sums.iter_mut().enumerate() {
                    for (r, sum) in sums.iter_mut().enumerate() {
                        *sum = V::load(under_way.add((m * R + r) * LANES));
                    }
                }
            }
            let x = self.product.x.words.as_ptr();
            let x = x.add((at.row * weights.steps() + at.window.steps.start * R) * W::WORDS);
            let mut sums = steps.add::<V, W, R, M, M>(sums, x, fetch);

            let sliced = weights.slices.len() == NUM_SLICES;
            let mut level = 0;
            if at.window.ends_slice && sliced {
                // The tree of docs/contract.md C2 as a binary counter, as in `tiles::SliceTree`.
                while at.window.slice >> level & 1 == 1 {
                    level += 1;
                    let held = under_way.add(level * level_len);
                    for (m, sums) in sums.iter_mut().enumerate() {
                        for (r, sum) in sums.iter_mut().enumerate() {
                            *sum = V::load(held.add((m * R + r) * LANES)).add(*sum);
                        }
                    }
                }
                level += 1;
            }
            if at.window.ends_slice && (!sliced || level > TREE_LEVELS) {
                for (m, sums) in sums.iter().enumerate() {
                    let column = at.panel * PANEL + (steps.first_vector + m) * LANES;
                    self.product.write::<V, R>(sums, column, at.row);
                }
            } else {
                let to = under_way.add(level * level_len);
                for (m, sums) in sums.iter().enumerate() {
                    for (r, sum) in sums.iter().enumerate() {
                        sum.store(to.add((m * R + r) * LANES));
                    }
                }
            }
        }
    }
}
