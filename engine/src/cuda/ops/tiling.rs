//! Divides a pass's attention: queries into tiles that share a KV head, keys into splits at fixed positions,
//! tiles into chunks. Queries of a token tree share the splits before the one in which the tree begins; later
//! splits are divided by row, because each row has its own blocks there ([`OwnBlocks`]). Pure index
//! arithmetic; only the splits affect numerics.

use std::ops::Range;

use cpu_kernels::{HeadLayout, Segment};
use half::bf16;

use super::own_blocks::{OwnBlocks, TreeRow, max_own_blocks};

/// Keys per split, which a warp sums by itself: part of the numerics (`attention.cuh`).
pub(super) const SPLIT_KEYS: usize = 128;
/// Queries per tile: of one, two and four warps that share keys and values.
const TILE_QUERIES: [usize; 3] = [16, 32, 64];
/// Queries of the widest tile.
pub(super) const WIDE_QUERIES: usize = TILE_QUERIES[2];
/// Maximum number of splits per block: `RUN` of `attention.cuh`.
const RUN: usize = 8;
/// Maximum number of splits of a tile that the last of its blocks merges (`attention.cuh`). That block has one
/// to four warps and, for heads of 128, shared memory for 62 or 124 partial results at a time; a tile has up
/// to 16 or 64 for each split. In longer contexts few tiles may have most of the splits, and a launch of
/// eight warps for each query keeps more of them in flight.
pub(crate) const LAST_BLOCK_SPLITS: usize = 16;

/// Limit of partial results in memory, in bytes; queries that need more are processed in several chunks.
const PARTIAL_BYTES: usize = 512 << 20;

/// A tile, in the layout of `attention.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct AttentionTile {
    first_query: u32,
    num_queries: u32,
    table: u32,
    first_key: u32,
    end_key: u32,
    /// Index of its first partial result in its chunk; there is one per query and split.
    first_part: u32,
    /// Number of partial results per split.
    part_stride: u32,
    /// Number of its work items if the block that finishes last merges its splits, else 0.
    num_runs: u32,
}

impl AttentionTile {
    fn splits(&self) -> Range<usize> {
        self.first_key as usize / SPLIT_KEYS..(self.end_key as usize).div_ceil(SPLIT_KEYS)
    }

    fn num_parts(&self) -> usize {
        self.num_queries as usize * self.splits().len()
    }

    /// Index of its width in [`TILE_QUERIES`].
    fn width(&self) -> usize {
        TILE_QUERIES.iter().take_while(|queries| self.num_queries as usize > **queries).count()
    }
}

/// A tile of queries and, for a token tree, the tiles of its single rows.
#[derive(Debug, Clone)]
struct TileGroup {
    /// Range of all tiles: the shared one, then those of rows.
    tiles: Range<usize>,
    /// Splits that all queries share.
    splits: Range<usize>,
    /// Own blocks of its rows, numbered over the pass.
    own: Range<usize>,
}

/// A run of a tile's splits, or padding.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct WorkItem {
    tile: u32,
    split: u32,
    end_split: u32,
}

/// Marks a padding entry.
const NO_SPLIT: u32 = u32::MAX;

/// Limits of a pass's chunks and tiles; they do not affect numerics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Maximum number of partial results per chunk.
    pub(crate) max_parts: usize,
    /// Maximum number of own blocks of tree rows per chunk.
    pub(crate) max_own_blocks: usize,
    /// Minimum number of blocks of a chunk's tiles of one width, per KV head, if blocks process runs of
    /// several splits.
    pub(crate) min_runs: usize,
    /// Maximum number of splits of a chunk's tiles if the tiles' last blocks merge them; at most
    /// [`LAST_BLOCK_SPLITS`].
    pub(crate) last_block_splits: usize,
}

impl Limits {
    /// Limits for serving: `min_runs` gives four times as many blocks as fit on all multiprocessors of an
    /// H100.
    pub(crate) fn of(layout: HeadLayout) -> Self {
        let max_parts = PARTIAL_BYTES / size_of::<f32>() / part_len(layout);
        let min_runs = (4 * 2 * 132 / layout.num_kv_heads).max(1);
        let (max_own_blocks, last_block_splits) = (max_own_blocks(layout), LAST_BLOCK_SPLITS);
        Self { max_parts, max_own_blocks, min_runs, last_block_splits }
    }
}

