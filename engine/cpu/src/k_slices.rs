//! Splits a sum over K where tensor parallelism may split it (docs/contract.md C2), so that 1, 2, 4 and 8
//! ranks add the same numbers in the same order. Pure arithmetic on ranges; it must never depend on the batch
//! or on the thread count.

use std::ops::Range;

/// Number of slices of a sum that may be split over ranks.
pub const NUM_SLICES: usize = 8;
/// Columns of a block of weights with one scale, where scales are by block.
pub const SCALE_BLOCK: usize = 128;

/// Columns that are summed as one chain: a slice, or its part in one block of scales.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Columns, counted from the first slice's first one.
    pub k: Range<usize>,
    /// Number of the slice.
    pub slice: usize,
    /// Block of scales, counted from that of the first slice's first column. 0 where scales are not by block.
    pub block: usize,
    /// Whether the slice ends here.
    pub ends_slice: bool,
}

/// Ranges of K that are summed separately before the tree joins them: one, or [`NUM_SLICES`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KSlices(Vec<Range<usize>>);

impl KSlices {
    /// A single slice, for a sum that is never split over ranks.
    #[expect(clippy::single_range_in_vec_init, reason = "one slice is a list of one range, not its elements")]
    pub fn whole(k: usize) -> Self {
        Self(vec![0..k])
    }

    /// Eight slices of whole units; slice s holds units [floor(s n / 8), floor((s + 1) n / 8)) and may be
    /// empty. The last unit may be short.
    pub fn eighths(k: usize, unit: usize) -> Self {
        let units = k.div_ceil(unit);
        let boundary = |s: usize| (s * units / NUM_SLICES * unit).min(k);
        Self((0..NUM_SLICES).map(|s| boundary(s)..boundary(s + 1)).collect())
    }

    /// The ranges, in order: one, or [`NUM_SLICES`] of which some may be empty.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.0
    }

    /// Start of the first range; not 0 only in a rank's part.
    pub fn start(&self) -> usize {
        self.0.first().map_or(0, |slice| slice.start)
    }

    /// End of the last range.
    pub fn end(&self) -> usize {
        self.0.last().map_or(0, |slice| slice.end)
    }

    /// Keeps the slices that a rank owns and empties the others. A kernel that sums all eight then adds zeros
    /// to the rank's branch of the tree, which does not change it.
    pub fn owned(&self, owned: Range<usize>) -> Self {
        let (start, end) = (self.0[owned.start].start, self.0[owned.end - 1].end);
        let slice = |s: usize| match s {
            s if s < owned.start => start..start,
            s if s < owned.end => self.0[s].clone(),
            _ => end..end,
        };
        Self((0..self.0.len()).map(slice).collect())
    }

    /// Each slice as one chain; the first slice starts at 0.
    pub(crate) fn chains(&self) -> Vec<Chain> {
        let chain =
            |(slice, k): (usize, &Range<usize>)| Chain { k: k.clone(), slice, block: 0, ends_slice: true };
        self.0.iter().enumerate().map(chain).collect()
    }

    /// The slices, cut at multiples of [`SCALE_BLOCK`]. A slice without columns is a chain without columns.
    pub fn chains_by_block(&self) -> Vec<Chain> {
        let (start, first_block) = (self.start(), self.start() / SCALE_BLOCK);
        let mut chains = Vec::new();
        for (slice, columns) in self.0.iter().enumerate() {
            let mut at = columns.start;
            loop {
                let end = columns.end.min((at / SCALE_BLOCK + 1) * SCALE_BLOCK);
                let (k, block) = (at - start..end - start, at / SCALE_BLOCK - first_block);
                chains.push(Chain { k, slice, block, ends_slice: end == columns.end });
                at = end;
                if at == columns.end {
                    break;
                }
            }
        }
        chains
    }

    /// Number of blocks of scales that the columns touch.
    pub fn num_blocks(&self) -> usize {
        self.end().div_ceil(SCALE_BLOCK) - self.start() / SCALE_BLOCK
    }

    /// The same slices, shifted so that the first one starts at 0.
    pub fn rebased(&self) -> Self {
        let start = self.start();
        Self(self.0.iter().map(|slice| slice.start - start..slice.end - start).collect())
    }
}

