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
use crate::cpu::floats::with_rows;
use crate::cpu::lanes::Lanes;
use crate::cpu::lines::{Ahead, Fetch, Line, Share};
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
        let (lines, panel_lines): (*const u8, _) =
            (self.weights.lines.as_ptr().cast(), self.weights.panel_lines());
        let panels = self.columns.start / PANEL..self.columns.end.div_ceil(PANEL);
        let mut panel = panels.start;
        while panel < panels.end {
            let pair = tiles.len() > 1 && D::TILE_ROWS > 4 && panel + 2 <= panels.end && self.is_int8();
            let after = if pair { panel + 2 } else { panel + 1 };
            for tile in 0..tiles.len() {
                let rows = tiles.rows(tile);
                let at = (panel, rows.start);
                // What the next panels have is fetched by all tiles together.
                let next = lines.wrapping_add(after * panel_lines * size_of::<Line>());
                let share = Share::new(next, (after - panel) * panel_lines, (tile, tiles.len()));
                // SAFETY: D's instructions are there; rows and panels lie inside by the assertion.
                unsafe {
                    match tiles.len() {
                        1 => self.tile_of::<D>(at, rows.len(), Ahead { first: lines }),
                        _ if pair => self.pair_of::<D>(at, rows.len(), share),
                        _ => self.tile_of::<D>(at, rows.len(), share),
                    }
                }
            }
            panel = after;
        }
    }
}

