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
use super::rows::QUAD;
use super::{DotKernel, Dots, PANEL, PackedMatrix, QuantizedRows, Scales, k_per_line};
use crate::cpu::lanes::Lanes;
use crate::cpu::lines::fetch_ahead;
use crate::cpu::threads::Shared;
use crate::cpu::tiles::SliceTree;
use crate::k_slices::NUM_SLICES;

/// Lines for which what comes later is fetched at a time; as many chains of sums at most.
const FETCHED: usize = 4;

/// Some columns of a packed matrix, for all rows.
pub(in crate::cpu) struct PackedMatMul<'a> {
    pub(in crate::cpu) x: &'a QuantizedRows,
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
        let tiles = self.x.tiles;
        assert!(
            self.columns.start.is_multiple_of(PANEL)
                && self.columns.end <= self.weights.width
                && self.weights.lines.len() == self.weights.panels() * self.weights.panel_lines()
                && self.x.values.len() == tiles.num_rows() * layout.padded()
                && (0..tiles.len()).all(|tile| tiles.rows(tile).len() <= D::TILE_ROWS),
            "a packed product's operands disagree"
        );
        for panel in self.columns.start / PANEL..self.columns.end.div_ceil(PANEL) {
            for tile in 0..tiles.len() {
                let rows = tiles.rows(tile);
                let at = (panel, rows.start);
                // SAFETY: D's instructions are there; rows and panel lie inside by the assertion, and an arm takes as
                // many rows as there are.
                unsafe {
                    match rows.len() {
                        1 => self.tile::<D, 1, 4>(at),
                        2 => self.tile::<D, 2, 4>(at),
                        3 => self.tile::<D, 3, 2>(at),
                        4 => self.tile::<D, 4, 2>(at),
                        5 if D::TILE_ROWS > 4 => self.tile::<D, 5, 2>(at),
                        6 if D::TILE_ROWS > 4 => self.tile::<D, 6, 2>(at),
                        7 if D::TILE_ROWS > 4 => self.tile::<D, 7, 1>(at),
                        8 if D::TILE_ROWS > 4 => self.tile::<D, 8, 1>(at),
                        9 if D::TILE_ROWS > 4 => self.tile::<D, 9, 1>(at),
                        10 if D::TILE_ROWS > 4 => self.tile::<D, 10, 1>(at),
                        11 if D::TILE_ROWS > 4 => self.tile::<D, 11, 1>(at),
                        12 if D::TILE_ROWS > 4 => self.tile::<D, 12, 1>(at),
                        _ => unreachable!(
                            "a tile has at most D::TILE_ROWS rows, and no D has more than twelve"
                        ),
                    }
                }
            }
        }
    }
}

