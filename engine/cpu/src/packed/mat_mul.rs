//! GEMM of quantized activations with packed weights. Integer sums are exact, so tiles may have any shape.
//! The order of f32 operations is that of the contract (C1): pieces of a slice in order, the activations'
//! scale, the tree, the channel's scale, the bias.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::ops::Range;

use half::bf16;

use super::piece_sums::PiecePosition;
use super::rows::bytes_per_number;
use super::{DotKernel, Dots, PANEL, PackedMatrix, QuantizedRows, Scales};
use crate::floats::with_rows;
use crate::k_slices::NUM_SLICES;
use crate::lines::{
    HardwarePrefetch, Line, Prefetch, StreamPrefetch, TilePrefetch, prefers_hardware_prefetch,
};
use crate::product::OutputColumns;
use crate::simd::F32x16;
use crate::tiles::SliceTree;

/// Maximum accumulator chains per row.
const MAX_CHAINS: usize = 4;

/// Kernel for a range of columns of a packed matrix, for all rows.
pub(crate) struct PackedMatMul<'a> {
    pub(crate) x: &'a QuantizedRows,
    pub(crate) weights: &'a PackedMatrix,
    /// `[width]`, if there is a bias.
    pub(crate) bias: Option<&'a [f32]>,
    /// Whole panels, except at the matrix's end. No other thread writes these columns meanwhile.
    pub(crate) columns: Range<usize>,
    /// Receives these columns.
    pub(crate) out: OutputColumns<'a>,
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
            "operands of a packed GEMM have inconsistent shapes"
        );
        let panels = self.columns.start / PANEL..self.columns.end.div_ceil(PANEL);
        // SAFETY: the CPU supports D's instructions; rows and panels lie inside by the assertion.
        unsafe {
            match tiles.len() {
                0 => {}
                1 => self.multiply_tile::<D>(panels, tiles.num_rows()),
                _ => self.multiply_tiles::<D>(panels),
            }
        }
    }
}

/// Accumulator chains per row of a tile if registers hold `sums` accumulators in total: 4, 2 or 1.
const fn chains(rows: usize, sums: usize) -> usize {
    if rows * MAX_CHAINS <= sums {
        MAX_CHAINS
    } else if rows * 2 <= sums {
        2
    } else {
        1
    }
}

/// Kernel for a single tile of R rows, with some panels.
struct SingleTileKernel<'a, const R: usize> {
    product: &'a PackedMatMul<'a>,
    panels: Range<usize>,
}

impl<const R: usize> DotKernel for SingleTileKernel<'_, R> {
    #[inline(always)]
    unsafe fn run<D: Dots>(self) {
        let prefetch = StreamPrefetch::new(self.product.lines());
        for panel in self.panels {
            // SAFETY: this function's contract guarantees D's instructions; it is created for a tile of R
            // rows and panels that exist.
            unsafe { self.product.run_tile::<D, R, 1>((panel, 0), prefetch) };
        }
    }
}

/// Kernel for all tiles that have R rows, with M panels.
struct MultiTileKernel<'a, const R: usize, const M: usize> {
    product: &'a PackedMatMul<'a>,
    /// The first panel.
    panel: usize,
}

impl<const R: usize, const M: usize> DotKernel for MultiTileKernel<'_, R, M> {
    #[inline(always)]
    unsafe fn run<D: Dots>(self) {
        let Self { product, panel } = self;
        let (tiles, panel_lines) = (product.x.tiles, product.weights.panel_lines());
        let next = product.lines().wrapping_add((panel + M) * panel_lines * size_of::<Line>());
        for tile in 0..tiles.len() {
            let rows = tiles.rows(tile);
            if rows.len() == R {
                // All tiles together prefetch the next panels.
                let share = TilePrefetch::new(next, M * panel_lines, (tile, tiles.len()), panel_lines);
                // SAFETY: this function's contract guarantees D's instructions; it is created for panels that
                // exist.
                unsafe { product.run_tile::<D, R, M>((panel, rows.start), share) };
            }
        }
    }
}