/// What a tiling depends on besides the segments of a pass. Layers with equal keys share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TilingKey {
    /// Number of query heads that share a KV head.
    pub(crate) group: usize,
    /// Sliding window: attend only to this many of the last positions.
    pub(crate) window: Option<u32>,
    pub(crate) limits: Limits,
}

impl TilingKey {
    /// Key of a layer's attention, with the limits for serving.
    pub(crate) fn of(layout: HeadLayout, window: Option<u32>) -> Self {
        Self { group: layout.num_heads / layout.num_kv_heads, window, limits: Limits::of(layout) }
    }
}

/// Tiles that share the memory for partial results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttentionChunk {
    /// Ranges of all work items, for blocks of one, two and four warps.
    pub(super) work: [Range<usize>; 3],
    /// Range of the pass's queries of a KV head.
    pub(super) queries: Range<usize>,
    /// Number of partial results per KV head.
    pub(crate) num_parts: usize,
    /// Range of the pass's own blocks.
    pub(crate) own: Range<usize>,
    /// Maximum number of splits of a tile.
    pub(super) max_splits: usize,
    /// Whether the last block of each tile merges its splits. Otherwise another launch does: for long
    /// contexts, and for token trees, whose queries have splits in several tiles.
    pub(super) is_merged_by_blocks: bool,
}

/// A pass's queries for one key: tiles, their splits and their chunks. Every required split is in exactly one
/// work item; padding adds at most a sixteenth.
#[derive(Debug, Default)]
pub(crate) struct Tiling {
    pub(crate) tiles: Vec<AttentionTile>,
    pub(crate) work: Vec<WorkItem>,
    /// The tile of each query.
    pub(crate) tile_of: Vec<u32>,
    pub(crate) chunks: Vec<AttentionChunk>,
}

