//! Quantized activations times packed weights. Integer sums are exact, so tiles may be of any shape; the order
//! of what is done in f32 is the contract's (C1): pieces of a slice in order, the activations' scale, the
//! tree, the channel's scale, the bias.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::ops::Range;

use half::bf16;

use super::piece_sums::PieceAt;
use super::rows::bytes_per_number;
use super::{DotKernel, Dots, PANEL, PackedMatrix, QuantizedRows, Scales};
use crate::floats::with_rows;
use crate::k_slices::NUM_SLICES;
use crate::lanes::Lanes;
use crate::lines::{Ahead, Fetch, Line, Share, Unaided, reads_row_unaided};
use crate::threads::Shared;
use crate::tiles::SliceTree;

/// Chains of sums for each row, at most.
const MAX_CHAINS: usize = 4;

/// Some columns of a packed matrix, for all rows.
pub(crate) struct PackedMatMul<'a> {
    pub(crate) x: &'a QuantizedRows,
    pub(crate) weights: &'a PackedMatrix,
    /// `[width]`, or nothing.
    pub(crate) bias: Option<&'a [f32]>,
    /// Whole panels, but for the matrix's last. Nobody else writes them meanwhile.
    pub(crate) columns: Range<usize>,
    /// `[rows, width]`.
    pub(crate) out: &'a Shared<'a, f32>,
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
                && self.x.values.len()
                    == tiles.num_rows() * layout.padded() * bytes_per_number(layout.format(), D::WORDS)
                && (0..tiles.len()).all(|tile| tiles.rows(tile).len() <= D::TILE_ROWS),
            "a packed product's operands disagree"
        );
        let (lines, panel_lines): (*const u8, _) =
            (self.weights.lines.as_ptr().cast(), self.weights.panel_lines());
        let panels = self.columns.start / PANEL..self.columns.end.div_ceil(PANEL);
        let wide_row = D::WIDE && tiles.num_rows() == 1 && reads_row_unaided();
        let mut panel = panels.start;
        while panel < panels.end {
            let pair = D::TILE_PANELS == 2 && tiles.len() > 1 && panel + 2 <= panels.end && self.is_int8();
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
                        1 if const { D::WIDE } && wide_row => self.wide_row::<D>(at),
                        1 => self.tile_of::<D>(at, rows.len(), Ahead::new(lines)),
                        _ if pair => self.pair_of::<D>(at, rows.len(), share.side_by_side(2)),
                        _ => self.tile_of::<D>(at, rows.len(), share),
                    }
                }
            }
            panel = after;
        }
    }
}

/// Independent sums per row of a tile if the registers hold `sums` in all: 4, 2 or 1.
const fn chains(rows: usize, sums: usize) -> usize {
    if rows * MAX_CHAINS <= sums {
        MAX_CHAINS
    } else if rows * 2 <= sums {
        2
    } else {
        1
    }
}

impl PackedMatMul<'_> {
    fn is_int8(&self) -> bool {
        matches!(self.weights.scales, Scales::Channel(_))
    }

    /// One row times one panel whose lines are vectors. int4 spends more instructions on a line: it needs lines soon to come
    /// fetched.
    ///
    /// # Safety
    /// As for `tile`.
    #[inline(always)]
    unsafe fn wide_row<D: Dots>(&self, at: (usize, usize)) {
        let lines = self.weights.lines.as_ptr().cast();
        // SAFETY: the caller's promise.
        unsafe {
            match self.is_int8() {
                true => self.tile::<D, 1, 1, MAX_CHAINS>(at, Unaided),
                false => self.tile::<D, 1, 1, MAX_CHAINS>(at, Ahead::in_order(lines)),
            }
        }
    }

    /// A tile of so many rows times one panel.
    ///
    /// # Safety
    /// As for `tile`.
    #[inline(always)]
    unsafe fn tile_of<D: Dots>(&self, at: (usize, usize), rows: usize, fetch: impl Fetch) {
        macro_rules! tile {
            ($rows:literal) => {
                match const { chains($rows, D::SUMS) } {
                    MAX_CHAINS => self.tile::<D, $rows, 1, MAX_CHAINS>(at, fetch),
                    2 => self.tile::<D, $rows, 1, 2>(at, fetch),
                    _ => self.tile::<D, $rows, 1, 1>(at, fetch),
                }
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
                _ if const { D::TILE_PANELS == 1 } => unreachable!("its caller asked before"),
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
                    let at = PieceAt::new::<D, R>(self, (panel, row), (piece, range.start));
                    let exact = at.dot_bytes::<D, _, R, M, U>(piece.len, fetch);
                    for m in 0..M {
                        for r in 0..R {
                            sums[m][r] = exact[m][r].to_f32();
                        }
                    }
                }
                (Scales::Group(scales), [first, ..]) => {
                    let mut at = PieceAt::new::<D, R>(self, (panel, row), (first, range.start));
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
            // SAFETY: channel scales are there for whole panels; the columns of this task are its own, and a whole vector is stored
            // only where as many are left.
            let out = unsafe {
                let mut lanes = joined[r];
                if let Scales::Channel(scales) = &self.weights.scales {
                    lanes = lanes.mul(D::Lanes::load(scales.as_ptr().add(first)));
                }
                let start = (row + r) * width + first;
                let out = self.out.slice_mut(start..start + columns);
                if columns == PANEL {
                    lanes.store(out.as_mut_ptr());
                } else {
                    let mut numbers = [0.0f32; PANEL];
                    lanes.store(numbers.as_mut_ptr());
                    out.copy_from_slice(&numbers[..columns]);
                }
                out
            };
            if let Some(bias) = self.bias {
                for c in 0..columns {
                    out[c] += bias[first + c];
                }
            }
        }
    }
}
