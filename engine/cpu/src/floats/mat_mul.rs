//! GEMM of activations with packed floats: `out[row][column] = sum over k of x[row][k] * weights[column][k]
//! (+ bias[column])`, one chain of fused multiply-adds along each K-slice, or along its part in each block of
//! scales, accumulated in registers by tiles of rows. Where the accumulators of whole panels fit in registers,
//! a single tile reads the weights once from start to end; a single row reads several panels in parallel,
//! since several streams are faster. `blocked` handles larger and several tiles.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use super::blocked::BlockedGemm;
use super::steps::{Pairs, PanelFormat, Steps};
use super::{FloatMatrix, PANEL, PANEL_VECTORS, PackedChain, STEP, TiledRows};
use crate::dispatch::Kernel;
use crate::lines::{
    HardwarePrefetch, MultiStreamPrefetch, Prefetch, StreamPrefetch, prefers_hardware_prefetch,
    prefers_multi_stream,
};
use crate::matrix::MatrixFormat;
use crate::product::OutputColumns;
use crate::simd::{F32x16, LANES};
use crate::tiles::SliceTree;

/// Panels that a single row multiplies in parallel, where two vectors cover a panel.
const SINGLE_ROW_PANELS: usize = 4;

/// Kernel for a range of columns of a packed matrix, for all rows.
pub(crate) struct FloatMatMul<'a> {
    pub(crate) x: &'a TiledRows,
    pub(crate) weights: &'a FloatMatrix,
    /// `[width]`: the sums are multiplied by the scales before the bias is added.
    pub(crate) scales: Option<&'a [f32]>,
    /// `[width]`, if there is a bias.
    pub(crate) bias: Option<&'a [f32]>,
    /// Whole panels, except at the matrix's end. No other thread writes these columns meanwhile.
    pub(crate) columns: Range<usize>,
    /// Receives these columns.
    pub(crate) out: OutputColumns<'a>,
}

impl Kernel for FloatMatMul<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        // SAFETY: this function's contract guarantees V's instructions.
        unsafe {
            match self.weights.format {
                MatrixFormat::F32 => self.multiply::<V, f32>(),
                MatrixFormat::Bf16 if V::HAS_BF16_DOT => self.multiply::<V, Pairs>(),
                MatrixFormat::Bf16 => self.multiply::<V, bf16>(),
            }
        }
    }
}

/// Calls a macro with the number of rows of a tile as a literal.
macro_rules! with_rows {
    ($lanes:ident, $rows:expr, $call:ident) => {
        match $rows {
            1 => $call!(1),
            2 => $call!(2),
            3 => $call!(3),
            4 => $call!(4),
            5 if const { $lanes::TILE_ROWS >= 5 } => $call!(5),
            6 if const { $lanes::TILE_ROWS >= 6 } => $call!(6),
            7 if const { $lanes::TILE_ROWS >= 7 } => $call!(7),
            8 if const { $lanes::TILE_ROWS >= 8 } => $call!(8),
            9 if const { $lanes::TILE_ROWS >= 9 } => $call!(9),
            10 if const { $lanes::TILE_ROWS >= 10 } => $call!(10),
            11 if const { $lanes::TILE_ROWS >= 11 } => $call!(11),
            12 if const { $lanes::TILE_ROWS >= 12 } => $call!(12),
            _ => unreachable!("a tile has at most TILE_ROWS rows, at most twelve"),
        }
    };
}
pub(crate) use with_rows;

/// Kernel for a single tile of R rows, with some panels packed as W.
struct SingleTileKernel<'a, W, const R: usize> {
    product: &'a FloatMatMul<'a>,
    panels: Range<usize>,
    numbers: PhantomData<W>,
}

impl<W: PanelFormat, const R: usize> Kernel for SingleTileKernel<'_, W, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        for panel in self.panels {
            // SAFETY: this function's contract guarantees V's instructions; it is created for a matrix packed
            // as W.
            unsafe { self.product.panel::<V, W, R>(panel) };
        }
    }
}

