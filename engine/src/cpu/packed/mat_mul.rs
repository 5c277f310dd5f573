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
/// Numbers of a channel in a line of half bytes.
const HALVES: usize = 2 * QUAD;

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
        let range = layout.slices()[slice].clone();
        let pieces = &layout.pieces()[range.clone()];
        // SAFETY: the caller's promise; group scales are there for every piece of every panel.
        unsafe {
            let mut sums = [[D::Lanes::splat(0.0); R]; M];
            match (&self.weights.scales, pieces) {
                (_, []) => {}
                // A slice is one piece.
                (Scales::Channel(_), [piece, ..]) => {
                    let at = PieceAt::new::<R>(self, (panel, row), (piece, range.start));
                    let exact = at.dot_bytes::<D, R, M, U>(piece.len, fetch);
                    for m in 0..M {
                        for r in 0..R {
                            sums[m][r] = exact[m][r].to_f32();
                        }
                    }
                }
                (Scales::Group(scales), [first, ..]) => {
                    let mut at = PieceAt::new::<R>(self, (panel, row), (first, range.start));
                    let first_scale = (panel * layout.pieces().len() + range.start) * PANEL;
                    let mut scale: *const bf16 = scales.as_ptr().add(first_scale);
                    for piece in pieces {
                        let exact = at.dot_halves::<D, R, U>(piece.len, fetch);
                        let weights = D::Lanes::load_bf16(scale);
                        for r in 0..R {
                            sums[0][r] = sums[0][r].fma(exact[r].to_f32(), weights);
                        }
                        at.pass::<R>(piece.len);
                        scale = scale.wrapping_add(PANEL);
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

/// Where a piece lies: in a panel, and in the activations of a tile. Moved on by pointers, for steps are short.
struct PieceAt {
    /// Its first line in the panel, or in the first of several.
    lines: *const u8,
    /// That line's number among all of the matrix.
    line: usize,
    panel_bytes: usize,
    x: *const i8,
    corrections: *const i32,
}

impl PieceAt {
    /// # Safety
    /// R rows from `row` are a tile; the piece is the layout's `index`-th, and the panel is there.
    #[inline(always)]
    unsafe fn new<const R: usize>(
        product: &PackedMatMul<'_>,
        (panel, row): (usize, usize),
        (piece, index): (&Piece, usize),
    ) -> Self {
        let (weights, layout) = (product.weights, &product.weights.layout);
        let line = panel * weights.panel_lines() + piece.start / k_per_line(layout.format());
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                lines: weights.lines.as_ptr().add(line).cast(),
                line,
                panel_bytes: weights.panel_lines() * size_of::<Line>(),
                x: product.x.values.as_ptr().add(row * layout.padded() + piece.start * R),
                corrections: product.x.corrections.as_ptr().add(row * layout.pieces().len() + index * R),
            }
        }
    }

    /// Moves on behind a piece of int4 of this length.
    #[inline(always)]
    fn pass<const R: usize>(&mut self, len: usize) {
        self.lines = self.lines.wrapping_add(len / HALVES * size_of::<Line>());
        self.line = self.line.wrapping_add(len / HALVES);
        self.x = self.x.wrapping_add(len * R);
        self.corrections = self.corrections.wrapping_add(R);
    }

    /// Sums that begin with what takes the weights' shift back, where they need it; the chains past the first begin with zero.
    ///
    /// # Safety
    /// D's instructions are there; the tile has R rows.
    #[inline(always)]
    unsafe fn begin<D: Dots, const R: usize, const U: usize>(&self, corrected: bool) -> [[D; R]; U] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[D::splat(0); R]; U];
            for r in 0..R {
                if corrected {
                    sums[0][r] = D::splat(*self.corrections.add(r));
                }
            }
            sums
        }
    }

    /// # Safety
    /// D's instructions are there; the tile has R rows, the piece has this length and is in M panels.
    #[inline(always)]
    unsafe fn dot_bytes<D: Dots, const R: usize, const M: usize, const U: usize>(
        &self,
        len: usize,
        fetch: &mut impl Fetch,
    ) -> [[D; R]; M] {
        let (mut quads, mut line, mut lines, mut x) = (len / QUAD, self.line, self.lines, self.x);
        // SAFETY: the caller's promise; `len` is a multiple of four, and no step passes it.
        unsafe {
            let mut sums = [self.begin::<D, R, U>(!D::SIGNED); M];
            while quads >= FETCHED {
                fetch.fetch::<D::Lanes, FETCHED>(line);
                for u in 0..FETCHED {
                    let at = (lines.add(u * size_of::<Line>()), x.add(u * QUAD * R));
                    self.add_quad::<D, R, M, U>(&mut sums, u % U, at);
                }
                quads -= FETCHED;
                line = line.wrapping_add(FETCHED);
                lines = lines.wrapping_add(FETCHED * size_of::<Line>());
                x = x.wrapping_add(FETCHED * QUAD * R);
            }
            for quad in 0..quads {
                let at = (lines.add(quad * size_of::<Line>()), x.add(quad * QUAD * R));
                self.add_quad::<D, R, M, U>(&mut sums, 0, at);
            }
            sums.map(|sums| join(sums))
        }
    }

    /// Adds to chain `u` of each row.
    ///
    /// # Safety
    /// As for `dot_bytes`; the line is one of the piece's, and `x` is what it meets.
    #[inline(always)]
    unsafe fn add_quad<D: Dots, const R: usize, const M: usize, const U: usize>(
        &self,
        sums: &mut [[[D; R]; U]; M],
        u: usize,
        (line, x): (*const u8, *const i8),
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut bytes = [D::whole_bytes(D::load(line)); M];
            for m in 1..M {
                bytes[m] = D::whole_bytes(D::load(line.add(m * self.panel_bytes)));
            }
            for r in 0..R {
                for m in 0..M {
                    sums[m][u][r] = sums[m][u][r].dot(bytes[m], x.add(QUAD * r));
                }
            }
        }
    }

    /// # Safety
    /// D's instructions are there; the tile has R rows, and the piece has this length.
    #[inline(always)]
    unsafe fn dot_halves<D: Dots, const R: usize, const U: usize>(
        &self,
        len: usize,
        fetch: &mut impl Fetch,
    ) -> [D; R] {
        // SAFETY: the caller's promise; `len` is a multiple of eight.
        unsafe {
            let mut sums = self.begin::<D, R, U>(true);
            if len == GROUP {
                // The usual length, known to the compiler.
                fetch.fetch::<D::Lanes, { GROUP / HALVES }>(self.line);
                for index in 0..GROUP / HALVES {
                    self.add_halves::<D, R, U>(&mut sums, index);
                }
            } else {
                for index in 0..len / HALVES {
                    self.add_halves::<D, R, U>(&mut sums, index);
                }
            }
            join(sums)
        }
    }

    /// # Safety
    /// As for `dot_halves`; the piece has so many lines and more.
    #[inline(always)]
    unsafe fn add_halves<D: Dots, const R: usize, const U: usize>(
        &self,
        sums: &mut [[D; R]; U],
        index: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = D::load(self.lines.add(index * size_of::<Line>()));
            let (low, high) = (D::low_halves(bytes), D::high_halves(bytes));
            for r in 0..R {
                let x = self.x.add(HALVES * R * index + QUAD * r);
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
