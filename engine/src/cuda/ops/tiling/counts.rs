//! Counts of a layer's attention, from its tiling: for models of its time.

use cpu_kernels::HeadLayout;
use half::bf16;

use super::{
    AttentionTile, GROUP_SPLITS, NO_SPLIT, PANELS, SPLIT_KEYS, TILE_QUERIES, Tiling, WIDE_QUERIES, WIDTHS,
    WorkItem, part_len,
};

/// Work of a layer's attention over all KV heads.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttentionCounts {
    /// Number of blocks of each width.
    pub(crate) blocks: [usize; WIDTHS],
    /// Number of blocks of 16 keys that those blocks read; and of 16 keys x 16 queries that warps process.
    pub(crate) key_blocks: [usize; WIDTHS],
    pub(crate) warp_blocks: usize,
    /// Bytes of keys, values and queries that blocks read.
    pub(crate) bytes_read: usize,
    /// Bytes of partial results that blocks write, and read again to add to them.
    pub(crate) written_parts: usize,
    pub(crate) folded_parts: usize,
    /// Bytes of partial results that are merged into rows, and those of them that tiles' last blocks read.
    pub(crate) merged_parts: usize,
    pub(crate) merged_by_blocks: usize,
}

/// See [`AttentionCounts`].
pub(crate) fn count_attention(tiling: &Tiling, layout: HeadLayout) -> AttentionCounts {
    let HeadLayout { num_kv_heads, head_dim, .. } = layout;
    let mut counted = AttentionCounts::default();
    let part_bytes = part_len(layout) * size_of::<f32>();
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
        let (written, folded) = parts_of_block(tile, work);
        counted.written_parts += written * tile.num_queries as usize * part_bytes;
        counted.folded_parts += folded * tile.num_queries as usize * part_bytes;
    }
    // A query of a token tree has its partial results in the tile that contains it.
    for &tile in &tiling.tile_of {
        let tile = &tiling.tiles[tile as usize];
        let bytes = tile.merged_parts() * part_bytes;
        counted.merged_parts += bytes;
        counted.merged_by_blocks += if tile.num_runs > 0 { bytes } else { 0 };
    }
    counted
}

/// Number of partial results of each query that a block writes, and that it reads again. Tiles of four warps
/// keep the result of the group so far in shared memory, those of warpgroups also that of the groups before.
fn parts_of_block(tile: &AttentionTile, work: &WorkItem) -> (usize, usize) {
    let splits = (work.end_split - work.split) as usize;
    if tile.part_splits == 1 {
        return (splits, 0);
    }
    let groups = (work.end_split as usize).div_ceil(GROUP_SPLITS) - work.split as usize / GROUP_SPLITS;
    if tile.width() == PANELS {
        return (if tile.part_splits == 0 { 0 } else { groups }, 0);
    }
    let written = if tile.num_queries as usize > WIDE_QUERIES / 2 { groups } else { splits };
    (written, written - if tile.part_splits == 0 { 1 } else { groups })
}
