//! How a pass's attention is cut: queries into tiles that share a KV head, keys into splits at fixed positions, tiles into turns.
//! Pure index arithmetic; only the splits are part of the numerics.

use std::ops::Range;

use cpu_kernels::{HeadLayout, Segment};
#[cfg(test)]
use half::bf16;

/// Keys that a warp sums by itself: part of the numerics, as `attention.cu` has it.
const SPLIT_KEYS: usize = 128;
/// Queries of a tile: of a warp, one dimension of the tensor cores' shape, and of the four that share keys and values.
const TILE_QUERIES: usize = 16;
const WIDE_QUERIES: usize = 64;
/// Splits that a block of four warps takes at most, as `attention.cu` has it.
const RUN: usize = 8;

/// Bytes of what splits come to that are kept at a time: queries whose splits take more are joined by turns.
const PARTIAL_BYTES: usize = 512 << 20;

/// A tile, as `attention.cu` reads it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Query {
    first_query: u32,
    num_queries: u32,
    table: u32,
    first_key: u32,
    end_key: u32,
    /// Of its turn: a part for each query of each split.
    first_part: u32,
}

impl Query {
    fn splits(&self) -> Range<usize> {
        self.first_key as usize / SPLIT_KEYS..(self.end_key as usize).div_ceil(SPLIT_KEYS)
    }

    fn num_parts(&self) -> usize {
        self.num_queries as usize * self.splits().len()
    }

    fn is_wide(&self) -> bool {
        self.num_queries as usize > TILE_QUERIES
    }
}

/// A run of a tile's splits, or none.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Work {
    tile: u32,
    split: u32,
    end_split: u32,
}

/// In place of a split where there is none.
const NO_SPLIT: u32 = u32::MAX;

/// What a pass is cut to; no bit depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Parts of a turn at most.
    pub(crate) most_parts: usize,
    /// Blocks of a turn's wide tiles, for a KV head, before a block takes more than one split.
    pub(crate) fewest_runs: usize,
}

impl Limits {
    /// Those of a pass that is served: as many blocks as all multiprocessors of an H100 hold, four times.
    pub(crate) fn of(layout: HeadLayout) -> Self {
        let most_parts = PARTIAL_BYTES / size_of::<f32>() / part_len(layout);
        Self { most_parts, fewest_runs: (4 * 2 * 132 / layout.num_kv_heads).max(1) }
    }
}

/// Tiles that share the memory of what their splits come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Of all work: of one warp each, and of four.
    pub(super) work: [Range<usize>; 2],
    /// Of the pass's queries of a KV head.
    pub(super) queries: Range<usize>,
    /// Parts for each KV head.
    pub(crate) num_parts: usize,
    /// Of the tile that has most.
    pub(super) most_splits: usize,
}

/// A pass's queries for one group size and window: tiles, their splits and the turns they take. Every split that is needed is in
/// one work item, and there are no more than a sixteenth besides.
#[derive(Debug, Default)]
pub(crate) struct Tiling {
    pub(crate) tiles: Vec<Query>,
    pub(crate) work: Vec<Work>,
    /// The tile of each query.
    pub(crate) tile_of: Vec<u32>,
    pub(crate) turns: Vec<Turn>,
}