impl Tiling {
    /// `table_starts` holds the offset of each segment's block table, `own` those of tree rows. A chunk is
    /// within the limits or consists of one tile.
    pub(crate) fn new(
        segments: &[Segment<'_>],
        table_starts: &[u32],
        own: &OwnBlocks,
        key: TilingKey,
    ) -> Self {
        let (mut tiling, limits) = (Self::default(), key.limits);
        let mut all = Vec::new();
        for (segment, &table) in segments.iter().zip(table_starts) {
            all.extend(tiling.add_tiles(segment, table, own, key));
        }
        let mut left = all.as_slice();
        while !left.is_empty() {
            let (chunk, rest) = left.split_at(tiling.chunk_len(left, limits));
            tiling.add_chunk(chunk, limits);
            left = rest;
        }
        for shared in &all {
            let tile = shared.tiles.start;
            tiling.tile_of.extend(std::iter::repeat_n(tile as u32, tiling.tiles[tile].num_queries as usize));
        }
        tiling
    }

    /// Adds the tiles of a segment; `table` is the offset of its block table.
    fn add_tiles(
        &mut self,
        segment: &Segment<'_>,
        table: u32,
        own: &OwnBlocks,
        key: TilingKey,
    ) -> Vec<TileGroup> {
        let TilingKey { group, window, limits } = key;
        let (begin, end) = (segment.rows.start * group, segment.rows.end * group);
        let position = |query: usize| {
            let row = query / group;
            let of_chain = || segment.start + (row - segment.rows.start) as u32;
            own.row(row).map_or_else(of_chain, |row| row.position)
        };
        let first_key = |query| window.map_or(0, |window| (position(query) + 1).saturating_sub(window));
        let splits = (position(end - 1) as usize + 1).div_ceil(SPLIT_KEYS);
        let tile_len = tile_len(end - begin, splits, limits.max_parts);
        let mut all = Vec::new();
        for first in (begin..end).step_by(tile_len) {
            let queries = first..end.min(first + tile_len);
            let tile = AttentionTile {
                first_query: first as u32,
                num_queries: queries.len() as u32,
                table,
                first_key: first_key(first),
                end_key: position(queries.end - 1) + 1,
                first_part: 0,
                part_stride: queries.len() as u32,
                num_runs: 0,
            };
            let (first_tile, mut splits) = (self.tiles.len(), tile.splits());
            self.tiles.push(tile);
            let rows = first / group..(queries.end - 1) / group + 1;
            for row in rows.clone() {
                let Some(of_tree) = own.row(row) else { continue };
                splits.end = splits.end.min(splits.start.max(of_tree.split));
                let of_row = queries.start.max(row * group)..queries.end.min((row + 1) * group);
                self.tiles.push(tile_of_row(&tile, of_tree, (of_row.clone(), first_key(of_row.start))));
            }
            let own_of = |row| own.row(row).map_or(0..0, |row| row.own.clone());
            let own = own_of(rows.start).start as usize..own_of(rows.end - 1).end as usize;
            all.push(TileGroup { tiles: first_tile..self.tiles.len(), splits, own });
        }
        all
    }

    /// Number of these tiles, with those of their rows, that form the next chunk.
    fn chunk_len(&self, left: &[TileGroup], limits: Limits) -> usize {
        let (mut num_parts, mut num_own) = (0, 0);
        let fits = |shared: &&TileGroup| {
            num_parts += self.tiles[shared.tiles.start].num_parts();
            num_own += shared.own.len();
            num_parts <= limits.max_parts && num_own <= limits.max_own_blocks
        };
        left.iter().take_while(fits).count().max(1)
    }

    fn add_chunk(&mut self, chunk: &[TileGroup], limits: Limits) {
        let (mut num_parts, mut max_splits) = (0, 0);
        for shared in chunk {
            let first_split = self.tiles[shared.tiles.start].splits().start;
            max_splits = max_splits.max(self.tiles[shared.tiles.start].splits().len());
            let of_turn = num_parts;
            num_parts += self.tiles[shared.tiles.start].num_parts();
            for tile in &mut self.tiles[shared.tiles.clone()] {
                // The partial results of a row's tile are among the shared tile's.
                let of_splits = (tile.splits().start - first_split) as u32 * tile.part_stride;
                tile.first_part += of_turn as u32 + of_splits;
            }
        }
        let has_no_trees = chunk.iter().all(|shared| shared.tiles.len() == 1);
        let is_merged_by_blocks = has_no_trees && max_splits <= limits.last_block_splits;
        let work = [0, 1, 2].map(|width| self.add_work(chunk, width, limits.min_runs));
        for item in work.iter().flat_map(|range| &self.work[range.clone()]) {
            if is_merged_by_blocks && item.split != NO_SPLIT {
                self.tiles[item.tile as usize].num_runs += 1;
            }
        }
        let end_of = |tile: &AttentionTile| (tile.first_query + tile.num_queries) as usize;
        let first_of = |shared: Option<&TileGroup>| shared.map(|shared| self.tiles[shared.tiles.start]);
        let queries = first_of(chunk.first()).map_or(0, |tile| tile.first_query as usize)
            ..first_of(chunk.last()).map_or(0, |tile| end_of(&tile));
        // Tree rows have their own blocks in order, other rows have none.
        let mut owning = chunk.iter().map(|shared| shared.own.clone()).filter(|own| !own.is_empty());
        let first_own = owning.next().unwrap_or_default();
        let own = first_own.start..owning.next_back().unwrap_or(first_own).end;
        self.chunks.push(AttentionChunk { work, queries, num_parts, own, max_splits, is_merged_by_blocks });
    }

    /// Adds the work of the chunk's tiles of one width, in runs that leave at least `min_runs` blocks. Returns
    /// the range of the added work.
    fn add_work(&mut self, chunk: &[TileGroup], width: usize, min_runs: usize) -> Range<usize> {
        let first_work = self.work.len();
        let mut tiles: Vec<(usize, Range<usize>)> = Vec::new();
        for shared in chunk {
            tiles.push((shared.tiles.start, shared.splits.clone()));
            tiles.extend(shared.tiles.clone().skip(1).map(|tile| (tile, self.tiles[tile].splits())));
        }
        tiles.retain(|&(tile, _)| self.tiles[tile].width() == width);
        let splits: usize = tiles.iter().map(|(_, splits)| splits.len()).sum();
        let run = (splits / min_runs).clamp(1, RUN);
        let ends = tiles.iter().map(|(_, splits)| splits.end);
        // Tiles of a sequence read the same keys, so they are placed together.
        for split in (0..ends.max().unwrap_or(0)).step_by(run) {
            let needs = |(tile, needed): &(usize, Range<usize>)| {
                let (first, end) = (needed.start.max(split), needed.end.min(split + run));
                let work = WorkItem { tile: *tile as u32, split: first as u32, end_split: end as u32 };
                (first < end).then_some(work)
            };
            self.work.extend(tiles.iter().filter_map(needs));
        }
        let len = self.work.len() - first_work;
        let nothing = WorkItem { tile: 0, split: NO_SPLIT, end_split: NO_SPLIT };
        self.work.extend(std::iter::repeat_n(nothing, rounded_up(len) - len));
        first_work..self.work.len()
    }
}

/// Returns the tile of a tree row from the tree's split on. Its partial results are among those of `tile`.
fn tile_of_row(
    tile: &AttentionTile,
    row: &TreeRow,
    (queries, first_key): (Range<usize>, u32),
) -> AttentionTile {
    AttentionTile {
        first_query: queries.start as u32,
        num_queries: queries.len() as u32,
        table: row.table,
        first_key: first_key.max((row.split * SPLIT_KEYS) as u32),
        end_key: row.position + 1,
        first_part: queries.start as u32 - tile.first_query,
        ..*tile
    }
}

/// Rounds up to one of few sizes, by at most a sixteenth: similar steps then have equal grids and can replay
/// the same graph.
fn rounded_up(len: usize) -> usize {
    len.next_multiple_of((len.next_power_of_two() / 32).max(1))
}

/// Size of a partial result in numbers, for all KV heads.
pub(super) fn part_len(layout: HeadLayout) -> usize {
    layout.num_kv_heads * (layout.head_dim + 4)
}

/// Size of the partial results of `rows` rows of sequences of up to `max_len` tokens, in bytes.
pub(crate) fn partial_bytes(rows: usize, layout: HeadLayout, max_len: usize) -> usize {
    let (group, splits) = (layout.num_heads / layout.num_kv_heads, max_len.div_ceil(SPLIT_KEYS));
    let bytes_of = |queries: usize| queries * splits * part_len(layout) * size_of::<f32>();
    bytes_of(rows * group).min(PARTIAL_BYTES.max(bytes_of(TILE_QUERIES[0])))
}

/// Queries per tile of a segment with `queries` queries and `splits` splits; they share each load of keys and
/// values. The tile is narrow if the partial results of a wide one exceed one chunk: they would need memory
/// that was not reserved.
fn tile_len(queries: usize, splits: usize, max_parts: usize) -> usize {
    if queries > TILE_QUERIES[0] && WIDE_QUERIES * splits <= max_parts {
        WIDE_QUERIES
    } else {
        TILE_QUERIES[0]
    }
}

/// Work of a layer's attention over all KV heads, for models of its time.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttentionCounts {
    /// Number of blocks of one, two and four warps.
    pub(crate) blocks: [usize; 3],
    /// Number of blocks of 16 keys that those blocks read; and of 16 keys x 16 queries that warps process.
    pub(crate) key_blocks: [usize; 3],
    pub(crate) warp_blocks: usize,
    /// Bytes of keys, values and queries that blocks read, and of partial results.
    pub(crate) bytes_read: usize,
    pub(crate) partial_bytes: usize,
    /// Bytes of partial results that tiles' last blocks read.
    pub(crate) merged_bytes: usize,
}

