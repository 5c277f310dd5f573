//! Which partial results a tile's blocks write: chosen by the time that each choice would take. It does not
//! affect numerics.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::work::run_len;
use super::{AttentionTile, GROUP_SPLITS, Limits, SPLIT_KEYS, WIDE_QUERIES};

/// Keys of a block.
const BLOCK_KEYS: usize = 16;
/// Time of a block of 16 keys, where that of a partial result of a query, written and merged, is 1. Behind
/// 8,192 tokens the partial results of splits took half the time of a prompt in tiles of 64 queries
/// (docs/measurements/gpu.md).
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
}

/// Returns what takes least time for all these tiles, which are of one width.
pub(super) fn fastest<'a, I>(tiles: impl Fn() -> I, width: usize, limits: Limits) -> PartSize
where
    I: Iterator<Item = &'a AttentionTile>,
{
    let run = run_len(tiles().map(|tile| tile.splits().len()).sum(), limits.min_runs);
    let time = |size: PartSize| {
        let blocks = tiles().flat_map(|tile| {
            let (block_splits, parts) = match size {
                PartSize::All => (tile.splits().end, 1),
                PartSize::Group => (GROUP_SPLITS, 1),
                PartSize::Split => (run, run),
            };
            block_times(tile, block_splits, parts)
        });
        total_time(blocks.collect(), limits.running[width])
    };
    let [all, group, split] =
        [PartSize::All, PartSize::Group, PartSize::Split].map(|size| (time(size), size));
    [all, group, split].into_iter().min_by_key(|(time, _)| *time).map_or(PartSize::Split, |(_, size)| size)
}

/// Times of a tile's blocks, each of which processes up to `splits` splits from a multiple of that on, and
/// writes up to `parts` partial results of each query.
fn block_times(tile: &AttentionTile, splits: usize, parts: usize) -> impl Iterator<Item = usize> {
    let (first, end) = (tile.first_key as usize, tile.end_key as usize);
    let (keys, queries) = (splits * SPLIT_KEYS, tile.num_queries as usize);
    (first / keys..end.div_ceil(keys)).map(move |block| {
        let (first, end) = (first.max(block * keys), end.min((block + 1) * keys));
        let written = parts.min(end.div_ceil(SPLIT_KEYS) - first / SPLIT_KEYS);
        (end.div_ceil(BLOCK_KEYS) - first / BLOCK_KEYS) * BLOCK_TIME + written * queries
    })
}

/// Time of blocks of which `running` run at once, if the longest begin first.
fn total_time(mut blocks: Vec<usize>, running: usize) -> usize {
    let sum: usize = blocks.iter().sum();
    if blocks.len() / EVEN_TURNS >= running {
        return sum.div_ceil(running);
    }
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
        assert_eq!(total_time(vec![1, 5, 2, 2], 2), 5);
        assert_eq!(total_time(vec![3; 5], 2), 9);
        assert_eq!(total_time(vec![3; 17], 2), 51usize.div_ceil(2));
        assert_eq!(total_time(vec![], 2), 0);
    }

    /// 300 keys are blocks of 8, 8 and 3 times 16 keys.
    #[test]
    fn a_block_takes_the_time_of_its_keys_and_partial_results() {
        let times = |splits, parts| block_times(&tile(4, 300), splits, parts).collect::<Vec<_>>();
        assert_eq!(times(1, 1), [8 * BLOCK_TIME + 4, 8 * BLOCK_TIME + 4, 3 * BLOCK_TIME + 4]);
        assert_eq!(times(2, 2), [16 * BLOCK_TIME + 8, 3 * BLOCK_TIME + 4]);
        assert_eq!(times(3, 1), [19 * BLOCK_TIME + 4]);
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
        ] {
            let tiles = vec![tile(queries, keys); count];
            let width = tiles[0].width();
            let found = fastest(|| tiles.iter(), width, Limits::of(layout));
            assert_eq!(found, expected, "{count} tiles of {queries} queries and {keys} keys");
        }
    }
}
