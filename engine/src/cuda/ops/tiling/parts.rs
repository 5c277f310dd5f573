//! Which partial results a tile's blocks write: chosen by the time that each choice would take. It does not
//! affect numerics.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::work::run_len;
use super::{AttentionTile, GROUP_SPLITS, Limits, PANELS, SPLIT_KEYS, WIDE_QUERIES};

/// Keys of a block.
const BLOCK_KEYS: usize = 16;
/// Time of a block of 16 keys, where that of a partial result of a query, written and merged, is 1: partial
/// results of a split take as long as its keys in tiles of 64 queries. An estimate from run 3
/// (docs/gpu-runs/3-profile.txt): 7.8 ns of an H200 a block, with 1.7 times as many instructions, 0.3 ns to merge
/// a partial result, and as much is assumed to write it.
const BLOCK_TIME: usize = WIDE_QUERIES * BLOCK_KEYS / SPLIT_KEYS;
/// With more blocks than this for each one that runs at once, their times are taken to add up evenly.
const EVEN_TURNS: usize = 8;

/// Keys of a partial result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PartSize {
    /// All keys of the tile: a block processes them, and no other one has a part in its rows.
    All,
    /// A group of splits.
    Group,
    /// One split.
    Split,
}

impl PartSize {
    /// Its splits, as `attention.cuh` counts them.
    pub(super) fn num_splits(self) -> u32 {
        match self {
            Self::All => 0,
            Self::Group => GROUP_SPLITS as u32,
            Self::Split => 1,
        }
    }

    /// The same in tiles of this width: warpgroups fold all splits of a group.
    pub(super) fn of_width(self, width: usize) -> Self {
        if width == PANELS && self == Self::Split { Self::Group } else { self }
    }
}

/// Returns what takes least time for all these tiles, which are of one width.
pub(super) fn fastest<'a, I>(tiles: impl Fn() -> I, width: usize, limits: Limits) -> PartSize
where
    I: Iterator<Item = &'a AttentionTile> + Clone,
{
    let run = run_len(tiles().map(|tile| tile.splits().len()).sum(), limits.min_runs);
    let time = |size: PartSize| {
        let of_tile = |tile| match size {
            PartSize::All => TileBlocks { tile, splits: tile.splits().end, has_part_of_each: false },
            PartSize::Group => TileBlocks { tile, splits: GROUP_SPLITS, has_part_of_each: false },
            PartSize::Split => TileBlocks { tile, splits: run, has_part_of_each: true },
        };
        total_time(tiles().map(of_tile), limits.running[width])
    };
    let sizes = [PartSize::All, PartSize::Group, PartSize::Split].map(|size| size.of_width(width));
    sizes.into_iter().min_by_key(|&size| time(size)).unwrap_or(PartSize::Split)
}

/// A tile's blocks: each processes up to `splits` splits from a multiple of that on.
#[derive(Clone, Copy)]
struct TileBlocks<'a> {
    tile: &'a AttentionTile,
    splits: usize,
    /// Whether a block writes a partial result of each split, or one.
    has_part_of_each: bool,
}

impl TileBlocks<'_> {
    fn range(&self) -> Range<usize> {
        let keys = self.splits * SPLIT_KEYS;
        self.tile.first_key as usize / keys..(self.tile.end_key as usize).div_ceil(keys)
    }

    /// Time of these of the blocks, together.
    fn time(&self, blocks: Range<usize>) -> usize {
        let keys = self.splits * SPLIT_KEYS;
        let first = (self.tile.first_key as usize).max(blocks.start * keys);
        let end = (self.tile.end_key as usize).min(blocks.end * keys);
        let splits = end.div_ceil(SPLIT_KEYS) - first / SPLIT_KEYS;
        let parts = if self.has_part_of_each { splits } else { blocks.len() };
        (end.div_ceil(BLOCK_KEYS) - first / BLOCK_KEYS) * BLOCK_TIME + parts * self.tile.num_queries as usize
    }
}

