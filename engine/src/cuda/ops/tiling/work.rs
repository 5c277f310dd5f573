//! The work of blocks: runs of a tile's splits.

use std::ops::Range;

use super::super::padding::{padded_list, rounded_up};
use super::parts::PartSize;
use super::{GROUP_SPLITS, Limits, TileGroup, Tiling};

/// Maximum number of splits per block if each has its own partial result.
const RUN: usize = 8;
/// A run of a tile's splits, or padding.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct WorkItem {
    pub(super) tile: u32,
    pub(super) split: u32,
    pub(super) end_split: u32,
}

impl WorkItem {
    fn new(tile: usize, splits: Range<usize>) -> Self {
        Self { tile: tile as u32, split: splits.start as u32, end_split: splits.end as u32 }
    }
}

/// Marks a padding entry.
pub(super) const NO_SPLIT: u32 = u32::MAX;

/// A tile and the splits of it that are to be processed.
type Needed = (usize, Range<usize>);

impl Tiling {
    /// Adds the work of the chunk's tiles of one width. Returns its range.
    pub(super) fn add_work(&mut self, chunk: &[TileGroup], width: usize, limits: Limits) -> Range<usize> {
        let first_work = self.work.len();
        let mut tiles: Vec<Needed> = Vec::new();
        for shared in chunk {
            tiles.push((shared.tiles.start, shared.splits.clone()));
            tiles.extend(shared.tiles.clone().skip(1).map(|tile| (tile, self.tiles[tile].splits())));
        }
        tiles.retain(|&(tile, _)| self.tiles[tile].width() == width);
        for size in [PartSize::All, PartSize::Group, PartSize::Split] {
            let of_size = |(tile, _): &&Needed| self.tiles[*tile].part_splits == size.num_splits();
            let of_size: Vec<_> = tiles.iter().filter(of_size).cloned().collect();
            match size {
                PartSize::All => self.add_whole_tiles(of_size),
                PartSize::Group => self.add_runs(&of_size, GROUP_SPLITS),
                PartSize::Split => {
                    let splits = of_size.iter().map(|(_, splits)| splits.len()).sum();
                    self.add_runs(&of_size, run_len(splits, limits.min_runs));
                }
            }
        }
        let len = self.work.len() - first_work;
        let nothing = WorkItem { tile: 0, split: NO_SPLIT, end_split: NO_SPLIT };
        let padded = if limits.is_padded { padded_list(len) } else { rounded_up(len) };
        self.work.extend(std::iter::repeat_n(nothing, padded - len));
        first_work..self.work.len()
    }

    /// Adds one item for each tile, the longest first: they take different times.
    fn add_whole_tiles(&mut self, mut tiles: Vec<Needed>) {
        tiles.sort_by_key(|(_, splits)| std::cmp::Reverse(splits.len()));
        self.work.extend(tiles.into_iter().map(|(tile, splits)| WorkItem::new(tile, splits)));
    }

    /// Adds the splits of tiles in runs that begin at multiples of `run`.
    fn add_runs(&mut self, tiles: &[Needed], run: usize) {
        let ends = tiles.iter().map(|(_, splits)| splits.end);
        // Tiles of a sequence read the same keys, so they are placed together.
        for split in (0..ends.max().unwrap_or(0)).step_by(run) {
            let needs = |(tile, needed): &Needed| {
                let splits = needed.start.max(split)..needed.end.min(split + run);
                (!splits.is_empty()).then(|| WorkItem::new(*tile, splits))
            };
            self.work.extend(tiles.iter().filter_map(needs));
        }
    }
}

/// Number of splits of a run, of `splits` in all, that leaves at least `min_runs` blocks.
pub(super) fn run_len(splits: usize, min_runs: usize) -> usize {
    (splits / min_runs).clamp(1, RUN)
}
