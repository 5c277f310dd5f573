//! Divides a pass's attention: queries into tiles that share a KV head, keys into splits at fixed positions,
//! tiles into chunks. Queries of a token tree share the splits before the one in which the tree begins; later
//! splits are divided by row, because each row has its own blocks there ([`OwnBlocks`]). Pure index
//! arithmetic; only the splits and their groups affect numerics.

mod counts;
mod parts;
mod work;

use std::ops::Range;

use cpu_kernels::{HeadLayout, Segment};

pub(crate) use self::counts::{AttentionCounts, count_attention};
pub(crate) use self::parts::PartSize;
use self::work::NO_SPLIT;
pub(crate) use self::work::WorkItem;
use super::blocks::MULTIPROCESSORS;
use super::own_blocks::{OwnBlocks, TreeRow, max_own_blocks};
use super::padding::padded_list;

/// Keys per split, which a warp sums by itself, and splits per group: part of the numerics (`attention.cuh`).
pub(super) const SPLIT_KEYS: usize = 128;
const GROUP_SPLITS: usize = 8;
/// Queries per tile: of one, two and four warps that share keys and values, and of two warpgroups.
const TILE_QUERIES: [usize; WIDTHS] = [16, 32, 64, 128];
/// Number of widths of tiles.
pub(super) const WIDTHS: usize = 4;
/// Queries of the widest tile of warps.
pub(super) const WIDE_QUERIES: usize = TILE_QUERIES[2];
/// Width of tiles of warpgroups (`attention_panels.cu`).
pub(super) const PANELS: usize = 3;
/// Maximum number of partial results of a query that the last block of its tile merges (`attention.cuh`).
/// That block has one to four warps and, for heads of 128, shared memory for 62 of them at a time; a tile has
/// 16 to 64 queries. In longer contexts few tiles may have most of the splits, and a launch of eight warps
/// for each query keeps more of them in flight.
pub(crate) const LAST_BLOCK_PARTS: usize = 16;
/// Blocks of each width that fit on a multiprocessor of an H100 (`attention.cu`, `attention_panels.cu`, heads
/// of 128).
const BLOCKS_OF_WIDTH: [usize; WIDTHS] = [6, 4, 2, 1];

/// Head sizes with a kernel for tiles of warpgroups, in the order of the kernels.
pub(super) const PANEL_HEAD_DIMS: [usize; 2] = [64, 128];

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
    /// Index of its first partial result in its chunk.
    first_part: u32,
    /// Distance between partial results of a query.
    part_stride: u32,
    /// Splits of a partial result, or 0 if a block processes all keys ([`PartSize`]).
    part_splits: u32,
    /// Number of its work items if the block that finishes last merges, else 0.
    num_runs: u32,
}

impl AttentionTile {
    fn splits(&self) -> Range<usize> {
        self.first_key as usize / SPLIT_KEYS..(self.end_key as usize).div_ceil(SPLIT_KEYS)
    }

    /// Partial results of a query that are merged into its row.
    fn merged_parts(&self) -> usize {
        let (first, end) = (self.first_key as usize, self.end_key as usize);
        let keys = self.part_splits as usize * SPLIT_KEYS;
        let of_all = if self.width() == PANELS { 0 } else { 1 };
        first.checked_div(keys).map_or(of_all, |first_part| end.div_ceil(keys) - first_part)
    }

