//! The inner loops of the packed GEMM: exact sums over one piece of K for a tile of rows, accumulated in
//! registers.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::sync::atomic::{Ordering, compiler_fence};

use super::layout::{GROUP, Piece};
use super::mat_mul::PackedMatMul;
use super::rows::{QUAD, bytes_per_number};
use super::{Dots, k_per_line};
use crate::lines::{Line, Prefetch};

/// Lines per prefetch call; upper limit of accumulator chains.
const PREFETCHED_LINES: usize = 4;
/// Lines per prefetch call in the loop that is not unrolled.
const ROLLED_LOOP_LINES: usize = 8;
/// Numbers of one channel in a line of nibbles.
const NIBBLES: usize = 2 * QUAD;
/// Bytes of one word of a row.
const WORD: usize = 4;

/// Location of a piece in a panel and in the activations of a tile. Advanced by pointers, since pieces are
/// short.
pub(super) struct PiecePosition {
    /// Its first line in the panel, or in the first of several panels.
    lines: *const u8,
    /// Index of that line in the whole matrix.
    line: usize,
    panel_bytes: usize,
    x: *const i8,
    corrections: *const i32,
}

impl PiecePosition {
    /// # Safety
    /// R rows from `row` are a tile, packed for D; the piece is the layout's `index`-th, and the panel
    /// exists.
    #[inline(always)]
    pub(super) unsafe fn new<D: Dots, const R: usize>(
        product: &PackedMatMul<'_>,
        (panel, row): (usize, usize),
        (piece, index): (&Piece, usize),
    ) -> Self {
        let (weights, layout) = (product.weights, &product.weights.layout);
        let line = panel * weights.panel_lines() + piece.start / k_per_line(layout.format());
        let bytes = bytes_per_number(layout.format(), D::WORDS);
        // SAFETY: guaranteed by the caller.
        unsafe {
            Self {
                lines: weights.lines.as_ptr().add(line).cast(),
                line,
                panel_bytes: weights.panel_lines() * size_of::<Line>(),
                x: product.x.values.as_ptr().add((row * layout.padded() + piece.start * R) * bytes),
                corrections: product.x.corrections.as_ptr().add(row * layout.pieces().len() + index * R),
            }
        }
    }

    /// Advances past an int4 piece of this length.
    #[inline(always)]
    pub(super) fn pass<const R: usize>(&mut self, len: usize) {
        self.lines = self.lines.wrapping_add(len / NIBBLES * size_of::<Line>());
        self.line = self.line.wrapping_add(len / NIBBLES);
        self.x = self.x.wrapping_add(len * R);
        self.corrections = self.corrections.wrapping_add(R);
    }

    /// Sums of an int8 piece whose numbers are in M panels. The first of the U chains starts from the
    /// correction for the weights' shift, if D needs it, the others from zero.
    ///
    /// # Safety
    /// The CPU supports D's instructions; the tile has R rows, the piece has this length and is in M panels.
    #[inline(always)]
    pub(super) unsafe fn dot_int8<D: Dots, F: Prefetch, const R: usize, const M: usize, const U: usize>(
        &self,
        len: usize,
        prefetch: &mut F,
    ) -> [[D; R]; M] {
        let (mut quads, mut line, mut lines, mut x) = (len / QUAD, self.line, self.lines, self.x);
        let quad_bytes = WORD * D::WORDS * R;
        // SAFETY: guaranteed by the caller; `len` is a multiple of four, and no step goes past it.
        unsafe {
            if const { D::PAIRS && R > 1 && M == 1 } {
                return [self.dot_int8_pairs::<D, F, R>(quads, prefetch); M];
            }
            let mut first = [[D::splat(0); R]; U];
            for r in 0..R {
                if !D::SIGNED {
                    first[0][r] = D::splat(*self.corrections.add(r));
                }
            }
            let mut sums = [first; M];
            if const { D::NO_UNROLL && F::IS_CACHED } {
                // Hidden from the compiler, which would unroll the loop if it knew the count.
                let turn = std::hint::black_box(ROLLED_LOOP_LINES);
                while quads > 0 {
                    prefetch.prefetch::<D::F32x16, ROLLED_LOOP_LINES>(line);
                    let now = quads.min(turn);
                    for _ in 0..now {
                        self.add_quad::<D, R, M, U>(&mut sums, 0, (lines, x));
                        lines = lines.wrapping_add(size_of::<Line>());
                        x = x.wrapping_add(quad_bytes);
                    }
                    quads -= now;
                    line = line.wrapping_add(ROLLED_LOOP_LINES);
                }
            }
            while quads >= PREFETCHED_LINES {
                prefetch.prefetch::<D::F32x16, PREFETCHED_LINES>(line);
                for u in 0..PREFETCHED_LINES {
                    let at = (lines.add(u * size_of::<Line>()), x.add(u * quad_bytes));
                    self.add_quad::<D, R, M, U>(&mut sums, u % U, at);
                }
                quads -= PREFETCHED_LINES;
                line = line.wrapping_add(PREFETCHED_LINES);
                lines = lines.wrapping_add(PREFETCHED_LINES * size_of::<Line>());
                x = x.wrapping_add(PREFETCHED_LINES * quad_bytes);
            }
            if quads > 0 {
                prefetch.prefetch::<D::F32x16, PREFETCHED_LINES>(line);
            }
            for _ in 0..quads {
                self.add_quad::<D, R, M, U>(&mut sums, 0, (lines, x));
                lines = lines.add(size_of::<Line>());
                x = x.add(quad_bytes);
            }
            // Not `map` of an array: its drop on panic is a call that is only inlined by link-time
            // optimisation.
            let mut joined = [first[0]; M];
            for m in 0..M {
                joined[m] = join(sums[m]);
            }
            joined
        }
    }