/// Joins the sums of eight slices: ((s0+s1)+(s2+s3))+((s4+s5)+(s6+s7)).
#[inline(always)]
pub fn tree_sum(s: [f32; NUM_SLICES]) -> f32 {
    ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boundaries(k: usize, unit: usize) -> Vec<usize> {
        KSlices::eighths(k, unit).ranges().iter().map(|r| r.end).collect()
    }

    #[test]
    fn the_tree_joins_neighbours_first() {
        // 2^26 swallows a lone 1: any other order of these gives 1 or 2.
        let big = 67_108_864.0;
        assert_eq!(tree_sum([big, 1.0, -big, 1.0, 0.0, 0.0, 0.0, 0.0]), 0.0);
        assert_eq!(tree_sum([0.0, 0.0, 0.0, 0.0, big, 1.0, -big, 1.0]), 0.0);
        assert_eq!(tree_sum([big, 0.0, 1.0, 0.0, -big, 0.0, 1.0, 0.0]), 0.0);
    }

    #[test]
    fn owned_keeps_only_the_slices_of_a_rank() {
        let slices = KSlices::eighths(704, 32);
        let second = slices.owned(4..8);
        assert_eq!((second.start(), second.end()), (352, 704));
        assert_eq!(second.ranges()[3..6], [352..352, 352..416, 416..512]);
        assert_eq!(second.rebased().ranges()[3..6], [0..0, 0..64, 64..160]);
        let first = slices.owned(0..1);
        assert_eq!(first.ranges()[..3], [0..64, 64..64, 64..64]);
    }

    /// Parts of a block in two slices are two chains with the same scale, also where two ranks share the block.
    #[test]
    fn chains_end_where_a_slice_or_a_block_ends() {
        let ends = |slices: &KSlices| -> Vec<(usize, usize, usize, bool)> {
            let of = |chain: Chain| (chain.k.end, chain.slice, chain.block, chain.ends_slice);
            slices.chains_by_block().into_iter().map(of).collect()
        };
        assert_eq!(ends(&KSlices::whole(300)), [(128, 0, 0, false), (256, 0, 1, false), (300, 0, 2, true)]);
        let slices = KSlices::eighths(704, 32);
        let all = ends(&slices);
        assert_eq!(all[..4], [(64, 0, 0, true), (128, 1, 0, false), (160, 1, 1, true), (256, 2, 1, true)]);
        // The second of two ranks begins in the middle of a block.
        let second = slices.owned(4..8);
        assert_eq!((second.start(), second.num_blocks()), (352, 4));
        let of_rank = ends(&second);
        assert_eq!(of_rank[..4], [(0, 0, 0, true), (0, 1, 0, true), (0, 2, 0, true), (0, 3, 0, true)]);
        assert_eq!(of_rank[4..6], [(32, 4, 0, false), (64, 4, 1, true)]);
        assert_eq!(all.iter().filter(|chain| chain.1 >= 4).count(), of_rank.len() - 4);
        assert_eq!(slices.chains().iter().map(|chain| chain.k.end).collect::<Vec<_>>(), boundaries(704, 32));
    }

    #[test]
    fn slices_hold_whole_units_and_cover_k() {
        // 8 heads of 32: one per slice.
        assert_eq!(boundaries(256, 32), [32, 64, 96, 128, 160, 192, 224, 256]);
        // 22 blocks of 32.
        assert_eq!(boundaries(704, 32), [64, 160, 256, 352, 416, 512, 608, 704]);
        // 4 heads: every other slice is empty.
        assert_eq!(boundaries(64, 16), [0, 16, 16, 32, 32, 48, 48, 64]);
        // The last block is short.
        assert_eq!(boundaries(40, 32), [0, 0, 0, 32, 32, 32, 32, 40]);
    }
}
