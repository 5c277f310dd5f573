//! Activations times packed floats: `out[row][column] = sum over k of x[row][k] * weights[column][k] (+ bias[column])`,
//! one chain of fused multiply-adds along each K-slice. A tile of rows meets a panel in registers; a panel is read
//! from memory once for all tiles. One row alone meets several panels side by side: it waits for memory, which is
//! faster in several streams.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::ops::Range;

use half::bf16;

use super::{FloatMatrix, PANEL, PANEL_VECTORS, STEP, TiledRows};
use crate::cpu::dispatch::Kernel;
use crate::cpu::lanes::{LANES, Lanes};
use crate::cpu::lines::{fetch_ahead, fetch_near};
use crate::cpu::threads::Shared;
use crate::cpu::tiles::SliceTree;
use crate::k_slices::NUM_SLICES;
use crate::weights::MatrixFormat;

/// Activations that are kept near while all panels pass: half of a second-level cache.
const BLOCK_NUMBERS: usize = 256 * 1024;
/// Panels that one row meets side by side, where vectors are as wide as a panel's half.
const PANELS_BY_1: usize = 4;
/// Bytes of a cache line.
const LINE: usize = 64;

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
}

/// How numbers stand in a panel.
trait PanelNumbers {
    /// Bytes of a step.
    const STEP_BYTES: usize;

    /// Fetches what comes after the step that begins with line `line` of those at `first`.
    ///
    /// # Safety
    /// As for [`Lanes`].
    unsafe fn fetch_ahead<V: Lanes>(first: *const u8, line: usize);

    /// The two numbers of the channels of one vector.
    ///
    /// # Safety
    /// As for [`Lanes`]: a step lies at `step`, and it has the vector.
    unsafe fn load_step<V: Lanes>(step: *const u8, vector: usize) -> (V, V);
}

impl PanelNumbers for f32 {
    const STEP_BYTES: usize = STEP * PANEL * size_of::<f32>();

