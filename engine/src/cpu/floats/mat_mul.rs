//! Activations times packed floats: `out[row][column] = sum over k of x[row][k] * weights[column][k] (+ bias[column])`,
//! one chain of fused multiply-adds along each K-slice. A tile of rows meets a panel in registers; a panel is read
//! from memory once for all tiles. Where many tiles follow, bf16 is widened once into a panel of f32.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::ops::Range;

use half::bf16;

use super::{FloatMatrix, PANEL, PANEL_VECTORS, STEP, TiledRows};
use crate::cpu::dispatch::Kernel;
use crate::cpu::lanes::{LANES, Lanes};
use crate::cpu::threads::Shared;
use crate::cpu::tiles::SliceTree;
use crate::k_slices::NUM_SLICES;
use crate::weights::MatrixFormat;

/// Tiles that a panel of bf16 meets as it is; widening it for more is cheaper.
const DIRECT_TILES: usize = 2;
/// Activations that are kept near while all panels pass: half of a second-level cache.
const BLOCK_NUMBERS: usize = 256 * 1024;
/// How far ahead of use a line is fetched.
const PREFETCH_BYTES: usize = 4096;

/// Some columns of a packed matrix, for all rows.
pub(in crate::cpu) struct FloatMatMul<'a> {
    pub(in crate::cpu) x: &'a TiledRows,
    pub(in crate::cpu) weights: &'a FloatMatrix,
    /// `[width]`, or nothing.
    pub(in crate::cpu) bias: Option<&'a [f32]>,
    /// Whole panels, but for the matrix's last. Nobody else writes them meanwhile.
    pub(in crate::cpu) columns: Range<usize>,
    /// `[rows, width]`.
    pub(in crate::cpu) out: &'a Shared<'a, f32>,
    /// Room for a widened panel.
    pub(in crate::cpu) widened: &'a mut Vec<f32>,
}

/// How numbers stand in a panel.
trait PanelNumbers {
    /// Bytes of a step.
    const STEP_BYTES: usize;

    /// The two numbers of the channels of one vector.
    ///
    /// # Safety
    /// As for [`Lanes`]: a step lies at `step`, and it has the vector.
    unsafe fn load_step<V: Lanes>(step: *const u8, vector: usize) -> (V, V);
}

impl PanelNumbers for f32 {
    const STEP_BYTES: usize = STEP * PANEL * size_of::<f32>();

    #[inline(always)]
    unsafe fn load_step<V: Lanes>(step: *const u8, vector: usize) -> (V, V) {
        let step: *const f32 = step.cast();
        // SAFETY: the caller's promise.
        unsafe { (V::load(step.add(vector * LANES)), V::load(step.add(PANEL + vector * LANES))) }
    }
}

impl PanelNumbers for bf16 {
    const STEP_BYTES: usize = STEP * PANEL * size_of::<bf16>();

    #[inline(always)]
    unsafe fn load_step<V: Lanes>(step: *const u8, vector: usize) -> (V, V) {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16_pairs(step.add(vector * LANES * STEP * size_of::<bf16>()).cast()) }
    }
}

impl Kernel for FloatMatMul<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        // SAFETY: V's instructions are there by this function's contract.
        unsafe {
            match self.weights.format {
                MatrixFormat::F32 => self.multiply::<V, f32>(),
                MatrixFormat::Bf16 => self.multiply::<V, bf16>(),
            }
        }
    }
}

