//! GEMM of several row tiles, or of one tile that multiplies a panel in two passes, with packed floats. K is
//! split into K blocks. A K block of a panel stays in the L1 cache while all tiles of a row block use it;
//! bf16 that is not multiplied by pairs is widened to f32 once. The row block's activations stay in the L2
//! cache while all panels use them. Every pass prefetches its share of the next K block.
//!
//! A sum is stored at the end of a K block and reloaded unchanged, so K blocks change no bit.

use std::marker::PhantomData;
use std::ops::Range;

use super::mat_mul::{FloatMatMul, add_scaled, with_rows};
use super::steps::{PanelFormat, Steps};
use super::{PANEL, PANEL_VECTORS, PackedChain, STEP};
use crate::dispatch::Kernel;
use crate::k_slices::SCALE_BLOCK;
use crate::lines::{Line, Prefetch, TilePrefetch};
use crate::simd::{F32x16, LANES};
use crate::tiles::Tiles;

/// Maximum activation words of a row block: two thirds of an L2 cache.
const BLOCK_WORDS: usize = 352 * 1024;
/// Maximum bytes of a K block in the format that is multiplied: half of an L1 cache.
const K_BLOCK_BYTES: usize = 24 * 1024;
/// Minimum number of tiles for which a K block is widened beforehand.
const WIDEN_TILES: usize = 4;
/// Levels of partial sums kept for the tree of slices.
const TREE_LEVELS: usize = 3;

/// A range of steps within a chain; with scales by block a whole chain.
struct KBlock {
    steps: Range<usize>,
    chain: usize,
    slice: usize,
    begins_slice: bool,
    ends_slice: bool,
}

const _: () = assert!(
    SCALE_BLOCK / STEP * f32::STEP_BYTES <= K_BLOCK_BYTES,
    "a chain in a block of scales is one K block"
);

/// State of a product between K blocks: accumulators and the widened K block.
pub(super) struct BlockedGemm<'a> {
    product: &'a FloatMatMul<'a>,
    k_blocks: Vec<KBlock>,
    /// The current K block as f32 steps, if it is widened.
    wide: Vec<f32>,
    /// `[level][tile][vector][row of the tile][LANES]`: accumulators of the current slice, and partial sums of
    /// the tree's levels if there is more than one slice.
    sums: Vec<f32>,
}

/// Position of a tile: K block, panel and row.
struct TilePosition<'a> {
    k_block: &'a KBlock,
    panel: usize,
    /// First row.
    row: usize,
}

/// Micro-kernel for a tile of R rows in one K block of a panel, with steps packed as W.
struct BlockTileKernel<'a, 'b, W, const R: usize> {
    blocked: &'b mut BlockedGemm<'a>,
    at: TilePosition<'b>,
    steps: Steps,
    prefetch: TilePrefetch,
    numbers: PhantomData<W>,
}

impl<W: PanelFormat, const R: usize> Kernel for BlockTileKernel<'_, '_, W, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        // SAFETY: this function's contract guarantees V's instructions; it is created for a tile and steps of
        // this kind.
        unsafe { self.blocked.rows::<V, W, R>(&self.at, self.steps, self.prefetch) };
    }
}

impl<'a> BlockedGemm<'a> {
    pub(super) fn new<W: PanelFormat>(product: &'a FloatMatMul<'a>) -> Self {
        let max_len = K_BLOCK_BYTES / if W::WIDENS { f32::STEP_BYTES } else { W::STEP_BYTES };
        let mut k_blocks = Vec::new();
        let mut begins_slice = true;
        for (chain, PackedChain { of, steps: of_chain }) in product.weights.chains.iter().enumerate() {
            let split = Tiles::new(of_chain.len(), max_len);
            // An empty slice gets a K block too, since it is a leaf of the tree.
            let count = split.len().max(1);
            for i in 0..count {
                let steps = if split.len() == 0 { 0..0 } else { split.rows(i) };
                let steps = of_chain.start + steps.start..of_chain.start + steps.end;
                let ends_slice = of.ends_slice && i + 1 == count;
                k_blocks.push(KBlock { steps, chain, slice: of.slice, begins_slice, ends_slice });
                begins_slice = ends_slice;
            }
        }
        let levels = if product.weights.is_sliced() { TREE_LEVELS + 1 } else { 1 };
        let sums = levels * product.x.tiles.num_rows() * PANEL;
        let wide = if W::WIDENS { max_len * STEP * PANEL } else { 0 };
        Self { product, k_blocks, wide: vec![0.0; wide], sums: vec![0.0; sums] }
    }

    /// # Safety
    /// The CPU supports V's instructions; the matrix is packed as W, tiles and columns are the product's.
    #[inline(always)]
    pub(super) unsafe fn multiply<V: F32x16, W: PanelFormat>(mut self) {
        let (steps, tiles) = (self.product.weights.steps(), self.product.x.tiles);
        let max_len = (BLOCK_WORDS / (steps * W::WORDS * V::TILE_ROWS).max(1)).max(1);
        let blocks = Tiles::new(tiles.len(), max_len);
        let k_blocks = std::mem::take(&mut self.k_blocks);
        for block in 0..blocks.len() {
            let block = blocks.rows(block);
            for panel in self.product.panels() {
                for k_block in &k_blocks {
                    // SAFETY: guaranteed by the caller.
                    unsafe { self.k_block::<V, W>((panel, k_block), block.clone()) };
                }
            }
        }
    }