impl Tiling {
    /// `table_starts` says where each segment's block table begins; a turn is within the limits, or has one tile.
    pub(crate) fn new(
        segments: &[Segment<'_>],
        table_starts: &[u32],
        (group, window): (usize, Option<u32>),
        limits: Limits,
    ) -> Self {
        let tiles = tiles(segments, table_starts, (group, window), limits.most_parts);
        let mut tiling = Self { tiles, ..Self::default() };
        let mut first = 0;
        while first < tiling.tiles.len() {
            let end = tiling.end_of_turn(first, limits.most_parts);
            tiling.add_turn(first..end, limits.fewest_runs);
            first = end;
        }
        for (tile, number) in tiling.tiles.iter().zip(0..) {
            tiling.tile_of.extend(std::iter::repeat_n(number, tile.num_queries as usize));
        }
        tiling
    }

    /// One past the last tile of the turn that begins with tile `first`.
    fn end_of_turn(&self, first: usize, most_parts: usize) -> usize {
        let mut num_parts = self.tiles[first].num_parts();
        let more = self.tiles[first + 1..].iter().take_while(|tile| {
            num_parts += tile.num_parts();
            num_parts <= most_parts
        });
        first + 1 + more.count()
    }

    fn add_turn(&mut self, which: Range<usize>, fewest_runs: usize) {
        let mut num_parts = 0;
        for tile in &mut self.tiles[which.clone()] {
            tile.first_part = num_parts as u32;
            num_parts += tile.num_parts();
        }
        let work = [None, Some(fewest_runs)].map(|runs| self.add_work(which.clone(), runs));
        let tiles = &self.tiles[which];
        let end_of = |tile: &Query| (tile.first_query + tile.num_queries) as usize;
        let queries =
            tiles.first().map_or(0, |tile| tile.first_query as usize)..tiles.last().map_or(0, end_of);
        let most_splits = tiles.iter().map(|tile| tile.splits().len()).max().unwrap_or(0);
        self.turns.push(Turn { work, queries, num_parts, most_splits });
    }

    /// The work of those tiles that are wide, where they make `fewest_runs` or more, or of those that are not: where it stands.
    fn add_work(&mut self, which: Range<usize>, fewest_runs: Option<usize>) -> Range<usize> {
        let first_work = self.work.len();
        let all = self.tiles[which.clone()].iter().zip(which);
        let tiles: Vec<(&Query, usize)> =
            all.filter(|(tile, _)| tile.is_wide() == fewest_runs.is_some()).collect();
        let splits: usize = tiles.iter().map(|(tile, _)| tile.splits().len()).sum();
        let run = fewest_runs.map_or(1, |runs| (splits / runs).clamp(1, RUN));
        let ends = tiles.iter().map(|(tile, _)| tile.splits().end);
        // Tiles of a sequence read the same keys: they come together.
        for split in (0..ends.max().unwrap_or(0)).step_by(run) {
            let needs = |&(tile, number): &(&Query, usize)| {
                let needed = tile.splits();
                let (first, end) = (needed.start.max(split), needed.end.min(split + run));
                let work = Work { tile: number as u32, split: first as u32, end_split: end as u32 };
                (first < end).then_some(work)
            };
            self.work.extend(tiles.iter().filter_map(needs));
        }
        let len = self.work.len() - first_work;
        let nothing = Work { tile: 0, split: NO_SPLIT, end_split: NO_SPLIT };
        self.work.extend(std::iter::repeat_n(nothing, rounded_up(len) - len));
        first_work..self.work.len()
    }
}

/// The next of few sizes, by at most a sixteenth larger: grids of steps that are alike are equal, and a graph of one is a graph
/// of the other.
fn rounded_up(len: usize) -> usize {
    len.next_multiple_of((len.next_power_of_two() / 32).max(1))
}

/// Numbers that a query's split comes to, for all KV heads.
pub(super) fn part_len(layout: HeadLayout) -> usize {
    layout.num_kv_heads * (layout.head_dim + 2)
}

/// Bytes of what splits come to, of so many rows whose sequences are up to `max_len` long.
pub(crate) fn partial_bytes(rows: usize, layout: HeadLayout, max_len: usize) -> usize {
    let (group, splits) = (layout.num_heads / layout.num_kv_heads, max_len.div_ceil(SPLIT_KEYS));
    let bytes_of = |queries: usize| queries * splits * part_len(layout) * size_of::<f32>();
    bytes_of(rows * group).min(PARTIAL_BYTES.max(bytes_of(TILE_QUERIES)))
}

/// Queries of a tile of a segment, which has so many in all and splits: what keys and values are read once for. Wide tiles whose
/// parts one turn would not hold would take memory that nobody counted.
fn tile_len(queries: usize, splits: usize, most_parts: usize) -> usize {
    if queries > TILE_QUERIES && WIDE_QUERIES * splits <= most_parts { WIDE_QUERIES } else { TILE_QUERIES }
}

/// The tiles of a pass for one group size and window. `table_starts` says where each segment's block table begins.
fn tiles(
    segments: &[Segment<'_>],
    table_starts: &[u32],
    (group, window): (usize, Option<u32>),
    most_parts: usize,
) -> Vec<Query> {
    let mut tiles = Vec::new();
    for (segment, &table) in segments.iter().zip(table_starts) {
        let (begin, end) = (segment.rows.start * group, segment.rows.end * group);
        let splits = (segment.start as usize + segment.rows.len()).div_ceil(SPLIT_KEYS);
        let tile_len = tile_len(end - begin, splits, most_parts);
        for first in (begin..end).step_by(tile_len) {
            let last = end.min(first + tile_len) - 1;
            let position = |query: usize| segment.start as usize + query / group - segment.rows.start;
            let first_key = window.map_or(0, |window| (position(first) + 1).saturating_sub(window as usize));
            tiles.push(Query {
                first_query: first as u32,
                num_queries: (last + 1 - first) as u32,
                table,
                first_key: first_key as u32,
                end_key: (position(last) + 1) as u32,
                first_part: 0,
            });
        }
    }
    tiles
}

/// What a layer's attention is made of, for models of its time: all KV heads.
#[cfg(test)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counted {
    /// Blocks of one warp, and of four.
    pub(crate) blocks: [usize; 2],
    /// 16 keys that a block takes, of those blocks; and 16 keys by 16 queries that a warp takes.
    pub(crate) key_blocks: [usize; 2],
    pub(crate) warp_blocks: usize,
    /// Bytes of keys, values and queries that blocks read, and of what splits come to.
    pub(crate) bytes_read: usize,
    pub(crate) partial_bytes: usize,
}

/// See [`Counted`].
#[cfg(test)]
pub(crate) fn count_attention(tiling: &Tiling, layout: HeadLayout) -> Counted {
    let HeadLayout { num_kv_heads, head_dim, .. } = layout;
    let mut counted = Counted::default();
    for work in tiling.work.iter().filter(|work| work.split != NO_SPLIT) {
        let tile = &tiling.tiles[work.tile as usize];
        let first = (work.split as usize * SPLIT_KEYS).max(tile.first_key as usize);
        let end = (work.end_split as usize * SPLIT_KEYS).min(tile.end_key as usize);
        let key_blocks = (end.div_ceil(16) - first / 16) * num_kv_heads;
        counted.blocks[usize::from(tile.is_wide())] += num_kv_heads;
        counted.key_blocks[usize::from(tile.is_wide())] += key_blocks;
        counted.warp_blocks += key_blocks * (tile.num_queries as usize).div_ceil(TILE_QUERIES);
        counted.bytes_read += key_blocks * 16 * 2 * head_dim * size_of::<bf16>();
        counted.bytes_read += tile.num_queries as usize * head_dim * size_of::<f32>() * num_kv_heads;
    }
    let parts: usize = tiling.turns.iter().map(|turn| turn.num_parts).sum();
    counted.partial_bytes = parts * part_len(layout) * size_of::<f32>();
    counted
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Every split that a tile needs is one piece of work in its turn, with parts of its own; no turn is larger than it may be.
        #[test]
        fn work_covers_every_split_once(
            lens in prop::collection::vec((1usize..40, 0u32..3000), 1..5),
            group in 1usize..9,
            window in prop::option::of(1u32..400),
            most_parts in prop_oneof![1usize..2000, Just(usize::MAX)],
            fewest_runs in 1usize..40,
        ) {
            let mut segments = Vec::new();
            let mut row = 0;
            for &(rows, start) in &lens {
                segments.push(Segment { rows: row..row + rows, start, block_table: &[], tree: None });
                row += rows;
            }
            let starts = vec![0; lens.len()];
            let Tiling { tiles, work, tile_of, turns } = Tiling::new(&segments, &starts, (group, window), Limits { most_parts, fewest_runs });
            let (mut next_query, mut next_work) = (0, 0);
            for turn in &turns {
                let [narrow, wide] = turn.work.clone();
                prop_assert_eq!((turn.queries.start, narrow.start), (next_query, next_work));
                prop_assert_eq!(narrow.end, wide.start);
                (next_query, next_work) = (turn.queries.end, wide.end);
                let mut seen = vec![false; turn.num_parts];
                let mut in_turn = std::collections::BTreeSet::new();
                let real = |which: &Range<usize>| work[which.clone()].iter().filter(|work| work.split != NO_SPLIT).count();
                for (work, is_wide) in [(&narrow, false), (&wide, true)]
                    .into_iter()
                    .flat_map(|(range, is_wide)| work[range.clone()].iter().map(move |work| (work, is_wide)))
                    .filter(|(work, _)| work.split != NO_SPLIT)
                {
                    let tile = &tiles[work.tile as usize];
                    in_turn.insert(work.tile);
                    prop_assert_eq!(tile.num_queries > 16, is_wide);
                    let longest = if is_wide { 8 } else { 1 };
                    prop_assert!(work.split < work.end_split && work.end_split - work.split <= longest);
                    prop_assert!(turn.queries.contains(&(tile.first_query as usize)));
                    for split in work.split..work.end_split {
                        prop_assert!(tile.splits().contains(&(split as usize)));
                        let first = tile.first_part + (split - tile.first_key / 128) * tile.num_queries;
                        for part in first..first + tile.num_queries {
                            prop_assert!(!std::mem::replace(&mut seen[part as usize], true), "part {} twice", part);
                        }
                    }
                }
                prop_assert!(seen.iter().all(|seen| *seen));
                prop_assert!(turn.num_parts <= most_parts || in_turn.len() == 1);
                prop_assert!(narrow.len() * 16 <= real(&narrow) * 17 && wide.len() * 16 <= real(&wide) * 17);
                let longest = in_turn.iter().map(|&tile| tiles[tile as usize].splits().len()).max();
                prop_assert_eq!(Some(turn.most_splits), longest);
            }
            prop_assert_eq!((next_query, next_work), (row * group, work.len()));
            for (query, tile) in tile_of.iter().enumerate() {
                let tile = &tiles[*tile as usize];
                prop_assert!((tile.first_query..tile.first_query + tile.num_queries).contains(&(query as u32)));
            }
            prop_assert_eq!(tile_of.len(), row * group);
        }

        /// Tiles hold every query once, and their keys are exactly what their queries see.
        #[test]
        fn tiles_cover_the_queries_of_every_segment(
            lens in prop::collection::vec((1usize..40, 0u32..300), 1..5),
            group in 1usize..9,
            window in prop::option::of(1u32..200),
        ) {
            let mut segments = Vec::new();
            let mut row = 0;
            for &(rows, start) in &lens {
                segments.push(Segment { rows: row..row + rows, start, block_table: &[], tree: None });
                row += rows;
            }
            let starts: Vec<u32> = (0..lens.len() as u32).map(|i| i * 1000).collect();
            let mut next = 0;
            for tile in tiles(&segments, &starts, (group, window), usize::MAX) {
                prop_assert_eq!(tile.first_query, next);
                next += tile.num_queries;
                let rows: Vec<usize> = (tile.first_query..next).map(|query| query as usize / group).collect();
                let segment = &segments[(tile.table / 1000) as usize];
                prop_assert!(rows.iter().all(|row| segment.rows.contains(row)));
                let ends = rows.iter().map(|row| segment.start + (row - segment.rows.start) as u32 + 1);
                prop_assert_eq!(Some(tile.end_key), ends.clone().max());
                let begins = ends.map(|end| window.map_or(0, |window| end.saturating_sub(window)));
                prop_assert_eq!(Some(tile.first_key), begins.min());
            }
            prop_assert_eq!(next as usize, row * group);
        }
    }