/// See [`AttentionCounts`].
pub(crate) fn count_attention(tiling: &Tiling, layout: HeadLayout) -> AttentionCounts {
    let HeadLayout { num_kv_heads, head_dim, .. } = layout;
    let mut counted = AttentionCounts::default();
    for work in tiling.work.iter().filter(|work| work.split != NO_SPLIT) {
        let tile = &tiling.tiles[work.tile as usize];
        let first = (work.split as usize * SPLIT_KEYS).max(tile.first_key as usize);
        let end = (work.end_split as usize * SPLIT_KEYS).min(tile.end_key as usize);
        let key_blocks = (end.div_ceil(16) - first / 16) * num_kv_heads;
        counted.blocks[tile.width()] += num_kv_heads;
        counted.key_blocks[tile.width()] += key_blocks;
        counted.warp_blocks += key_blocks * (tile.num_queries as usize).div_ceil(TILE_QUERIES[0]);
        counted.bytes_read += key_blocks * 16 * 2 * head_dim * size_of::<bf16>();
        counted.bytes_read += tile.num_queries as usize * head_dim * size_of::<f32>() * num_kv_heads;
    }
    for chunk in &tiling.chunks {
        let bytes = chunk.num_parts * part_len(layout) * size_of::<f32>();
        counted.partial_bytes += bytes;
        counted.merged_bytes += if chunk.is_merged_by_blocks { bytes } else { 0 };
    }
    counted
}

#[cfg(test)]
mod tests;
