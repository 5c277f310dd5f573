//! Activations times weights: `out[row][column] = sum over k of x[row][k] * weights[column][k] (+
//! bias[column])`. Each sum has one order (see [`super::lanes`] and `k_slices`), whatever the number of rows,
//! so tiles differ in speed only. A few weight rows meet a few activation rows at a time in registers;
//! weights are streamed once for every panel of rows.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::ops::Range;

use super::dispatch::Kernel;
use super::lanes::{Element, LANES, Lanes};
use super::threads::Shared;
use crate::k_slices::{KSlices, NUM_SLICES, tree};

/// Weight rows that a panel's activation rows meet before the next ones are fetched.
const BLOCK_COLUMNS: usize = 8;
/// Activations of a panel are kept near the size of a second-level cache share.
const PANEL_NUMBERS: usize = 128 * 1024;

/// Some columns of one weight matrix, for all rows.
pub(super) struct MatMul<'a, W> {
    /// `[rows, k]`.
    pub(super) x: &'a [f32],
    /// `[columns, k]`.
    pub(super) weights: &'a [W],
    pub(super) k: usize,
    pub(super) slices: &'a KSlices,
    /// `[columns]`, or nothing.
    pub(super) bias: Option<&'a [f32]>,
    /// The columns to compute. Nobody else writes them meanwhile.
    pub(super) columns: Range<usize>,
    /// `[rows, out_width]`; column c goes to `out_start + c`.
    pub(super) out: &'a Shared<'a, f32>,
    pub(super) out_width: usize,
    pub(super) out_start: usize,
}

impl<W: Element> Kernel for MatMul<'_, W> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let rows = self.x.len() / self.k;
        assert!(self.x.len() == rows * self.k && self.weights.len() >= self.columns.end * self.k);
        let panel = (PANEL_NUMBERS / self.k).max(1).next_multiple_of(V::TILE_ROWS);
        for panel_start in (0..rows).step_by(panel) {
            let panel_end = rows.min(panel_start + panel);
            for block_start in self.columns.clone().step_by(BLOCK_COLUMNS) {
                let block = block_start..self.columns.end.min(block_start + BLOCK_COLUMNS);
                let mut row = panel_start;
                while row < panel_end {
                    // Tiles as even as they can be: five rows are five, not four and a slow one.
                    let left = panel_end - row;
                    let tile_rows = left.div_ceil(left.div_ceil(V::TILE_ROWS));
                    // SAFETY: V's instructions are there; rows and columns lie inside by the assertion.
                    unsafe { self.rows::<V>(row, tile_rows, block.clone()) };
                    row += tile_rows;
                }
            }
        }
    }
}

