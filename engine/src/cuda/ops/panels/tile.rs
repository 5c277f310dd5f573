//! What a block of the kernels of panels computes.

use super::super::blocks::MULTIPROCESSORS;

/// Row tile of a kernel. Each unit of work is a row tile by 128 channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tile {
    pub(in crate::cuda::ops) rows: usize,
    /// Blocks per multiprocessor.
    pub(super) blocks: usize,
    /// Row tiles and channel tiles of a cluster of blocks, which share operands.
    pub(super) cluster: (usize, usize),
}

impl Tile {
    const fn of(rows: usize, blocks: usize) -> Self {
        Self { rows, blocks, cluster: (1, 1) }
    }

    const fn in_clusters(self, row_tiles: usize, channel_tiles: usize) -> Self {
        Self { cluster: (row_tiles, channel_tiles), ..self }
    }

    /// Number of blocks of a cluster.
    pub(crate) const fn cluster_size(&self) -> usize {
        self.cluster.0 * self.cluster.1
    }

    /// Number of multiprocessors that clusters fill. They lie in groups of 16 or 18, and a cluster in one
    /// group.
    pub(super) const fn multiprocessors(&self) -> usize {
        if self.cluster_size() > 2 { MULTIPROCESSORS / 16 * 16 } else { MULTIPROCESSORS }
    }

    /// Time of a step. Clusters read less from the cache (a KiB takes 17 ns) until multiplying takes longer.
    /// Fitted to times of bf16 on an H200 (docs/measurements/gpu.md); what clusters save is an estimate, and
    /// a step of int8 has the same bytes and instructions.
    pub(super) fn nanoseconds_of_step(&self) -> usize {
        let (row_tiles, channel_tiles) = self.cluster;
        let alone = 220 + 3 * self.rows;
        let saved_kib = (16 - 16 / row_tiles) + (self.rows - self.rows / channel_tiles) / 8;
        (alone - 17 * saved_kib).max(self.rows * 5 / 2)
    }
}

/// Tiles of the kernels of bf16 and FP8, in their order in the files: alone, then in clusters.
pub(crate) const TILES: [Tile; 8] = tiles(40);
/// The same of int8, whose instruction has no form of 40 rows.
pub(crate) const INT8_TILES: [Tile; 8] = tiles(48);
/// The same of FP8 with scales by block: none of 128 rows.
pub(crate) const BLOCK_TILES: [Tile; 5] = [TILES[0], TILES[1], TILES[2], TILES[3], TILES[5]];
/// Number of the first two whose blocks are alone.
pub(crate) const NUM_ALONE: usize = 5;

const fn tiles(third: usize) -> [Tile; 8] {
    [
        Tile::of(8, 2),
        Tile::of(16, 2),
        Tile::of(third, 1),
        Tile::of(80, 1),
        Tile::of(128, 1),
        Tile::of(80, 1).in_clusters(2, 1),
        Tile::of(128, 1).in_clusters(2, 1),
        Tile::of(128, 1).in_clusters(2, 2),
    ]
}

/// All of these tiles, or those whose blocks are alone.
pub(super) fn usable(tiles: &[Tile], in_clusters: bool) -> &[Tile] {
    let alone = tiles.iter().take_while(|tile| tile.cluster_size() == 1).count();
    if in_clusters { tiles } else { &tiles[..alone] }
}