    /// Of 8B 512 rows at 131,072 positions: 8.7 GB where every split of every row had its place at once.
    #[test]
    fn long_contexts_take_turns_in_half_a_gigabyte() {
        let layout = HeadLayout { num_heads: 32, num_kv_heads: 8, head_dim: 128 };
        let segment = Segment { rows: 0..512, start: 131_072 - 512, block_table: &[], tree: None };
        let tiling = Tiling::new(&[segment], &[0], (4, None), Limits::of(layout));
        let most = tiling.turns.iter().map(|turn| turn.num_parts).max().unwrap_or(0) * part_len(layout) * 4;
        let bytes = partial_bytes(512, layout, 131_072);
        println!("{} turns, {most} bytes at most, {bytes} counted", tiling.turns.len());
        assert!(most <= bytes && bytes <= 1 << 30, "{most} of {bytes}");
        assert_eq!(partial_bytes(3, layout, 300), 12 * 3 * 8 * 130 * 4);
    }

    /// One long sequence among 63 short ones: before, every tile had a block for each split of the longest.
    #[test]
    fn short_sequences_launch_no_blocks_for_a_long_one() {
        let start = |i: usize| if i == 0 { 32_767 } else { 100 };
        let segments: Vec<Segment<'_>> = (0..64)
            .map(|i| Segment { rows: i..i + 1, start: start(i), block_table: &[], tree: None })
            .collect();
        let tiling =
            Tiling::new(&segments, &[0; 64], (4, None), Limits { most_parts: 1 << 20, fewest_runs: 1024 });
        let useful = tiling.work.iter().filter(|work| work.split != NO_SPLIT).count();
        println!("{} pieces of work, {useful} useful, before {}", tiling.work.len(), 64 * 256);
        assert_eq!(useful, 256 + 63);
        assert!(tiling.work.len() * 10 <= useful * 11, "{}", tiling.work.len());
    }
}