    /// Number of its partial results. A block of warps that processes all keys has a second one of each query
    /// for the result of the group so far; one of warpgroups needs none.
    fn num_parts(&self) -> usize {
        let has_two = self.part_splits == 0 && self.width() != PANELS;
        let of_query = if has_two { self.splits().len().min(2) } else { self.merged_parts() };
        self.num_queries as usize * of_query
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
    /// Number of blocks of each width, per KV head, that run at once.
    pub(crate) running: [usize; 4],
    /// Maximum number of partial results of a query that the last block of its tile merges; at most
    /// [`LAST_BLOCK_PARTS`].
    pub(crate) last_block_parts: usize,
    /// Partial results of tiles without token trees. `None`: those that take least time.
    pub(crate) parts: Option<PartSize>,
    /// Whether there are kernels for tiles of warpgroups.
    pub(crate) has_panels: bool,
    /// Whether the pass is padded, so that similar ones replay the same graph.
    pub(crate) is_padded: bool,
}

impl Limits {
    /// Limits for serving: `min_runs` gives four times as many blocks as fit on all multiprocessors of an
    /// H100. `has_warpgroups`: the device runs the kernels of panels.
    pub(crate) fn of(layout: HeadLayout, has_warpgroups: bool) -> Self {
        let max_parts = PARTIAL_BYTES / size_of::<f32>() / part_len(layout);
        let per_head = |blocks: usize| (blocks * MULTIPROCESSORS / layout.num_kv_heads).max(1);
        Self {
            max_parts,
            max_own_blocks: max_own_blocks(layout),
            min_runs: per_head(4 * BLOCKS_OF_WIDTH[2]),
            running: BLOCKS_OF_WIDTH.map(per_head),
            last_block_parts: LAST_BLOCK_PARTS,
            parts: None,
            has_panels: has_warpgroups && PANEL_HEAD_DIMS.contains(&layout.head_dim),
            is_padded: false,
        }
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
    pub(crate) fn of(layout: HeadLayout, window: Option<u32>, has_warpgroups: bool) -> Self {
        let limits = Limits::of(layout, has_warpgroups);
        Self { group: layout.num_heads / layout.num_kv_heads, window, limits }
    }

    /// The same for a pass that is padded or not.
    pub(crate) fn padded(self, is_padded: bool) -> Self {
        Self { limits: Limits { is_padded, ..self.limits }, ..self }
    }
}

/// Tiles that share the memory for partial results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttentionChunk {
    /// Ranges of all work items, for blocks of each width.
    pub(super) work: [Range<usize>; WIDTHS],
    /// Range of the pass's queries of a KV head.
    pub(super) queries: Range<usize>,
    /// Number of partial results per KV head.
    pub(crate) num_parts: usize,
    /// Range of the pass's own blocks.
    pub(crate) own: Range<usize>,
    /// Maximum number of partial results of a query that a launch merges: for long contexts, and for token
    /// trees, whose queries have splits in several tiles. 0 if the last block of each tile does.
    pub(super) launch_merges: usize,
    /// Maximum number of partial results of a query that the last block of its tile merges.
    pub(super) blocks_merge: usize,
}

/// Tile of a query behind those of sequences (`NO_TILE` of `attention.cuh`).
const NO_TILE: u32 = u32::MAX;

/// A pass's queries for one key: tiles, their splits and their chunks. Every required split is in exactly one
/// work item; padding adds few ([`padding`](super::padding)).
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
        let (mut tiling, mut limits) = (Self::default(), key.limits);
        limits.has_panels = limits.has_panels && panels_fill_the_device(segments, key);
        let key = TilingKey { limits, ..key };
        let mut all = Vec::new();
        for (segment, &table) in segments.iter().zip(table_starts) {
            all.extend(tiling.add_tiles(segment, table, own, key));
        }
        tiling.choose_parts(&all, limits);
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

