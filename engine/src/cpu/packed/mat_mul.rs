//! Quantized activations times packed weights. Integer sums are exact, so tiles may be of any shape; the order
//! of what is done in f32 is the contract's (C1): pieces of a slice in order, the activations' scale, the
//! tree, the channel's scale, the bias.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::ops::Range;

use half::bf16;

use super::layout::{GROUP, Piece};
use super::{DotKernel, Dots, PANEL, PackedMatrix, QuantizedRows, Scales};
use crate::cpu::lanes::Lanes;
use crate::cpu::threads::Shared;
use crate::k_slices::NUM_SLICES;

/// Activation rows in a tile.
const TILE_ROWS: usize = 8;
/// Levels of the tree that joins slices.
const TREE_LEVELS: usize = 3;

/// Some columns of a packed matrix, for all rows.
pub(in crate::cpu) struct PackedMatMul<'a> {
    pub(in crate::cpu) x: &'a QuantizedRows,
    pub(in crate::cpu) rows: usize,
    pub(in crate::cpu) weights: &'a PackedMatrix,
    /// `[width]`, or nothing.
    pub(in crate::cpu) bias: Option<&'a [f32]>,
    /// Whole panels, but for the matrix's last. Nobody else writes them meanwhile.
    pub(in crate::cpu) columns: Range<usize>,
    /// `[rows, width]`.
    pub(in crate::cpu) out: &'a Shared<'a, f32>,
}

impl DotKernel for PackedMatMul<'_> {
    #[inline(always)]
    unsafe fn run<D: Dots>(self) {
        let layout = &self.weights.layout;
        assert!(
            self.columns.start.is_multiple_of(PANEL)
                && self.columns.end <= self.weights.width
                && self.weights.lines.len() == self.weights.panels() * self.weights.panel_lines()
                && self.x.values.len() == self.rows * layout.padded(),
            "a packed product's operands disagree"
        );
        for panel in self.columns.start / PANEL..self.columns.end.div_ceil(PANEL) {
            let mut row = 0;
            while row < self.rows {
                // Tiles as even as they can be: nine rows are five and four.
                let left = self.rows - row;
                let tile_rows = left.div_ceil(left.div_ceil(TILE_ROWS));
                // SAFETY: D's instructions are there; rows and panel lie inside by the assertion, and no arm
                // takes more than `tile_rows` rows.
                unsafe {
                    match tile_rows {
                        1 => self.tile::<D, 1, 4>(panel, row),
                        2 => self.tile::<D, 2, 2>(panel, row),
                        3 => self.tile::<D, 3, 2>(panel, row),
                        4 => self.tile::<D, 4, 2>(panel, row),
                        5 => self.tile::<D, 5, 1>(panel, row),
                        6 => self.tile::<D, 6, 1>(panel, row),
                        7 => self.tile::<D, 7, 1>(panel, row),
                        _ => self.tile::<D, 8, 1>(panel, row),
                    }
                }
                row += tile_rows;
            }
        }
    }
}

impl PackedMatMul<'_> {
    /// R rows times one panel, all slices, written out. U chains of sums for each row hide the latency of the
    /// instruction.
    ///
    /// # Safety
    /// D's instructions are there; R rows from `row`, and the panel, lie inside the operands.
    #[inline(always)]
    unsafe fn tile<D: Dots, const R: usize, const U: usize>(&self, panel: usize, row: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let slices = self.weights.layout.slices().len();
            let mut joined = [D::Lanes::splat(0.0); R];
            // The tree as a counter: a level holds its left branch until the right one is there.
            let mut held = [joined; TREE_LEVELS];
            for slice in 0..slices {
                joined = self.slice::<D, R, U>(panel, row, slice);
                if slices < NUM_SLICES {
                    continue;
                }
                let mut level = 0;
                while slice >> level & 1 == 1 {
                    for r in 0..R {
                        joined[r] = held[level][r].add(joined[r]);
                    }
                    level += 1;
                }
                if level < TREE_LEVELS {
                    held[level] = joined;
                }
            }
            self.write::<D, R>(panel, row, joined);
        }
    }

    /// One slice of R rows, scaled to f32.
    ///
    /// # Safety
    /// As for `tile`; the slice is one of the layout's.
    #[inline(always)]
    unsafe fn slice<D: Dots, const R: usize, const U: usize>(
        &self,
        panel: usize,
        row: usize,
        slice: usize,
    ) -> [D::Lanes; R] {
        let layout = &self.weights.layout;
        let pieces = layout.slices()[slice].clone();
        let num_pieces = layout.pieces().len();
        // SAFETY: the caller's promise; group scales are there for every piece of every panel.
        unsafe {
            let panel_lines = self.weights.lines.as_ptr().add(panel * self.weights.panel_lines());
            let mut sums = [D::Lanes::splat(0.0); R];
            for index in pieces {
                let piece = &layout.pieces()[index];
                let at = PieceAt::new(self, row, piece, index);
                match &self.weights.scales {
                    Scales::Channel(_) => {
                        let lines = panel_lines.add(piece.start / 4).cast();
                        let exact = at.dot_bytes::<D, R, U>(lines);
                        for r in 0..R {
                            sums[r] = exact[r].to_f32();
                        }
                    }
                    Scales::Group(scales) => {
                        let lines = panel_lines.add(piece.start / 8).cast();
                        let scale: *const bf16 = scales.as_ptr().add((panel * num_pieces + index) * PANEL);
                        let scale = D::Lanes::load_bf16(scale);
                        let exact = at.dot_halves::<D, R, U>(lines);
                        for r in 0..R {
                            sums[r] = sums[r].fma(exact[r].to_f32(), scale);
                        }
                    }
                }
            }
            let slices = layout.slices().len();
            for r in 0..R {
                sums[r] = sums[r].mul(D::Lanes::splat(self.x.scales[(row + r) * slices + slice]));
            }
            sums
        }
    }

    /// # Safety
    /// As for `tile`.
    #[inline(always)]
    unsafe fn write<D: Dots, const R: usize>(&self, panel: usize, row: usize, joined: [D::Lanes; R]) {
        let first = panel * PANEL;
        let width = self.weights.width;
        let columns = PANEL.min(width - first);
        for r in 0..R {
            let mut numbers = [0.0f32; PANEL];
            // SAFETY: channel scales are there for whole panels; the columns of this task are its own.
            let out = unsafe {
                let mut lanes = joined[r];
                if let Scales::Channel(scales) = &self.weights.scales {
                    lanes = lanes.mul(D::Lanes::load(scales.as_ptr().add(first)));
                }
                lanes.store(numbers.as_mut_ptr());
                let start = (row + r) * width + first;
                self.out.slice_mut(start..start + columns)
            };
            out.copy_from_slice(&numbers[..columns]);
            if let Some(bias) = self.bias {
                for c in 0..columns {
                    out[c] += bias[first + c];
                }
            }
        }
    }
}