impl PackedMatMul<'_> {
    /// R rows times one panel, all slices, written out. U chains of sums for each row hide the latency of the
    /// instruction.
    ///
    /// # Safety
    /// D's instructions are there; R rows from `row` are a tile, and the panel lies inside.
    #[inline(always)]
    unsafe fn tile<D: Dots, const R: usize, const U: usize>(&self, (panel, row): (usize, usize)) {
        let slices = self.weights.layout.slices().len();
        // SAFETY: the caller's promise.
        unsafe {
            let mut tree = SliceTree::<D::Lanes, R, 1>::new();
            let mut joined = [[D::Lanes::splat(0.0); R]];
            for slice in 0..slices {
                let sums = [self.slice::<D, R, U>(panel, row, slice)];
                joined = if slices == NUM_SLICES { tree.join(slice, sums) } else { sums };
            }
            self.write::<D, R>(panel, row, joined[0]);
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
            let mut sums = [D::Lanes::splat(0.0); R];
            for index in pieces {
                let piece = &layout.pieces()[index];
                let at = PieceAt::new::<R>(self, row, piece, index);
                let line = panel * self.weights.panel_lines() + piece.start / k_per_line(layout.format());
                match &self.weights.scales {
                    Scales::Channel(_) => {
                        let exact = at.dot_bytes::<D, R, U>(line);
                        for r in 0..R {
                            sums[r] = exact[r].to_f32();
                        }
                    }
                    Scales::Group(scales) => {
                        let scale: *const bf16 = scales.as_ptr().add((panel * num_pieces + index) * PANEL);
                        let scale = D::Lanes::load_bf16(scale);
                        let exact = at.dot_halves::<D, R, U>(line);
                        for r in 0..R {
                            sums[r] = sums[r].fma(exact[r].to_f32(), scale);
                        }
                    }
                }
            }
            let scales = self.x.scales.as_ptr().add(row * layout.slices().len() + slice * R);
            for r in 0..R {
                sums[r] = sums[r].mul(D::Lanes::splat(*scales.add(r)));
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

/// The activations of a piece, those of a tile.
struct PieceAt {
    /// All lines of the matrix.
    lines: *const u8,
    x: *const i8,
    len: usize,
    corrections: *const i32,
}

impl PieceAt {
    /// # Safety
    /// R rows from `row` are a tile; the piece is the layout's `index`-th.
    #[inline(always)]
    unsafe fn new<const R: usize>(
        product: &PackedMatMul<'_>,
        row: usize,
        piece: &Piece,
        index: usize,
    ) -> Self {
        let layout = &product.weights.layout;
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                lines: product.weights.lines.as_ptr().cast(),
                x: product.x.values.as_ptr().add(row * layout.padded() + piece.start * R),
                len: piece.len,
                corrections: product.x.corrections.as_ptr().add(row * layout.pieces().len() + index * R),
            }
        }
    }

    /// Sums that begin with what takes the weights' shift back; the chains past the first begin with zero.
    ///
    /// # Safety
    /// D's instructions are there; the tile has R rows.
    #[inline(always)]
    unsafe fn begin<D: Dots, const R: usize, const U: usize>(&self) -> [[D; R]; U] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[D::splat(0); R]; U];
            for r in 0..R {
                sums[0][r] = D::splat(*self.corrections.add(r));
            }
            sums
        }
    }

    /// # Safety
    /// D's instructions are there; the tile has R rows, and the piece's first line is `line`.
    #[inline(always)]
    unsafe fn dot_bytes<D: Dots, const R: usize, const U: usize>(&self, line: usize) -> [D; R] {
        // SAFETY: the caller's promise; `len` is a multiple of four, and no step passes it.
        unsafe {
            let mut sums = self.begin::<D, R, U>();
            let mut k = 0;
            while k + QUAD * FETCHED <= self.len {
                fetch_ahead::<D::Lanes, FETCHED>(self.lines, line + k / QUAD);
                for u in 0..FETCHED {
                    self.add_quad::<D, R>(&mut sums[u % U], line, k + QUAD * u);
                }
                k += QUAD * FETCHED;
            }
            while k < self.len {
                self.add_quad::<D, R>(&mut sums[0], line, k);
                k += QUAD;
            }
            join(sums)
        }
    }

    /// # Safety
    /// As for `dot_bytes`; `k` is a multiple of four below the piece's length.
    #[inline(always)]
    unsafe fn add_quad<D: Dots, const R: usize>(&self, sums: &mut [D; R], first: usize, k: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = D::load(self.lines.add((first + k / QUAD) * 64));
            for r in 0..R {
                sums[r] = sums[r].dot(bytes, self.x.add(k * R + QUAD * r));
            }
        }
    }

    /// # Safety
    /// D's instructions are there; the tile has R rows, and the piece's first line is `line`.
    #[inline(always)]
    unsafe fn dot_halves<D: Dots, const R: usize, const U: usize>(&self, line: usize) -> [D; R] {
        // SAFETY: the caller's promise; `len` is a multiple of eight.
        unsafe {
            let mut sums = self.begin::<D, R, U>();
            if self.len == GROUP {
                // The usual length, known to the compiler.
                fetch_ahead::<D::Lanes, { GROUP / 8 }>(self.lines, line);
                for index in 0..GROUP / 8 {
                    self.add_line::<D, R, U>(&mut sums, line, index);
                }
            } else {
                for index in 0..self.len / 8 {
                    self.add_line::<D, R, U>(&mut sums, line, index);
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
        first: usize,
        index: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = D::load(self.lines.add((first + index) * 64));
            let (low, high) = (D::low_halves(bytes), D::high_halves(bytes));
            for r in 0..R {
                let x = self.x.add(2 * QUAD * R * index + QUAD * r);
                sums[0][r] = sums[0][r].dot(low, x);
                sums[U / 2][r] = sums[U / 2][r].dot(high, x.add(QUAD * R));
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