    /// Adds queries without a tile, up to `queries`, and tiles without queries: passes with other numbers of
    /// both then have equal launches.
    pub(crate) fn pad(&mut self, queries: usize) {
        self.tile_of.resize(queries, NO_TILE);
        self.tiles.resize(padded_list(self.tiles.len()), bytemuck::Zeroable::zeroed());
        if let Some(last) = self.chunks.last_mut() {
            last.queries.end = queries;
        }
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
        let limits = Limits { has_panels: limits.has_panels && segment.tree.is_none(), ..limits };
        let tile_len = tile_len(end - begin, splits, limits);
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
                part_splits: PartSize::Split.num_splits(),
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

    /// Sets the partial results of tiles without token trees.
    fn choose_parts(&mut self, all: &[TileGroup], limits: Limits) {
        for width in 0..WIDTHS {
            let of_width = |shared: &&TileGroup| {
                shared.tiles.len() == 1 && self.tiles[shared.tiles.start].width() == width
            };
            let which: Vec<usize> = all.iter().filter(of_width).map(|shared| shared.tiles.start).collect();
            let tiles = || which.iter().map(|&tile| &self.tiles[tile]);
            let size = limits.parts.map(|size| size.of_width(width));
            let size = size.unwrap_or_else(|| parts::fastest(tiles, width, limits));
            for tile in which {
                self.tiles[tile].part_splits = size.num_splits();
            }
        }
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
        let (mut num_parts, mut launch_merges, mut blocks_merge) = (0, 0, 0);
        let mut is_launched = Vec::with_capacity(chunk.len());
        for shared in chunk {
            let first = self.tiles[shared.tiles.start];
            let (first_split, merged) = (first.splits().start, first.merged_parts());
            let has_tree = shared.tiles.len() > 1;
            let many = merged > limits.last_block_parts || first.width() == PANELS;
            is_launched.push(has_tree || (first.part_splits != 0 && many));
            let of_who =
                if is_launched[is_launched.len() - 1] { &mut launch_merges } else { &mut blocks_merge };
            *of_who = merged.max(*of_who);
            for tile in &mut self.tiles[shared.tiles.clone()] {
                // The partial results of a row's tile are among the shared tile's.
                let of_splits = (tile.splits().start - first_split) as u32 * tile.part_stride;
                tile.first_part += num_parts as u32 + of_splits;
            }
            num_parts += first.num_parts();
        }
        let work = std::array::from_fn::<_, WIDTHS, _>(|width| self.add_work(chunk, width, limits));
        for item in work.iter().flat_map(|range| &self.work[range.clone()]) {
            if item.split != NO_SPLIT {
                self.tiles[item.tile as usize].num_runs += 1;
            }
        }
        for (shared, _) in chunk.iter().zip(&is_launched).filter(|(_, is_launched)| **is_launched) {
            self.tiles[shared.tiles.clone()].iter_mut().for_each(|tile| tile.num_runs = 0);
        }
        let end_of = |tile: &AttentionTile| (tile.first_query + tile.num_queries) as usize;
        let first_of = |shared: Option<&TileGroup>| shared.map(|shared| self.tiles[shared.tiles.start]);
        let queries = first_of(chunk.first()).map_or(0, |tile| tile.first_query as usize)
            ..first_of(chunk.last()).map_or(0, |tile| end_of(&tile));
        // Tree rows have their own blocks in order, other rows have none.
        let mut owning = chunk.iter().map(|shared| shared.own.clone()).filter(|own| !own.is_empty());
        let first_own = owning.next().unwrap_or_default();
        let own = first_own.start..owning.next_back().unwrap_or(first_own).end;
        self.chunks.push(AttentionChunk { work, queries, num_parts, own, launch_merges, blocks_merge });
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

/// Size of a partial result in numbers, for all KV heads.
pub(super) fn part_len(layout: HeadLayout) -> usize {
    layout.num_kv_heads * (layout.head_dim + 8)
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
fn tile_len(queries: usize, splits: usize, Limits { max_parts, has_panels, .. }: Limits) -> usize {
    let groups = splits.div_ceil(GROUP_SPLITS);
    if has_panels && queries > WIDE_QUERIES && TILE_QUERIES[PANELS] * groups <= max_parts {
        TILE_QUERIES[PANELS]
    } else if queries > TILE_QUERIES[0] && WIDE_QUERIES * splits <= max_parts {
        WIDE_QUERIES
    } else {
        TILE_QUERIES[0]
    }
}

/// Whether tiles of warpgroups leave work for all multiprocessors, if each block processes a group of splits.
/// Narrower tiles have more blocks.
fn panels_fill_the_device(segments: &[Segment<'_>], TilingKey { group, window, limits }: TilingKey) -> bool {
    let blocks = segments.iter().filter(|segment| segment.tree.is_none()).map(|segment| {
        let rows = segment.rows.len();
        let tiles =
            if rows * group > WIDE_QUERIES { (rows * group).div_ceil(TILE_QUERIES[PANELS]) } else { 0 };
        let keys = segment.start as usize + rows;
        let seen = window.map_or(keys, |window| keys.min(window as usize + rows));
        tiles * seen.div_ceil(GROUP_SPLITS * SPLIT_KEYS)
    });
    blocks.sum::<usize>() >= limits.running[PANELS]
}

#[cfg(test)]
mod tests;