impl PackedMatMul<'_> {
    fn is_int8(&self) -> bool {
        matches!(self.weights.scales, Scales::Channel(_))
    }

    fn lines(&self) -> *const u8 {
        self.weights.lines.as_ptr().cast()
    }

    /// Multiplies when all rows are one tile.
    ///
    /// # Safety
    /// The CPU supports D's instructions, and the panels are the matrix's.
    #[inline(always)]
    unsafe fn multiply_tile<D: Dots>(&self, panels: Range<usize>, rows: usize) {
        macro_rules! panels {
            ($rows:literal) => {
                D::run_outlined(SingleTileKernel::<$rows> { product: self, panels })
            };
        }
        // SAFETY: guaranteed by the caller; an arm takes exactly the number of rows.
        unsafe {
            if const { D::WIDE } && rows == 1 && prefers_hardware_prefetch() {
                panels.for_each(|panel| self.run_single_row::<D>((panel, 0)));
            } else {
                with_rows!(D, rows, panels);
            }
        }
    }

    /// Multiplies one row with one panel when a line is one vector. int4 takes more instructions per line and
    /// needs a prefetch of the lines ahead.
    ///
    /// # Safety
    /// As for `tile`.
    #[inline(always)]
    unsafe fn run_single_row<D: Dots>(&self, at: (usize, usize)) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.is_int8() {
                true => self.run_tile::<D, 1, 1>(at, HardwarePrefetch),
                false => self.run_tile::<D, 1, 1>(at, StreamPrefetch::without_windows(self.lines())),
            }
        }
    }

    /// Multiplies each panel with all tiles before the next panel; two int8 panels at a time if that is
    /// faster.
    ///
    /// # Safety
    /// As for `multiply_tile`.
    #[inline(always)]
    unsafe fn multiply_tiles<D: Dots>(&self, panels: Range<usize>) {
        let tiles = self.x.tiles;
        // Tile sizes differ by one row at most.
        let rows = tiles.num_rows() / tiles.len()..=tiles.num_rows().div_ceil(tiles.len());
        let mut panel = panels.start;
        while panel < panels.end {
            let pair = D::TILE_PANELS == 2 && panel + 2 <= panels.end && self.is_int8();
            macro_rules! tiles {
                ($rows:literal) => {
                    D::run_outlined(MultiTileKernel::<$rows, 1> { product: self, panel })
                };
            }
            for rows in rows.clone() {
                // SAFETY: guaranteed by the caller; an arm takes exactly the number of rows.
                unsafe {
                    match pair {
                        true => self.run_panel_pair::<D>(panel, rows),
                        false => with_rows!(D, rows, tiles),
                    }
                }
            }
            panel += if pair { 2 } else { 1 };
        }
    }

    /// Multiplies the tiles of `rows` rows with two int8 panels: a loaded activation serves both.
    ///
    /// # Safety
    /// As for `multiply_tile`; tiles have up to twelve rows.
    #[inline(always)]
    unsafe fn run_panel_pair<D: Dots>(&self, panel: usize, rows: usize) {
        macro_rules! pair {
            ($rows:literal) => {
                D::run_outlined(MultiTileKernel::<$rows, 2> { product: self, panel })
            };
        }
        // SAFETY: guaranteed by the caller; an arm takes exactly the number of rows.
        unsafe {
            match rows {
                _ if const { D::TILE_PANELS == 1 } => unreachable!("the caller checked TILE_PANELS"),
                6 => pair!(6),
                7 => pair!(7),
                8 => pair!(8),
                9 => pair!(9),
                10 => pair!(10),
                11 => pair!(11),
                12 => pair!(12),
                _ => unreachable!("several equal tiles of at most twelve rows have at least six"),
            }
        }
    }

    /// Multiplies R rows with M panels, with as many accumulator chains per row as fit in registers.
    ///
    /// # Safety
    /// As for `tile`.
    #[inline(always)]
    unsafe fn run_tile<D: Dots, const R: usize, const M: usize>(
        &self,
        at: (usize, usize),
        prefetch: impl Prefetch,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match const { chains(R * M, D::ACCUMULATORS) } {
                MAX_CHAINS => self.tile::<D, R, M, MAX_CHAINS>(at, prefetch),
                2 => self.tile::<D, R, M, 2>(at, prefetch),
                _ => self.tile::<D, R, M, 1>(at, prefetch),
            }
        }
    }

    /// Multiplies R rows with M panels over all slices and writes the results. U accumulator chains per row
    /// hide the latency of the instruction.
    ///
    /// # Safety
    /// The CPU supports D's instructions; R rows from `row` are a tile, and the panels exist; M is 1 for
    /// int4.
    #[inline(always)]
    unsafe fn tile<D: Dots, const R: usize, const M: usize, const U: usize>(
        &self,
        (panel, row): (usize, usize),
        mut prefetch: impl Prefetch,
    ) {
        let slices = self.weights.layout.slices().len();
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut tree = SliceTree::<D::F32x16, R, M>::new();
            let mut joined = [[D::F32x16::splat(0.0); R]; M];
            for slice in 0..slices {
                let sums = self.slice::<D, R, M, U>((panel, row), slice, &mut prefetch);
                joined = if slices == NUM_SLICES { tree.join(slice, sums) } else { sums };
            }
            for m in 0..M {
                self.write::<D, R>(panel + m, row, joined[m]);
            }
        }
    }

    /// Multiplies one slice of R rows, scaled to f32.
    ///
    /// # Safety
    /// As for `tile`; the slice is one of the layout's.
    #[inline(always)]
    unsafe fn slice<D: Dots, const R: usize, const M: usize, const U: usize>(
        &self,
        (panel, row): (usize, usize),
        slice: usize,
        prefetch: &mut impl Prefetch,
    ) -> [[D::F32x16; R]; M] {
        let layout = &self.weights.layout;
        let range = layout.slices()[slice].clone();
        let pieces = &layout.pieces()[range.clone()];
        // SAFETY: guaranteed by the caller; every piece of every panel has group scales.
        unsafe {
            let mut sums = [[D::F32x16::splat(0.0); R]; M];
            match (&self.weights.scales, pieces) {
                (_, []) => {}
                // In int8 a slice is one piece.
                (Scales::Channel(_), [piece, ..]) => {
                    let at = PiecePosition::new::<D, R>(self, (panel, row), (piece, range.start));
                    let exact = at.dot_int8::<D, _, R, M, U>(piece.len, prefetch);
                    for m in 0..M {
                        for r in 0..R {
                            sums[m][r] = exact[m][r].to_f32();
                        }
                    }
                }
                (Scales::Group(scales), [first, ..]) => {
                    let mut at = PiecePosition::new::<D, R>(self, (panel, row), (first, range.start));
                    let first_scale = (panel * layout.pieces().len() + range.start) * PANEL;
                    let mut scale: *const bf16 = scales.as_ptr().add(first_scale);
                    for piece in pieces {
                        let exact = at.dot_nibbles::<D, R, U>(piece.len, prefetch);
                        let weights = D::F32x16::load_bf16(scale);
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
                    sums[m][r] = sums[m][r].mul(D::F32x16::splat(*scales.add(r)));
                }
            }
            sums
        }
    }

    /// # Safety
    /// As for `tile`.
    #[inline(always)]
    unsafe fn write<D: Dots, const R: usize>(&self, panel: usize, row: usize, joined: [D::F32x16; R]) {
        let first = panel * PANEL;
        let width = self.weights.width;
        let columns = PANEL.min(width - first);
        for r in 0..R {
            // SAFETY: channel scales exist for whole panels; no other task writes these columns, and a whole
            // vector is stored only if a whole panel of columns is left.
            let out = unsafe {
                let mut lanes = joined[r];
                if let Scales::Channel(scales) = &self.weights.scales {
                    lanes = lanes.mul(D::F32x16::load(scales.as_ptr().add(first)));
                }
                let out = self.out.slice_mut(row + r, first - self.columns.start, columns);
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