impl FloatMatMul<'_> {
    /// # Safety
    /// V's instructions are there; the matrix is packed as W.
    #[inline(always)]
    unsafe fn multiply<V: Lanes, W: PanelNumbers>(self) {
        let (steps, tiles) = (self.weights.steps(), self.x.tiles);
        let panel_bytes = steps * W::STEP_BYTES;
        assert!(
            self.columns.start.is_multiple_of(PANEL)
                && self.columns.end <= self.weights.width
                && size_of_val(&*self.weights.lines) == self.weights.width.div_ceil(PANEL) * panel_bytes
                && self.x.values.len() == tiles.num_rows() * steps * STEP
                && (0..tiles.len()).all(|tile| tiles.rows(tile).len() <= V::TILE_ROWS),
            "a packed product's operands disagree"
        );
        let direct = W::STEP_BYTES == f32::STEP_BYTES || tiles.len() <= DIRECT_TILES;
        let block = (BLOCK_NUMBERS / (steps * STEP * V::TILE_ROWS).max(1)).max(1);
        let mut widened = std::mem::take(self.widened);
        if !direct {
            widened.resize(steps * STEP * PANEL, 0.0);
        }
        for first in (0..tiles.len()).step_by(block) {
            for panel in self.columns.start / PANEL..self.columns.end.div_ceil(PANEL) {
                // SAFETY: V's instructions are there; panel and tiles lie inside by the assertion, and the widened
                // panel has room for all steps.
                unsafe {
                    let lines = self.weights.lines.as_ptr().cast::<u8>().add(panel * panel_bytes);
                    if !direct {
                        widen::<V, W>(lines, steps, widened.as_mut_ptr());
                    }
                    for tile in first..tiles.len().min(first + block) {
                        match direct {
                            true => self.tile::<V, W, true>(lines, panel, tiles.rows(tile)),
                            false => {
                                self.tile::<V, f32, false>(widened.as_ptr().cast(), panel, tiles.rows(tile))
                            }
                        }
                    }
                }
            }
        }
        *self.widened = widened;
    }

    /// A tile of rows times one panel.
    ///
    /// # Safety
    /// V's instructions are there; the rows are a tile, `lines` is the panel with numbers as in N.
    #[inline(always)]
    unsafe fn tile<V: Lanes, N: PanelNumbers, const STREAM: bool>(
        &self,
        lines: *const u8,
        panel: usize,
        rows: Range<usize>,
    ) {
        let at = (lines, panel, rows.start);
        // SAFETY: the caller's promise; an arm takes as many rows as there are.
        unsafe {
            match rows.len() {
                1 => self.rows::<V, N, STREAM, 1>(at),
                2 => self.rows::<V, N, STREAM, 2>(at),
                3 => self.rows::<V, N, STREAM, 3>(at),
                4 => self.rows::<V, N, STREAM, 4>(at),
                5 if V::TILE_ROWS > 4 => self.rows::<V, N, STREAM, 5>(at),
                6 if V::TILE_ROWS > 4 => self.rows::<V, N, STREAM, 6>(at),
                7 if V::TILE_ROWS > 4 => self.rows::<V, N, STREAM, 7>(at),
                8 if V::TILE_ROWS > 4 => self.rows::<V, N, STREAM, 8>(at),
                9 if V::TILE_ROWS > 4 => self.rows::<V, N, STREAM, 9>(at),
                10 if V::TILE_ROWS > 4 => self.rows::<V, N, STREAM, 10>(at),
                11 if V::TILE_ROWS > 4 => self.rows::<V, N, STREAM, 11>(at),
                12 if V::TILE_ROWS > 4 => self.rows::<V, N, STREAM, 12>(at),
                _ => unreachable!("a tile has at most V::TILE_ROWS rows, and no V has more than twelve"),
            }
        }
    }

    /// # Safety
    /// V's instructions are there; `lines` is the panel with numbers as in N, R rows from `row` are a tile.
    #[inline(always)]
    unsafe fn rows<V: Lanes, N: PanelNumbers, const STREAM: bool, const R: usize>(
        &self,
        (lines, panel, row): (*const u8, usize, usize),
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let x = self.x.values.as_ptr().add(row * self.weights.steps() * STEP);
            if V::TILE_VECTORS == PANEL_VECTORS {
                let sums = self.sums::<V, N, STREAM, R, PANEL_VECTORS>(lines, 0, x);
                self.write::<V, R>(sums[0], panel * PANEL, row);
                self.write::<V, R>(sums[1], panel * PANEL + LANES, row);
            } else {
                for vector in 0..PANEL_VECTORS {
                    let [sums] = self.sums::<V, N, STREAM, R, 1>(lines, vector, x);
                    self.write::<V, R>(sums, panel * PANEL + vector * LANES, row);
                }
            }
        }
    }

    /// The sums of R rows with the channels of T vectors, slices joined.
    ///
    /// # Safety
    /// V's instructions are there; `lines` is a panel with numbers as in N, `x` a tile of R rows.
    #[inline(always)]
    unsafe fn sums<V: Lanes, N: PanelNumbers, const STREAM: bool, const R: usize, const T: usize>(
        &self,
        lines: *const u8,
        first_vector: usize,
        x: *const f32,
    ) -> [[V; R]; T] {
        let slices = &self.weights.slices;
        // SAFETY: the caller's promise; steps of slices are steps of the panel and of the tile.
        unsafe {
            let mut tree = SliceTree::<V, R, T>::new();
            let mut joined = [[V::splat(0.0); R]; T];
            for (index, slice) in slices.iter().enumerate() {
                let mut sums = [[V::splat(0.0); R]; T];
                let mut step = lines.add(slice.steps.start * N::STEP_BYTES);
                let mut x = x.add(slice.steps.start * STEP * R);
                for _ in slice.steps.clone() {
                    if STREAM && first_vector == 0 {
                        for line in 0..N::STEP_BYTES / 64 {
                            V::prefetch(step.wrapping_add(PREFETCH_BYTES + line * 64));
                        }
                    }
                    let mut weights = [(V::splat(0.0), V::splat(0.0)); T];
                    for t in 0..T {
                        weights[t] = N::load_step::<V>(step, first_vector + t);
                    }
                    for r in 0..R {
                        let x = V::splat(*x.add(r));
                        for t in 0..T {
                            sums[t][r] = sums[t][r].fma(weights[t].0, x);
                        }
                    }
                    for r in 0..R {
                        let x = V::splat(*x.add(R + r));
                        for t in 0..T {
                            sums[t][r] = sums[t][r].fma(weights[t].1, x);
                        }
                    }
                    step = step.add(N::STEP_BYTES);
                    x = x.add(STEP * R);
                }
                joined = if slices.len() == NUM_SLICES { tree.join(index, sums) } else { sums };
            }
            joined
        }
    }

    /// # Safety
    /// V's instructions are there; R rows from `row` are a tile, `first` is a column of this task or lies past the
    /// last.
    #[inline(always)]
    unsafe fn write<V: Lanes, const R: usize>(&self, sums: [V; R], first: usize, row: usize) {
        let width = self.weights.width;
        let columns = LANES.min(width.saturating_sub(first));
        for r in 0..R {
            let start = (row + r) * width + first;
            // SAFETY: the columns of this task are its own; a whole vector is stored only where sixteen are left.
            unsafe {
                if columns == LANES {
                    let biased = match self.bias {
                        Some(bias) => sums[r].add(V::load(bias[first..].as_ptr())),
                        None => sums[r],
                    };
                    biased.store(self.out.slice_mut(start..start + LANES).as_mut_ptr());
                } else if columns > 0 {
                    let mut numbers = [0.0f32; LANES];
                    sums[r].store(numbers.as_mut_ptr());
                    let out = self.out.slice_mut(start..start + columns);
                    for c in 0..columns {
                        out[c] = self.bias.map_or(numbers[c], |bias| numbers[c] + bias[first + c]);
                    }
                }
            }
        }
    }
}

/// A panel as f32.
///
/// # Safety
/// V's instructions are there; `lines` is a panel with numbers as in N, and `out` has room for its steps.
#[inline(always)]
unsafe fn widen<V: Lanes, N: PanelNumbers>(lines: *const u8, steps: usize, out: *mut f32) {
    for step in 0..steps {
        // SAFETY: the caller's promise.
        unsafe {
            let (from, to) = (lines.add(step * N::STEP_BYTES), out.add(step * STEP * PANEL));
            for vector in 0..PANEL_VECTORS {
                V::prefetch(from.wrapping_add(PREFETCH_BYTES + vector * 64));
                let (first, second) = N::load_step::<V>(from, vector);
                first.store(to.add(vector * LANES));
                second.store(to.add(PANEL + vector * LANES));
            }
        }
    }
}