impl PackedMatMul<'_> {
    fn is_int8(&self) -> bool {
        matches!(self.weights.scales, Scales::Channel(_))
    }

    /// A tile of so many rows times one panel.
    ///
    /// # Safety
    /// As for `tile`.
    #[inline(always)]
    unsafe fn tile_of<D: Dots>(&self, at: (usize, usize), rows: usize, fetch: impl Fetch) {
        macro_rules! tile {
            // The fewer rows, the more chains it takes to keep the instruction busy.
            (1) => {
                self.tile::<D, 1, 1, 4>(at, fetch)
            };
            (2) => {
                self.tile::<D, 2, 1, 4>(at, fetch)
            };
            (3) => {
                self.tile::<D, 3, 1, 2>(at, fetch)
            };
            (4) => {
                self.tile::<D, 4, 1, 2>(at, fetch)
            };
            (5) => {
                self.tile::<D, 5, 1, 2>(at, fetch)
            };
            (6) => {
                self.tile::<D, 6, 1, 2>(at, fetch)
            };
            ($rows:literal) => {
                self.tile::<D, $rows, 1, 1>(at, fetch)
            };
        }
        // SAFETY: the caller's promise; an arm takes as many rows as there are.
        unsafe { with_rows!(D, rows, tile) }
    }

    /// One of several tiles times two panels of int8: an activation that is loaded serves both.
    ///
    /// # Safety
    /// As for `tile`; tiles have up to twelve rows.
    #[inline(always)]
    unsafe fn pair_of<D: Dots>(&self, at: (usize, usize), rows: usize, fetch: impl Fetch) {
        // SAFETY: the caller's promise; an arm takes as many rows as there are.
        unsafe {
            match rows {
                6 => self.tile::<D, 6, 2, 1>(at, fetch),
                7 => self.tile::<D, 7, 2, 1>(at, fetch),
                8 => self.tile::<D, 8, 2, 1>(at, fetch),
                9 => self.tile::<D, 9, 2, 1>(at, fetch),
                10 => self.tile::<D, 10, 2, 1>(at, fetch),
                11 => self.tile::<D, 11, 2, 1>(at, fetch),
                12 => self.tile::<D, 12, 2, 1>(at, fetch),
                _ => unreachable!("several even tiles of up to twelve rows have six at least"),
            }
        }
    }

    /// R rows times M panels, all slices, written out. U chains of sums for each row hide the latency of the
    /// instruction.
    ///
    /// # Safety
    /// D's instructions are there; R rows from `row` are a tile, and the panels lie inside; M is 1 for int4.
    #[inline(always)]
    unsafe fn tile<D: Dots, const R: usize, const M: usize, const U: usize>(
        &self,
        (panel, row): (usize, usize),
        mut fetch: impl Fetch,
    ) {
        let slices = self.weights.layout.slices().len();
        // SAFETY: the caller's promise.
        unsafe {
            let mut tree = SliceTree::<D::Lanes, R, M>::new();
            let mut joined = [[D::Lanes::splat(0.0); R]; M];
            for slice in 0..slices {
                let sums = self.slice::<D, R, M, U>((panel, row), slice, &mut fetch);
                joined = if slices == NUM_SLICES { tree.join(slice, sums) } else { sums };
            }
            for m in 0..M {
                self.write::<D, R>(panel + m, row, joined[m]);
            }
        }
    }

    /// One slice of R rows, scaled to f32.
    ///
    /// # Safety
    /// As for `tile`; the slice is one of the layout's.
    #[inline(always)]
    unsafe fn slice<D: Dots, const R: usize, const M: usize, const U: usize>(
        &self,
        (panel, row): (usize, usize),
        slice: usize,
        fetch: &mut impl Fetch,
    ) -> [[D::Lanes; R]; M] {
        let layout = &self.weights.layout;
        let pieces = layout.slices()[slice].clone();
        let num_pieces = layout.pieces().len();
        let first_line = panel * self.weights.panel_lines();
        // SAFETY: the caller's promise; group scales are there for every piece of every panel.
        unsafe {
            let mut sums = [[D::Lanes::splat(0.0); R]; M];
            for index in pieces {
                let piece = &layout.pieces()[index];
                let at = PieceAt::new::<R>(self, row, piece, index);
                let line = first_line + piece.start / k_per_line(layout.format());
                match &self.weights.scales {
                    Scales::Channel(_) => {
                        let exact = at.dot_bytes::<D, R, M, U>(line, fetch);
                        for m in 0..M {
                            for r in 0..R {
                                sums[m][r] = exact[m][r].to_f32();
                            }
                        }
                    }
                    Scales::Group(scales) => {
                        let scale: *const bf16 = scales.as_ptr().add((panel * num_pieces + index) * PANEL);
                        let scale = D::Lanes::load_bf16(scale);
                        let exact = at.dot_halves::<D, R, U>(line, fetch);
                        for r in 0..R {
                            sums[0][r] = sums[0][r].fma(exact[r].to_f32(), scale);
                        }
                    }
                }
            }
            let scales = self.x.scales.as_ptr().add(row * layout.slices().len() + slice * R);
            for m in 0..M {
                for r in 0..R {
                    sums[m][r] = sums[m][r].mul(D::Lanes::splat(*scales.add(r)));
                }
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
    panel_bytes: usize,
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
                panel_bytes: product.weights.panel_lines() * size_of::<Line>(),
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
    /// D's instructions are there; the tile has R rows, and the piece's first line in the first of M panels is `line`.
    #[inline(always)]
    unsafe fn dot_bytes<D: Dots, const R: usize, const M: usize, const U: usize>(
        &self,
        line: usize,
        fetch: &mut impl Fetch,
    ) -> [[D; R]; M] {
        // SAFETY: the caller's promise; `len` is a multiple of four, and no step passes it.
        unsafe {
            let mut sums = [self.begin::<D, R, U>(); M];
            let mut k = 0;
            while k + QUAD * FETCHED <= self.len {
                fetch.fetch::<D::Lanes, FETCHED>(line + k / QUAD);
                for u in 0..FETCHED {
                    self.add_quad::<D, R, M, U>(&mut sums, (line, u % U), k + QUAD * u);
                }
                k += QUAD * FETCHED;
            }
            while k < self.len {
                self.add_quad::<D, R, M, U>(&mut sums, (line, 0), k);
                k += QUAD;
            }
            sums.map(|sums| join(sums))
        }
    }

    /// Adds to chain `u` of each row.
    ///
    /// # Safety
    /// As for `dot_bytes`; `k` is a multiple of four below the piece's length.
    #[inline(always)]
    unsafe fn add_quad<D: Dots, const R: usize, const M: usize, const U: usize>(
        &self,
        sums: &mut [[[D; R]; U]; M],
        (first, u): (usize, usize),
        k: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let line = self.lines.add((first + k / QUAD) * size_of::<Line>());
            let mut bytes = [D::load(line); M];
            for m in 1..M {
                bytes[m] = D::load(line.add(m * self.panel_bytes));
            }
            for r in 0..R {
                let x = self.x.add(k * R + QUAD * r);
                for m in 0..M {
                    sums[m][u][r] = sums[m][u][r].dot(bytes[m], x);
                }
            }
        }
    }

    /// # Safety
    /// D's instructions are there; the tile has R rows, and the piece's first line is `line`.
    #[inline(always)]
    unsafe fn dot_halves<D: Dots, const R: usize, const U: usize>(
        &self,
        line: usize,
        fetch: &mut impl Fetch,
    ) -> [D; R] {
        // SAFETY: the caller's promise; `len` is a multiple of eight.
        unsafe {
            let mut sums = self.begin::<D, R, U>();
            if self.len == GROUP {
                // The usual length, known to the compiler.
                fetch.fetch::<D::Lanes, { GROUP / 8 }>(line);
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