/// Adds the sums of a chain, times the scales of its block, to those of the chains before it in its slice.
///
/// # Safety
/// The CPU supports V's instructions.
#[inline(always)]
pub(super) unsafe fn add_scaled<V: F32x16, const R: usize, const M: usize>(
    mut of_slice: [[V; R]; M],
    sums: [[V; R]; M],
    scales: [V; M],
) -> [[V; R]; M] {
    for ((of_slice, sums), scale) in of_slice.iter_mut().zip(sums).zip(scales) {
        for (of_slice, sum) in of_slice.iter_mut().zip(sums) {
            // SAFETY: guaranteed by the caller.
            *of_slice = unsafe { of_slice.fma(sum, scale) };
        }
    }
    of_slice
}

impl FloatMatMul<'_> {
    /// # Safety
    /// The CPU supports V's instructions; the matrix is packed as W.
    #[inline(always)]
    unsafe fn multiply<V: F32x16, W: PanelFormat>(self) {
        let (steps, tiles) = (self.weights.steps(), self.x.tiles);
        let panel_bytes = steps * W::STEP_BYTES;
        assert!(
            self.columns.start.is_multiple_of(PANEL)
                && self.columns.end <= self.weights.width
                && size_of_val(&*self.weights.lines) == self.weights.width.div_ceil(PANEL) * panel_bytes
                && self.x.words.len() == tiles.num_rows() * steps * W::WORDS
                && (0..tiles.len()).all(|tile| tiles.rows(tile).len() <= V::TILE_ROWS),
            "operands of a packed GEMM have inconsistent shapes"
        );
        // SAFETY: the CPU supports V's instructions; panels and tiles lie inside by the assertion.
        unsafe {
            match tiles.len() {
                0 => {}
                1 if tiles.num_rows() <= V::TWO_VECTOR_ROWS => self.multiply_tile::<V, W>(tiles.num_rows()),
                _ => BlockedGemm::new::<W>(&self).multiply::<V, W>(),
            }
        }
    }

    /// The panels of these columns.
    pub(super) fn panels(&self) -> Range<usize> {
        self.columns.start / PANEL..self.columns.end.div_ceil(PANEL)
    }

    /// Multiplies when all rows are one tile.
    ///
    /// # Safety
    /// The CPU supports V's instructions; the matrix is packed as W, and the columns belong to it.
    #[inline(always)]
    unsafe fn multiply_tile<V: F32x16, W: PanelFormat>(&self, rows: usize) {
        let panels = self.panels();
        let mut panel = panels.start;
        let multi_stream = rows == 1 && V::TILE_VECTORS == PANEL_VECTORS && prefers_multi_stream();
        // SAFETY: guaranteed by the caller; an arm takes exactly the number of rows.
        unsafe {
            while multi_stream && panel + SINGLE_ROW_PANELS <= panels.end {
                let (first, stride) = (self.lines(), self.weights.steps() * W::STEP_BYTES);
                let prefetch = MultiStreamPrefetch::<SINGLE_ROW_PANELS> { first, stride };
                self.rows::<V, W, 1, { SINGLE_ROW_PANELS * PANEL_VECTORS }, PANEL_VECTORS>(
                    (panel, 0),
                    prefetch,
                );
                panel += SINGLE_ROW_PANELS;
            }
            let panels = panel..panels.end;
            macro_rules! panels {
                ($rows:literal) => {
                    V::run_outlined(SingleTileKernel::<W, $rows> {
                        product: self,
                        panels,
                        numbers: PhantomData,
                    })
                };
            }
            with_rows!(V, rows, panels);
        }
    }

    /// # Safety
    /// As for `multiply_tile`, for R rows.
    #[inline(always)]
    unsafe fn panel<V: F32x16, W: PanelFormat, const R: usize>(&self, panel: usize) {
        let prefetch = StreamPrefetch::new(self.lines());
        // SAFETY: guaranteed by the caller.
        unsafe {
            // One row, or two where a word holds a pair.
            if const { V::TILE_VECTORS == PANEL_VECTORS && R * W::WORDS <= STEP }
                && prefers_hardware_prefetch()
            {
                self.rows::<V, W, R, PANEL_VECTORS, PANEL_VECTORS>((panel, 0), HardwarePrefetch);
            } else if const { R <= V::TWO_VECTOR_ROWS } {
                self.rows::<V, W, R, PANEL_VECTORS, PANEL_VECTORS>((panel, 0), prefetch);
            } else {
                unreachable!("`multiply` leaves tiles of more rows to `BlockedGemm`");
            }
        }
    }

    /// Multiplies R rows with M vectors of channels, T of each panel, starting at a panel and a vector.
    ///
    /// # Safety
    /// The CPU supports V's instructions; all rows are one tile of R, the matrix is packed as W and has the
    /// panels.
    #[inline(always)]
    unsafe fn rows<V: F32x16, W: PanelFormat, const R: usize, const M: usize, const T: usize>(
        &self,
        (panel, first_vector): (usize, usize),
        prefetch: impl Prefetch + Copy,
    ) {
        let weights = self.weights;
        let panel_bytes = weights.steps() * W::STEP_BYTES;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut tree = SliceTree::<V, R, M>::new();
            let zeros = [[V::splat(0.0); R]; M];
            let (mut joined, mut of_slice) = (zeros, zeros);
            for (index, PackedChain { of, steps }) in weights.chains.iter().enumerate() {
                let x = self.x.words.as_ptr().add(steps.start * W::WORDS * R);
                let steps = Steps {
                    lines: self.lines(),
                    start: panel * panel_bytes + steps.start * W::STEP_BYTES,
                    count: steps.len(),
                    stride: panel_bytes,
                    first_vector,
                };
                let mut sums = steps.add::<V, W, R, M, T>(zeros, x, prefetch);
                if weights.block_scales.is_some() {
                    let mut scales = [V::splat(0.0); M];
                    for (m, scales) in scales.iter_mut().enumerate() {
                        *scales = self.block_scales((panel + m / T, index), first_vector + m % T);
                    }
                    sums = add_scaled(of_slice, sums, scales);
                    of_slice = if of.ends_slice { zeros } else { sums };
                }
                if of.ends_slice {
                    joined = if weights.is_sliced() { tree.join(of.slice, sums) } else { sums };
                }
            }
            for (m, sums) in joined.iter().enumerate() {
                let column = (panel + m / T) * PANEL + (first_vector + m % T) * LANES;
                self.write::<V, R>(sums, column, 0);
            }
        }
    }

    /// Scales of a chain for a vector of a panel's channels; zeros if scales are not by block.
    ///
    /// # Safety
    /// The CPU supports V's instructions.
    #[inline(always)]
    pub(super) unsafe fn block_scales<V: F32x16>(&self, (panel, chain): (usize, usize), vector: usize) -> V {
        match self.weights.chain_scales(panel, chain) {
            // SAFETY: the instructions are guaranteed by the caller; the slice has sixteen numbers.
            Some(scales) => unsafe { V::load(scales[vector * LANES..][..LANES].as_ptr()) },
            // SAFETY: as above.
            None => unsafe { V::splat(0.0) },
        }
    }

    pub(super) fn lines(&self) -> *const u8 {
        self.weights.lines.as_ptr().cast()
    }

    /// # Safety
    /// The CPU supports V's instructions; R rows from `row` are a tile, `first` is a column of this task or
    /// lies past the last one.
    #[inline(always)]
    pub(super) unsafe fn write<V: F32x16, const R: usize>(&self, sums: &[V; R], first: usize, row: usize) {
        let width = self.weights.width;
        let columns = LANES.min(width.saturating_sub(first));
        for (r, sums) in sums.iter().enumerate() {
            // SAFETY: no other task writes these columns; a whole vector is stored only if sixteen columns
            // are left.
            unsafe {
                if columns == LANES {
                    let scaled = match self.scales {
                        Some(scales) => sums.mul(V::load(scales[first..].as_ptr())),
                        None => *sums,
                    };
                    let biased = match self.bias {
                        Some(bias) => scaled.add(V::load(bias[first..].as_ptr())),
                        None => scaled,
                    };
                    biased.store(self.out.slice_mut(row + r, first - self.columns.start, LANES).as_mut_ptr());
                } else if columns > 0 {
                    let mut numbers = [0.0f32; LANES];
                    sums.store(numbers.as_mut_ptr());
                    let out = self.out.slice_mut(row + r, first - self.columns.start, columns);
                    for (c, (out, number)) in out.iter_mut().zip(numbers).enumerate() {
                        let scaled = self.scales.map_or(number, |scales| number * scales[first + c]);
                        *out = self.bias.map_or(scaled, |bias| scaled + bias[first + c]);
                    }
                }
            }
        }
    }
}
