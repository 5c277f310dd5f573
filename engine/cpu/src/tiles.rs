//! Splits rows into tiles that a kernel keeps in registers, and joins the K-slices of a tile. Tiling changes
//! no bit: every row of a tile is summed separately.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::ops::Range;

use super::simd::F32x16;

/// Rows split into tiles of nearly equal size: nine rows in tiles of at most eight are four and five.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tiles {
    rows: usize,
    tiles: usize,
}

impl Tiles {
    pub(super) fn new(rows: usize, max_rows: usize) -> Self {
        Self { rows, tiles: rows.div_ceil(max_rows) }
    }

    pub(super) fn len(self) -> usize {
        self.tiles
    }

    pub(super) fn num_rows(self) -> usize {
        self.rows
    }

    /// Rows of one tile.
    pub(super) fn rows(self, tile: usize) -> Range<usize> {
        tile * self.rows / self.tiles..(tile + 1) * self.rows / self.tiles
    }
}

/// Levels of the tree that joins eight slices.
const LEVELS: usize = 3;

/// The tree of docs/contract.md C2 as a binary counter: a level keeps its left branch until the right one is
/// complete. Keeps N vectors for each of R rows.
pub(super) struct SliceTree<V, const R: usize, const N: usize> {
    pending: [[[V; R]; N]; LEVELS],
}

impl<V: F32x16, const R: usize, const N: usize> SliceTree<V, R, N> {
    /// # Safety
    /// The CPU supports V's instructions.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        // SAFETY: guaranteed by the caller.
        Self { pending: [[[unsafe { V::splat(0.0) }; R]; N]; LEVELS] }
    }

    /// Adds the next slice, number `slice`. The return value after the last slice is the sum of all.
    ///
    /// # Safety
    /// The CPU supports V's instructions.
    #[inline(always)]
    pub(super) unsafe fn join(&mut self, slice: usize, mut sums: [[V; R]; N]) -> [[V; R]; N] {
        let mut level = 0;
        while slice >> level & 1 == 1 {
            for n in 0..N {
                for r in 0..R {
                    // SAFETY: guaranteed by the caller.
                    sums[n][r] = unsafe { self.pending[level][n][r].add(sums[n][r]) };
                }
            }
            level += 1;
        }
        if level < LEVELS {
            self.pending[level] = sums;
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_even_and_cover_all_rows() {
        let split = |rows, max_rows| {
            let tiles = Tiles::new(rows, max_rows);
            (0..tiles.len()).map(|tile| tiles.rows(tile).len()).collect::<Vec<_>>()
        };
        assert_eq!(split(1, 12), [1]);
        assert_eq!(split(12, 12), [12]);
        assert_eq!(split(9, 8), [4, 5]);
        assert_eq!(split(25, 12), [8, 8, 9]);
        assert!(split(0, 12).is_empty());
    }
}