    /// Multiplies one K block of a panel with a block of tiles.
    ///
    /// # Safety
    /// As for `multiply`; the tiles, the panel and the K block exist.
    #[inline(always)]
    unsafe fn k_block<V: F32x16, W: PanelFormat>(
        &mut self,
        (panel, k_block): (usize, &KBlock),
        block: Range<usize>,
    ) {
        let weights = self.product.weights;
        let (count, tiles) = (k_block.steps.len(), self.product.x.tiles);
        let start = (panel * weights.steps() + k_block.steps.start) * W::STEP_BYTES;
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
            let step_bytes = if widened { f32::STEP_BYTES } else { W::STEP_BYTES };
            let used_lines = count * step_bytes / size_of::<Line>() * (PANEL_VECTORS / V::TILE_VECTORS);
            for tile in block.clone() {
                let rows = tiles.rows(tile);
                let at = TilePosition { k_block, panel, row: rows.start };
                let share = (tile - block.start, block.len());
                let prefetch = TilePrefetch::new(next, next_lines, share, used_lines);
                let first_vector = 0;
                if widened {
                    let wide = self.wide.as_ptr().cast();
                    let steps = Steps { lines: wide, start: 0, count, stride: 0, first_vector };
                    self.tile::<V, f32>((at, rows.len()), steps, prefetch);
                } else {
                    let steps = Steps { lines, start, count, stride: 0, first_vector };
                    self.tile::<V, W>((at, rows.len()), steps, prefetch);
                }
            }
        }
    }

    /// # Safety
    /// The CPU supports V's instructions; `count` steps, packed as W, lie at `from`, and `wide` has space for
    /// them.
    #[inline(always)]
    unsafe fn widen<V: F32x16, W: PanelFormat>(&mut self, from: *const u8, count: usize) {
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
    unsafe fn tile<V: F32x16, W: PanelFormat>(
        &mut self,
        (at, rows): (TilePosition<'_>, usize),
        steps: Steps,
        prefetch: TilePrefetch,
    ) {
        macro_rules! rows {
            ($rows:literal) => {
                V::run_outlined(BlockTileKernel::<W, $rows> {
                    blocked: self,
                    at,
                    steps,
                    prefetch,
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
    unsafe fn rows<V: F32x16, W: PanelFormat, const R: usize>(
        &mut self,
        at: &TilePosition<'_>,
        mut steps: Steps,
        mut prefetch: TilePrefetch,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if V::TILE_VECTORS == PANEL_VECTORS {
                self.vectors::<V, W, R, PANEL_VECTORS>(at, &steps, &mut prefetch);
            } else {
                for vector in 0..PANEL_VECTORS {
                    steps.first_vector = vector;
                    self.vectors::<V, W, R, 1>(at, &steps, &mut prefetch);
                }
            }
        }
    }

    /// Multiplies M vectors of a tile of R rows in one K block.
    ///
    /// # Safety
    /// As for `tile`.
    #[inline(always)]
    unsafe fn vectors<V: F32x16, W: PanelFormat, const R: usize, const M: usize>(
        &mut self,
        at: &TilePosition<'_>,
        steps: &Steps,
        prefetch: impl Prefetch,
    ) {
        let weights = self.product.weights;
        let level_len = self.product.x.tiles.num_rows() * PANEL;
        let offset = at.row * PANEL + steps.first_vector * R * LANES;
        // SAFETY: guaranteed by the caller; every tile has separate accumulators at each level.
        unsafe {
            let accumulators = self.sums.as_mut_ptr().add(offset);
            let zeros = [[V::splat(0.0); R]; M];
            let mut of_slice = zeros;
            if !at.k_block.begins_slice {
                for (m, sums) in of_slice.iter_mut().enumerate() {
                    for (r, sum) in sums.iter_mut().enumerate() {
                        *sum = V::load(accumulators.add((m * R + r) * LANES));
                    }
                }
            }
            let x = self.product.x.words.as_ptr();
            let x = x.add((at.row * weights.steps() + at.k_block.steps.start * R) * W::WORDS);
            let mut sums;
            if weights.block_scales.is_some() {
                sums = steps.add::<V, W, R, M, M>(zeros, x, prefetch);
                let mut scales = [V::splat(0.0); M];
                for (m, scales) in scales.iter_mut().enumerate() {
                    let chain = (at.panel, at.k_block.chain);
                    *scales = self.product.block_scales(chain, steps.first_vector + m);
                }
                sums = add_scaled(of_slice, sums, scales);
            } else {
                sums = steps.add::<V, W, R, M, M>(of_slice, x, prefetch);
            }

            let sliced = weights.is_sliced();
            let mut level = 0;
            if at.k_block.ends_slice && sliced {
                // The tree of docs/contract.md C2 as a binary counter, as in `tiles::SliceTree`.
                while at.k_block.slice >> level & 1 == 1 {
                    level += 1;
                    let pending = accumulators.add(level * level_len);
                    for (m, sums) in sums.iter_mut().enumerate() {
                        for (r, sum) in sums.iter_mut().enumerate() {
                            *sum = V::load(pending.add((m * R + r) * LANES)).add(*sum);
                        }
                    }
                }
                level += 1;
            }
            if at.k_block.ends_slice && (!sliced || level > TREE_LEVELS) {
                for (m, sums) in sums.iter().enumerate() {
                    let column = at.panel * PANEL + (steps.first_vector + m) * LANES;
                    self.product.write::<V, R>(sums, column, at.row);
                }
            } else {
                let to = accumulators.add(level * level_len);
                for (m, sums) in sums.iter().enumerate() {
                    for (r, sum) in sums.iter().enumerate() {
                        sum.store(to.add((m * R + r) * LANES));
                    }
                }
            }
        }
    }
}