    #[inline(always)]
    unsafe fn fetch_ahead<V: Lanes>(first: *const u8, line: usize) {
        // SAFETY: the caller's promise.
        unsafe { fetch_ahead::<V, { Self::STEP_BYTES / LINE }>(first, line) };
    }

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
    unsafe fn fetch_ahead<V: Lanes>(first: *const u8, line: usize) {
        // SAFETY: the caller's promise.
        unsafe { fetch_ahead::<V, { Self::STEP_BYTES / LINE }>(first, line) };
    }

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
        let block = (BLOCK_NUMBERS / (steps * STEP * V::TILE_ROWS).max(1)).max(1);
        let panels = self.columns.start / PANEL..self.columns.end.div_ceil(PANEL);
        for first in (0..tiles.len()).step_by(block) {
            let mut panel = panels.start;
            while panel < panels.end {
                let alone = tiles.num_rows() == 1 && V::TILE_VECTORS == PANEL_VECTORS;
                // SAFETY: V's instructions are there; panels and tiles lie inside by the assertion.
                unsafe {
                    if alone && panel + PANELS_BY_1 <= panels.end {
                        self.rows::<V, W, 1, { PANELS_BY_1 * PANEL_VECTORS }, PANEL_VECTORS>(panel, 0, 0);
                        panel += PANELS_BY_1;
                        continue;
                    }
                    for tile in first..tiles.len().min(first + block) {
                        self.tile::<V, W>(panel, tiles.rows(tile));
                    }
                }
                panel += 1;
            }
        }
    }

    /// A tile of rows times one panel.
    ///
    /// # Safety
    /// V's instructions are there; the rows are a tile, the matrix is packed as W and has the panel.
    #[inline(always)]
    unsafe fn tile<V: Lanes, W: PanelNumbers>(&self, panel: usize, rows: Range<usize>) {
        // SAFETY: the caller's promise; an arm takes as many rows as there are.
        unsafe {
            match rows.len() {
                1 => self.panel::<V, W, 1>(panel, rows.start),
                2 => self.panel::<V, W, 2>(panel, rows.start),
                3 => self.panel::<V, W, 3>(panel, rows.start),
                4 => self.panel::<V, W, 4>(panel, rows.start),
                5 if V::TILE_ROWS > 4 => self.panel::<V, W, 5>(panel, rows.start),
                6 if V::TILE_ROWS > 4 => self.panel::<V, W, 6>(panel, rows.start),
                7 if V::TILE_ROWS > 4 => self.panel::<V, W, 7>(panel, rows.start),
                8 if V::TILE_ROWS > 4 => self.panel::<V, W, 8>(panel, rows.start),
                9 if V::TILE_ROWS > 4 => self.panel::<V, W, 9>(panel, rows.start),
                10 if V::TILE_ROWS > 4 => self.panel::<V, W, 10>(panel, rows.start),
                11 if V::TILE_ROWS > 4 => self.panel::<V, W, 11>(panel, rows.start),
                12 if V::TILE_ROWS > 4 => self.panel::<V, W, 12>(panel, rows.start),
                _ => unreachable!("a tile has at most V::TILE_ROWS rows, and no V has more than twelve"),
            }
        }
    }

    /// # Safety
    /// As for `tile`, for the R rows from `row`.
    #[inline(always)]
    unsafe fn panel<V: Lanes, W: PanelNumbers, const R: usize>(&self, panel: usize, row: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if V::TILE_VECTORS == PANEL_VECTORS {
                self.rows::<V, W, R, PANEL_VECTORS, PANEL_VECTORS>(panel, 0, row);
            } else {
                for vector in 0..PANEL_VECTORS {
                    self.rows::<V, W, R, 1, 1>(panel, vector, row);
                }
            }
        }
    }

    /// R rows times M vectors of channels, T of each panel from `panel` and `first_vector` on.
    ///
    /// # Safety
    /// V's instructions are there; R rows from `row` are a tile, the matrix is packed as W and has the panels.
    #[inline(always)]
    unsafe fn rows<V: Lanes, W: PanelNumbers, const R: usize, const M: usize, const T: usize>(
        &self,
        panel: usize,
        first_vector: usize,
        row: usize,
    ) {
        let slices = &self.weights.slices;
        // SAFETY: the caller's promise.
        unsafe {
            let x = self.x.values.as_ptr().add(row * self.weights.steps() * STEP);
            let mut tree = SliceTree::<V, R, M>::new();
            let mut joined = [[V::splat(0.0); R]; M];
            for (index, slice) in slices.iter().enumerate() {
                let x = x.add(slice.steps.start * STEP * R);
                let sums =
                    self.slice::<V, W, R, M, T>((panel, first_vector, row == 0), slice.steps.clone(), x);
                joined = if slices.len() == NUM_SLICES { tree.join(index, sums) } else { sums };
            }
            for m in 0..M {
                let column = (panel + m / T) * PANEL + (first_vector + m % T) * LANES;
                self.write::<V, R>(joined[m], column, row);
            }
        }
    }

    /// The sums over the steps of one slice.
    ///
    /// # Safety
    /// As for `rows`; `x` is where the slice begins in a tile of R rows.
    #[inline(always)]
    unsafe fn slice<V: Lanes, W: PanelNumbers, const R: usize, const M: usize, const T: usize>(
        &self,
        (panel, first_vector, first_rows): (usize, usize, bool),
        steps: Range<usize>,
        mut x: *const f32,
    ) -> [[V; R]; M] {
        let panel_bytes = self.weights.steps() * W::STEP_BYTES;
        let lines: *const u8 = self.weights.lines.as_ptr().cast();
        let mut at = panel * panel_bytes + steps.start * W::STEP_BYTES;
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[V::splat(0.0); R]; M];
            for _ in steps {
                // Later rows find the panel in a cache.
                if M == T && first_vector == 0 && first_rows {
                    W::fetch_ahead::<V>(lines, at / LINE);
                }
                if M > T {
                    for p in 0..M / T {
                        for line in (0..W::STEP_BYTES).step_by(LINE) {
                            fetch_near::<V>(lines.add(at + p * panel_bytes + line));
                        }
                    }
                }
                let mut weights = [(V::splat(0.0), V::splat(0.0)); M];
                for m in 0..M {
                    let step = lines.add(at + m / T * panel_bytes);
                    weights[m] = W::load_step::<V>(step, first_vector + m % T);
                }
                for r in 0..R {
                    let x = V::splat(*x.add(r));
                    for m in 0..M {
                        sums[m][r] = sums[m][r].fma(weights[m].0, x);
                    }
                }
                for r in 0..R {
                    let x = V::splat(*x.add(R + r));
                    for m in 0..M {
                        sums[m][r] = sums[m][r].fma(weights[m].1, x);
                    }
                }
                at += W::STEP_BYTES;
                x = x.add(STEP * R);
            }
            sums
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