    /// Sums of `quads` int8 lines in one panel, two rows and two lines at a time. An odd row or line is
    /// processed alone.
    ///
    /// # Safety
    /// As for `dot_int8`; D takes int8 as signed and supports pairs.
    #[inline(always)]
    unsafe fn dot_int8_pairs<D: Dots, F: Prefetch, const R: usize>(
        &self,
        quads: usize,
        prefetch: &mut F,
    ) -> [D; R] {
        const {
            assert!(!D::PAIRS || D::SIGNED && D::WORDS == 1, "pairs start from zero and use words of four i8")
        };
        let (mut lines, mut x) = (self.lines, self.x);
        // SAFETY: guaranteed by the caller; no step goes past the piece.
        unsafe {
            let mut sums = [D::splat(0); R];
            for pair in 0..quads / 2 {
                prefetch.prefetch::<D::F32x16, 2>(self.line.wrapping_add(2 * pair));
                let whole = [D::load_int8(lines, 0), D::load_int8(lines.add(size_of::<Line>()), 0)];
                let words = |r: usize| [x.add(WORD * r), x.add(WORD * (R + r))];
                for r in (0..R - 1).step_by(2) {
                    [sums[r], sums[r + 1]] = D::dot_pair([sums[r], sums[r + 1]], whole, words(r));
                }
                if R % 2 == 1 {
                    let [first, second] = words(R - 1);
                    sums[R - 1] = sums[R - 1].dot(whole[0], first).dot(whole[1], second);
                }
                lines = lines.add(2 * size_of::<Line>());
                x = x.add(2 * WORD * R);
            }
            for r in (0..R - 1).step_by(2) {
                [sums[r], sums[r + 1]] = D::end_pair([sums[r], sums[r + 1]]);
            }
            if quads % 2 == 1 {
                let whole = D::load_int8(lines, 0);
                for r in 0..R {
                    sums[r] = sums[r].dot(whole, x.add(WORD * r));
                }
            }
            sums
        }
    }

    /// Adds the products of one line to chain `u` of each row.
    ///
    /// # Safety
    /// As for `dot_int8`; the line is one of the piece's, and `x` points to its activations.
    #[inline(always)]
    unsafe fn add_quad<D: Dots, const R: usize, const M: usize, const U: usize>(
        &self,
        sums: &mut [[[D; R]; U]; M],
        u: usize,
        (line, x): (*const u8, *const i8),
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            keep_load_order::<D>();
            for word in 0..D::WORDS {
                let mut whole = [D::load_int8(line, word); M];
                for m in 1..M {
                    whole[m] = D::load_int8(line.add(m * self.panel_bytes), word);
                }
                for r in 0..R {
                    for m in 0..M {
                        sums[m][u][r] = sums[m][u][r].dot(whole[m], x.add(WORD * (word * R + r)));
                    }
                }
            }
        }
    }

    /// Sums of an int4 piece.
    ///
    /// # Safety
    /// The CPU supports D's instructions; the tile has R rows, and the piece has this length.
    #[inline(always)]
    pub(super) unsafe fn dot_nibbles<D: Dots, const R: usize, const U: usize>(
        &self,
        len: usize,
        prefetch: &mut impl Prefetch,
    ) -> [D; R] {
        // SAFETY: guaranteed by the caller; `len` is a multiple of eight, and at most a group.
        unsafe {
            let mut sums = [[D::begin_group(0); R]; U];
            for r in 0..R {
                sums[0][r] = D::begin_group(*self.corrections.add(r));
            }
            prefetch.prefetch::<D::F32x16, { GROUP / NIBBLES }>(self.line);
            if len == GROUP {
                // The usual length, as a compile-time constant.
                for index in 0..GROUP / NIBBLES {
                    self.add_nibbles::<D, R, U>(&mut sums, index);
                }
            } else {
                for index in 0..len / NIBBLES {
                    self.add_nibbles::<D, R, U>(&mut sums, index);
                }
            }
            let mut whole = [[D::splat(0); R]; U];
            for u in 0..U {
                for r in 0..R {
                    let correction = if u == 0 { *self.corrections.add(r) } else { 0 };
                    whole[u][r] = D::end_group(sums[u][r], correction);
                }
            }
            join(whole)
        }
    }

    /// # Safety
    /// As for `dot_nibbles`; the piece has more than `index` lines.
    #[inline(always)]
    unsafe fn add_nibbles<D: Dots, const R: usize, const U: usize>(
        &self,
        sums: &mut [[D::GroupSums; R]; U],
        index: usize,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let line = self.lines.add(index * size_of::<Line>());
            let x = self.x.add(NIBBLES * R * index);
            for (u, high, x) in [(0, false, x), (U / 2, true, x.add(QUAD * R))] {
                keep_load_order::<D>();
                let nibbles = D::load_nibbles(line, high);
                for r in 0..R {
                    sums[u][r] = D::dot_nibbles(sums[u][r], nibbles, x.add(WORD * r));
                }
            }
        }
    }
}

/// If registers are scarce, keeps loads after this point from being moved before it.
#[inline(always)]
fn keep_load_order<D: Dots>() {
    if D::KEEPS_LOAD_ORDER {
        compiler_fence(Ordering::SeqCst);
    }
}

/// Adds up the chains.
///
/// # Safety
/// The CPU supports D's instructions.
#[inline(always)]
unsafe fn join<D: Dots, const R: usize, const U: usize>(sums: [[D; R]; U]) -> [D; R] {
    let mut joined = sums[0];
    for u in 1..U {
        for r in 0..R {
            // SAFETY: guaranteed by the caller.
            joined[r] = unsafe { joined[r].add(sums[u][r]) };
        }
    }
    joined
}