/// Time of blocks of which `running` run at once, if the longest begin first.
fn total_time<'a>(tiles: impl Iterator<Item = TileBlocks<'a>> + Clone, running: usize) -> usize {
    if tiles.clone().map(|tile| tile.range().len()).sum::<usize>() / EVEN_TURNS >= running {
        return tiles.map(|tile| tile.time(tile.range())).sum::<usize>().div_ceil(running);
    }
    let times = tiles.flat_map(|tile| tile.range().map(move |block| tile.time(block..block + 1)));
    in_turns(times.collect(), running)
}

/// See [`total_time`].
fn in_turns(mut blocks: Vec<usize>, running: usize) -> usize {
    blocks.sort_unstable_by_key(|&time| Reverse(time));
    let mut ends: BinaryHeap<Reverse<usize>> = BinaryHeap::new();
    for time in blocks {
        let begin = if ends.len() < running { 0 } else { ends.pop().map_or(0, |Reverse(end)| end) };
        ends.push(Reverse(begin + time));
    }
    ends.into_iter().map(|Reverse(end)| end).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(num_queries: u32, keys: u32) -> AttentionTile {
        AttentionTile {
            first_query: 0,
            num_queries,
            table: 0,
            first_key: 0,
            end_key: keys,
            first_part: 0,
            part_stride: num_queries,
            part_splits: 1,
            num_runs: 0,
        }
    }

    #[test]
    fn blocks_take_turns_longest_first() {
        assert_eq!(in_turns(vec![1, 5, 2, 2], 2), 5);
        assert_eq!(in_turns(vec![3; 5], 2), 9);
        assert_eq!(in_turns(vec![], 2), 0);
    }

    /// 300 keys are blocks of 8, 8 and 3 times 16 keys.
    #[test]
    fn a_block_takes_the_time_of_its_keys_and_partial_results() {
        let tile = tile(4, 300);
        let times = |splits, has_part_of_each| {
            let blocks = TileBlocks { tile: &tile, splits, has_part_of_each };
            let each: Vec<usize> = blocks.range().map(|block| blocks.time(block..block + 1)).collect();
            assert_eq!(each.iter().sum::<usize>(), blocks.time(blocks.range()));
            // Many blocks for each that runs: their times add up.
            assert_eq!(total_time(std::iter::repeat_n(blocks, 16), 2), 8 * each.iter().sum::<usize>());
            each
        };
        assert_eq!(times(1, true), [8 * BLOCK_TIME + 4, 8 * BLOCK_TIME + 4, 3 * BLOCK_TIME + 4]);
        assert_eq!(times(2, true), [16 * BLOCK_TIME + 8, 3 * BLOCK_TIME + 4]);
        assert_eq!(times(8, false), [19 * BLOCK_TIME + 4]);
    }

    /// 8B on an H100: a prompt's tiles fill the device; a few rows do not.
    #[test]
    fn much_work_needs_few_partial_results() {
        let layout = cpu_kernels::HeadLayout { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
        for (count, queries, keys, expected) in [
            (128, 64, 10_240, PartSize::All),
            (32, 64, 10_240, PartSize::All),
            (40, 64, 10_240, PartSize::Group),
            (32, 20, 8_197, PartSize::Group),
            (1, 4, 8_192, PartSize::Split),
            (8, 20, 8_197, PartSize::Group),
            (256, 4, 8_192, PartSize::Group),
            (297, 4, 8_192, PartSize::All),
            (1, 4, 100, PartSize::All),
            (1, 4, 1_000, PartSize::Split),
            (64, 128, 10_240, PartSize::All),
            (10, 128, 10_240, PartSize::Group),
        ] {
            let tiles = vec![tile(queries, keys); count];
            let width = tiles[0].width();
            let found = fastest(|| tiles.iter(), width, Limits::of(layout, true));
            assert_eq!(found, expected, "{count} tiles of {queries} queries and {keys} keys");
        }
    }
}