impl<W: Element> MatMul<'_, W> {
    /// # Safety
    /// V's instructions are there; 1 to `V::TILE_ROWS` rows from `row`, and the columns, lie inside the matrices.
    #[inline(always)]
    unsafe fn rows<V: Lanes>(&self, row: usize, tile_rows: usize, columns: Range<usize>) {
        // SAFETY: the caller's promise; no arm takes more than `tile_rows` rows.
        unsafe {
            match tile_rows {
                1 => self.one_row::<V>(row, columns),
                2 => self.block::<V, 2>(row, columns),
                3 => self.block::<V, 3>(row, columns),
                4 => self.block::<V, 4>(row, columns),
                5 if V::TILE_ROWS > 4 => self.block::<V, 5>(row, columns),
                6 if V::TILE_ROWS > 4 => self.block::<V, 6>(row, columns),
                _ => unreachable!("a tile has at most V::TILE_ROWS rows, and no V has more than six"),
            }
        }
    }

    /// # Safety
    /// V's instructions are there; the row and the columns lie inside the matrices.
    #[inline(always)]
    unsafe fn one_row<V: Lanes>(&self, row: usize, columns: Range<usize>) {
        let mut column = columns.start;
        // SAFETY: the caller's promise; each tile ends at `columns.end` at the latest.
        unsafe {
            if V::COLUMNS_BY_1 == 8 && columns.len() == 8 {
                self.tile::<V, 1, 8>(row, column);
                return;
            }
            if V::COLUMNS_BY_1 >= 4 {
                while column + 4 <= columns.end {
                    self.tile::<V, 1, 4>(row, column);
                    column += 4;
                }
            }
            while column < columns.end {
                self.tile::<V, 1, 1>(row, column);
                column += 1;
            }
        }
    }

    /// # Safety
    /// V's instructions are there; R rows from `row` and the columns lie inside the matrices.
    #[inline(always)]
    unsafe fn block<V: Lanes, const R: usize>(&self, row: usize, columns: Range<usize>) {
        let mut column = columns.start;
        // SAFETY: the caller's promise; each tile ends at `columns.end` at the latest.
        unsafe {
            if V::COLUMNS_BY_1 == 8 {
                while column + 4 <= columns.end {
                    self.tile::<V, R, 4>(row, column);
                    column += 4;
                }
            }
            if V::COLUMNS_BY_1 == 4 {
                while column + 2 <= columns.end {
                    self.tile::<V, R, 2>(row, column);
                    column += 2;
                }
            }
            while column < columns.end {
                self.tile::<V, R, 1>(row, column);
                column += 1;
            }
        }
    }

    /// R rows times C columns, all slices, written out.
    ///
    /// # Safety
    /// V's instructions are there; R rows from `row` and C columns from `column` lie inside the matrices.
    #[inline(always)]
    unsafe fn tile<V: Lanes, const R: usize, const C: usize>(&self, row: usize, column: usize) {
        let mut sums = [[[0.0f32; C]; R]; NUM_SLICES];
        let slices = self.slices.ranges();
        for (s, slice) in slices.iter().enumerate() {
            // SAFETY: the caller's promise; a slice lies inside 0..k.
            sums[s] = unsafe {
                let x = self.x.as_ptr().add(row * self.k + slice.start);
                let w = self.weights.as_ptr().add(column * self.k + slice.start);
                dot_tile::<V, W, R, C>(x, w, self.k, slice.len())
            };
        }
        for r in 0..R {
            let mut out = sums[0][r];
            if slices.len() == NUM_SLICES {
                for c in 0..C {
                    out[c] = tree([
                        sums[0][r][c],
                        sums[1][r][c],
                        sums[2][r][c],
                        sums[3][r][c],
                        sums[4][r][c],
                        sums[5][r][c],
                        sums[6][r][c],
                        sums[7][r][c],
                    ]);
                }
            }
            if let Some(bias) = self.bias {
                for c in 0..C {
                    out[c] += bias[column + c];
                }
            }
            let start = (row + r) * self.out_width + self.out_start + column;
            // SAFETY: the columns of this task are its own.
            unsafe { self.out.slice_mut(start..start + C) }.copy_from_slice(&out);
        }
    }
}

/// All dot products of R activation rows with C weight rows, each `stride` behind the one before, over their
/// first `len`.
///
/// Loops are written out: a closure would be compiled without V's instructions where it is not inlined.
///
/// # Safety
/// V's instructions are there; every row holds `len` elements.
#[inline(always)]
unsafe fn dot_tile<V: Lanes, W: Element, const R: usize, const C: usize>(
    x: *const f32,
    w: *const W,
    stride: usize,
    len: usize,
) -> [[f32; C]; R] {
    let mut out = [[0.0; C]; R];
    let mut k = 0;
    // SAFETY: k + 16 <= len inside the loop, len - k < 16 behind it.
    unsafe {
        let mut sums = [[V::splat(0.0); R]; C];
        let mut xs = [V::splat(0.0); R];
        while k + LANES <= len {
            for r in 0..R {
                xs[r] = V::load(x.add(r * stride + k));
            }
            for c in 0..C {
                let weights = W::load::<V>(w.add(c * stride + k));
                for r in 0..R {
                    sums[c][r] = sums[c][r].fma(weights, xs[r]);
                }
            }
            k += LANES;
        }
        if k < len {
            for r in 0..R {
                xs[r] = f32::load_part::<V>(x.add(r * stride + k), len - k);
            }
            for c in 0..C {
                let weights = W::load_part::<V>(w.add(c * stride + k), len - k);
                for r in 0..R {
                    sums[c][r] = sums[c][r].fma(weights, xs[r]);
                }
            }
        }
        for r in 0..R {
            let mut c = 0;
            while c + 4 <= C {
                let four = V::fold_4([sums[c][r], sums[c + 1][r], sums[c + 2][r], sums[c + 3][r]]);
                out[r][c..c + 4].copy_from_slice(&four);
                c += 4;
            }
            while c < C {
                out[r][c] = sums[c][r].fold();
                c += 1;
            }
        }
    }
    out
}

/// The dot product of two rows.
///
/// # Safety
/// V's instructions are there.
#[inline(always)]
pub(super) unsafe fn dot<V: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: the caller's promise; both slices hold the shorter one's length.
    unsafe { dot_tile::<V, f32, 1, 1>(a.as_ptr(), b.as_ptr(), 0, a.len().min(b.len()))[0][0] }
}