/// The activations of a piece, from some row on.
struct PieceAt {
    x: *const i8,
    /// From a row to the next.
    stride: usize,
    len: usize,
    corrections: *const i32,
    corrections_stride: usize,
}

impl PieceAt {
    /// # Safety
    /// The row and the piece, which is the layout's `index`-th, lie inside the operands.
    #[inline(always)]
    unsafe fn new(product: &PackedMatMul<'_>, row: usize, piece: &Piece, index: usize) -> Self {
        let layout = &product.weights.layout;
        let (stride, corrections_stride) = (layout.padded(), layout.pieces().len());
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                x: product.x.values.as_ptr().add(row * stride + piece.start),
                stride,
                len: piece.len,
                corrections: product.x.corrections.as_ptr().add(row * corrections_stride + index),
                corrections_stride,
            }
        }
    }

    /// Sums that begin with what takes the weights' shift back; the chains past the first begin with zero.
    ///
    /// # Safety
    /// D's instructions are there; R rows lie inside.
    #[inline(always)]
    unsafe fn begin<D: Dots, const R: usize, const U: usize>(&self) -> [[D; R]; U] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[D::splat(0); R]; U];
            for r in 0..R {
                sums[0][r] = D::splat(*self.corrections.add(r * self.corrections_stride));
            }
            sums
        }
    }

    /// # Safety
    /// D's instructions are there; R rows, and the piece's lines, lie inside.
    #[inline(always)]
    unsafe fn dot_bytes<D: Dots, const R: usize, const U: usize>(&self, lines: *const u8) -> [D; R] {
        // SAFETY: the caller's promise; `len` is a multiple of four, and no step passes it.
        unsafe {
            let mut sums = self.begin::<D, R, U>();
            let mut k = 0;
            while k + 4 * U <= self.len {
                for u in 0..U {
                    let bytes = D::load(lines.add((k + 4 * u) * PANEL));
                    for r in 0..R {
                        sums[u][r] = sums[u][r].dot(bytes, self.x.add(r * self.stride + k + 4 * u));
                    }
                }
                k += 4 * U;
            }
            while k < self.len {
                let bytes = D::load(lines.add(k * PANEL));
                for r in 0..R {
                    sums[0][r] = sums[0][r].dot(bytes, self.x.add(r * self.stride + k));
                }
                k += 4;
            }
            join(sums)
        }
    }

    /// # Safety
    /// D's instructions are there; R rows, and the piece's lines, lie inside.
    #[inline(always)]
    unsafe fn dot_halves<D: Dots, const R: usize, const U: usize>(&self, lines: *const u8) -> [D; R] {
        // SAFETY: the caller's promise; `len` is a multiple of eight.
        unsafe {
            let mut sums = self.begin::<D, R, U>();
            if self.len == GROUP {
                // The usual length, known to the compiler.
                for line in 0..GROUP / 8 {
                    self.add_line::<D, R, U>(&mut sums, lines, line);
                }
            } else {
                for line in 0..self.len / 8 {
                    self.add_line::<D, R, U>(&mut sums, lines, line);
                }
            }
            join(sums)
        }
    }

    /// # Safety
    /// As for `dot_halves`; the line is one of the piece's.
    #[inline(always)]
    unsafe fn add_line<D: Dots, const R: usize, const U: usize>(
        &self,
        sums: &mut [[D; R]; U],
        lines: *const u8,
        line: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = D::load(lines.add(line * 64));
            let (low, high) = (D::low_halves(bytes), D::high_halves(bytes));
            for r in 0..R {
                let x = self.x.add(r * self.stride + 8 * line);
                sums[0][r] = sums[0][r].dot(low, x);
                sums[U / 2][r] = sums[U / 2][r].dot(high, x.add(4));
            }
        }
    }
}

/// Adds the chains.
///
/// # Safety
/// D's instructions are there.
#[inline(always)]
unsafe fn join<D: Dots, const R: usize, const U: usize>(sums: [[D; R]; U]) -> [D; R] {
    let mut joined = sums[0];
    for u in 1..U {
        for r in 0..R {
            // SAFETY: the caller's promise.
            joined[r] = unsafe { joined[r].add(sums[u][r]) };
        }
    }
    joined
}
