//! Attention: queries cut into tiles that share a KV head, keys into splits at fixed positions. All index
//! arithmetic of the host's side is here, pure.

use std::ops::Range;

use cpu_kernels::{HeadLayout, Segment};
use half::bf16;

use super::MAX_GRID_YZ;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, View, check, check_len};
use crate::cuda::sources::{ATTENTION, Kernel};

/// Keys that a warp sums by itself: part of the numerics, as `attention.cu` has it.
const SPLIT_KEYS: usize = 128;
/// Queries of a tile, one dimension of the tensor cores' shape.
const TILE_QUERIES: usize = 16;
/// Splits of a row that one warp joins; more are joined by eight warps, to the same bits.
const MERGED_BY_A_WARP: usize = 8;
/// Head sizes that have a kernel, in its order.
const HEAD_DIMS: [usize; 5] = [16, 32, 64, 96, 128];

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
}

/// A split of a tile, or none.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Work {
    tile: u32,
    split: u32,
}

/// In place of a split where there is none.
const NO_SPLIT: u32 = u32::MAX;

/// Tiles that share the memory of what their splits come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Of all work.
    work: Range<usize>,
    /// Of the pass's queries of a KV head.
    queries: Range<usize>,
    /// Parts for each KV head.
    pub(crate) num_parts: usize,
    /// Of the tile that has most.
    most_splits: usize,
}

/// A pass's queries for one group size and window: tiles, their splits and the turns they take. One work item a split that
/// is needed, and no more than a sixteenth besides.
#[derive(Debug, Default)]
pub(crate) struct Tiling {
    pub(crate) tiles: Vec<Query>,
    pub(crate) work: Vec<Work>,
    /// The tile of each query.
    pub(crate) tile_of: Vec<u32>,
    pub(crate) turns: Vec<Turn>,
}

impl Tiling {
    /// `table_starts` says where each segment's block table begins; a turn has at most `most_parts`, or one tile.
    pub(crate) fn new(
        segments: &[Segment<'_>],
        table_starts: &[u32],
        (group, window): (usize, Option<u32>),
        most_parts: usize,
    ) -> Self {
        let mut tiling = Self { tiles: tiles(segments, table_starts, group, window), ..Self::default() };
        let mut first = 0;
        while first < tiling.tiles.len() {
            let end = tiling.end_of_turn(first, most_parts);
            tiling.add_turn(first..end);
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

    fn add_turn(&mut self, which: Range<usize>) {
        let mut num_parts = 0;
        for tile in &mut self.tiles[which.clone()] {
            tile.first_part = num_parts as u32;
            num_parts += tile.num_parts();
        }
        let (tiles, first_work) = (&self.tiles[which.clone()], self.work.len());
        let ends = tiles.iter().map(|tile| tile.splits().end);
        // Tiles of a sequence read the same keys: they come together.
        for split in 0..ends.max().unwrap_or(0) {
            let needs = |(tile, number): (&Query, usize)| {
                tile.splits().contains(&split).then_some(Work { tile: number as u32, split: split as u32 })
            };
            self.work.extend(tiles.iter().zip(which.clone()).filter_map(needs));
        }
        let len = self.work.len() - first_work;
        self.work.extend(std::iter::repeat_n(Work { tile: 0, split: NO_SPLIT }, rounded_up(len) - len));
        let end_of = |tile: &Query| (tile.first_query + tile.num_queries) as usize;
        let queries =
            tiles.first().map_or(0, |tile| tile.first_query as usize)..tiles.last().map_or(0, end_of);
        let most_splits = tiles.iter().map(|tile| tile.splits().len()).max().unwrap_or(0);
        self.turns.push(Turn { work: first_work..self.work.len(), queries, num_parts, most_splits });
    }
}

/// The next of few sizes, by at most a sixteenth larger: grids of steps that are alike are equal, and a graph of one is a graph
/// of the other.
fn rounded_up(len: usize) -> usize {
    len.next_multiple_of((len.next_power_of_two() / 32).max(1))
}

/// Numbers that a query's split comes to, for all KV heads.
fn part_len(layout: HeadLayout) -> usize {
    layout.num_kv_heads * (layout.head_dim + 2)
}

/// Parts of a turn at most.
pub(crate) fn most_parts(layout: HeadLayout) -> usize {
    PARTIAL_BYTES / size_of::<f32>() / part_len(layout)
}

/// Bytes of what splits come to, of so many rows whose sequences are up to `max_len` long.
pub(crate) fn partial_bytes(rows: usize, layout: HeadLayout, max_len: usize) -> usize {
    let (group, splits) = (layout.num_heads / layout.num_kv_heads, max_len.div_ceil(SPLIT_KEYS));
    let bytes_of = |queries: usize| queries * splits * part_len(layout) * size_of::<f32>();
    bytes_of(rows * group).min(PARTIAL_BYTES.max(bytes_of(TILE_QUERIES)))
}

/// The tiles of a pass for one group size and window. `table_starts` says where each segment's block table begins.
fn tiles(segments: &[Segment<'_>], table_starts: &[u32], group: usize, window: Option<u32>) -> Vec<Query> {
    let mut tiles = Vec::new();
    for (segment, &table) in segments.iter().zip(table_starts) {
        let (begin, end) = (segment.rows.start * group, segment.rows.end * group);
        for first in (begin..end).step_by(TILE_QUERIES) {
            let last = end.min(first + TILE_QUERIES) - 1;
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

/// Where a pass's tiling lies on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TilingViews<'a> {
    pub(crate) tiles: View<'a, Query>,
    pub(crate) work: View<'a, Work>,
    pub(crate) tile_of: View<'a, u32>,
    pub(crate) turns: &'a [Turn],
}

impl TilingViews<'_> {
    /// Numbers of what the splits of a turn come to.
    pub(crate) fn partial_len(&self, layout: HeadLayout) -> usize {
        self.turns.iter().map(|turn| turn.num_parts).max().unwrap_or(0) * part_len(layout)
    }
}

/// One layer's attention.
#[derive(Debug)]
pub(crate) struct Attention<'a, M> {
    /// `[rows, layout.row_width()]`.
    pub(crate) qkv: &'a Tensor<M, f32>,
    /// `[rows]`.
    pub(crate) positions: View<'a, u32>,
    /// As `WriteKv` lays it out: `[blocks][layers][kv heads][K: 16 x head_dim | V: head_dim x 16]`.
    pub(crate) kv: &'a Tensor<M, bf16>,
    /// All block tables, one behind the other; each covers its tiles' keys with blocks inside `kv`.
    pub(crate) tables: View<'a, u32>,
    pub(crate) tiling: TilingViews<'a>,
    /// `[parts][kv heads][head_dim + 2]`, for the turn that has most.
    pub(crate) partial: &'a mut Tensor<M, f32>,
    pub(crate) layout: HeadLayout,
    /// This layer and how many there are.
    pub(crate) layer: (usize, usize),
    pub(crate) window: Option<u32>,
    /// `[rows, layout.q_width()]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
    /// `[rows, layout.q_width()]`: `out` as a product reads it.
    pub(crate) rounded: Option<&'a mut Tensor<M, bf16>>,
}

impl<M: DeviceMemory> Attention<'_, M> {
    pub(crate) fn launch<E>(mut self, executor: &mut E, rows: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let HeadLayout { num_heads, num_kv_heads, head_dim } = self.layout;
        let kernel = kernel_for(head_dim)?;
        let (layer, layers) = self.layer;
        let TilingViews { tiles, work, tile_of, turns } = self.tiling;
        check(kernel.name, ("rows", rows), rows > 0 && !turns.is_empty(), "at least 1, with tiles")?;
        check(kernel.name, ("layer", layer), layer < layers, format!("below {layers}"))?;
        let is_good = num_kv_heads > 0 && num_heads.is_multiple_of(num_kv_heads) && num_heads <= MAX_GRID_YZ;
        check(kernel.name, ("heads", num_heads), is_good, format!("a multiple of {num_kv_heads}"))?;
        check_len(kernel.name, "qkv", self.qkv.len(), rows * self.layout.row_width())?;
        check_len(kernel.name, "positions", self.positions.len(), rows)?;
        let queries = rows * num_heads / num_kv_heads;
        check_len(kernel.name, "tiles of queries", tile_of.len(), queries)?;
        let last = turns.iter().map(|turn| (turn.work.end, turn.queries.end)).max().unwrap_or_default();
        check_len(kernel.name, "work", work.len(), last.0)?;
        check(kernel.name, ("queries", last.1), last.1 == queries && tiles.len() > 0, format!("{queries}"))?;
        check_len(kernel.name, "partial", self.partial.len(), self.tiling.partial_len(self.layout))?;
        check_len(kernel.name, "out", self.out.len(), rows * self.layout.q_width())?;
        let rounded_len = self.rounded.as_ref().map_or(self.out.len(), |rounded| rounded.len());
        check_len(kernel.name, "rounded", rounded_len, rows * self.layout.q_width())?;
        turns.iter().try_for_each(|turn| self.launch_turn(executor, kernel, turn))
    }

    /// The splits of a turn, and what joins them. All was checked.
    fn launch_turn<E>(
        &mut self,
        executor: &mut E,
        kernel: &'static Kernel,
        turn: &Turn,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let HeadLayout { num_heads, num_kv_heads, head_dim } = self.layout;
        let TilingViews { tiles, work, tile_of, .. } = self.tiling;
        let (layer, layers) = self.layer;
        let (group, window) = (num_heads / num_kv_heads, self.window.unwrap_or(0) as usize);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let params = Params::default().read(self.qkv).view(self.positions).read(self.kv).view(self.tables);
        let params = params.view(tiles).view_from(work, turn.work.start).write(self.partial);
        let params =
            params.u32(self.layout.row_width()).u32(group).u32(layer).u32(layers).u32(window).f32(scale);
        let grid = [turn.work.len() as u32, num_kv_heads as u32, 1];
        // SAFETY: the kernel's parameters; rows, tiles and parts are there by the checks, blocks by the batch's.
        unsafe { executor.launch(kernel, grid, &mut { params }) }?;
        let is_long = turn.most_splits > MERGED_BY_A_WARP;
        let merge = ATTENTION.kernel(HEAD_DIMS.len() + usize::from(is_long));
        let params = Params::default().read(self.partial).view(self.positions).view(tiles).view(tile_of);
        let params = params.write(self.out).write_if(self.rounded.as_deref_mut()).u32(turn.queries.start);
        let params = params.u32(group).u32(head_dim).u32(window);
        let grid = [turn.queries.len() as u32, num_kv_heads as u32, 1];
        // SAFETY: as above; the tiles of these queries have a part for every split that a position needs.
        unsafe { executor.launch(merge, grid, &mut { params }) }
    }
}

/// Whether there is a kernel for heads of this size.
pub(crate) fn check_head_dim(head_dim: usize) -> Result<(), CudaError> {
    kernel_for(head_dim).map(drop)
}

fn kernel_for(head_dim: usize) -> Result<&'static Kernel, CudaError> {
    let index = HEAD_DIMS.iter().position(|&size| size == head_dim);
    let known = format!("one of {HEAD_DIMS:?}");
    check("attention", ("head_dim", head_dim), index.is_some(), known)?;
    Ok(ATTENTION.kernel(index.unwrap_or(0)))
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
            most_parts in 1usize..2000,
        ) {
            let mut segments = Vec::new();
            let mut row = 0;
            for &(rows, start) in &lens {
                segments.push(Segment { rows: row..row + rows, start, block_table: &[], tree: None });
                row += rows;
            }
            let starts = vec![0; lens.len()];
            let Tiling { tiles, work, tile_of, turns } = Tiling::new(&segments, &starts, (group, window), most_parts);
            let (mut next_query, mut next_work) = (0, 0);
            for turn in &turns {
                prop_assert_eq!((turn.queries.start, turn.work.start), (next_query, next_work));
                (next_query, next_work) = (turn.queries.end, turn.work.end);
                let mut seen = vec![false; turn.num_parts];
                let mut in_turn = std::collections::BTreeSet::new();
                let real = work[turn.work.clone()].iter().filter(|work| work.split != NO_SPLIT);
                for work in real.clone() {
                    let tile = &tiles[work.tile as usize];
                    in_turn.insert(work.tile);
                    prop_assert!(tile.splits().contains(&(work.split as usize)));
                    prop_assert!(turn.queries.contains(&(tile.first_query as usize)));
                    let first = tile.first_part + (work.split - tile.first_key / 128) * tile.num_queries;
                    for part in first..first + tile.num_queries {
                        prop_assert!(!std::mem::replace(&mut seen[part as usize], true), "part {} twice", part);
                    }
                }
                prop_assert!(seen.iter().all(|seen| *seen));
                prop_assert!(turn.num_parts <= most_parts || in_turn.len() == 1);
                prop_assert!(turn.work.len() * 16 <= real.count() * 17);
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
            for tile in tiles(&segments, &starts, group, window) {
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
        let tiling = Tiling::new(&[segment], &[0], (4, None), most_parts(layout));
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
        let tiling = Tiling::new(&segments, &[0; 64], (4, None), 1 << 20);
        let useful = tiling.work.iter().filter(|work| work.split != NO_SPLIT).count();
        println!("{} pieces of work, {useful} useful, before {}", tiling.work.len(), 64 * 256);
        assert_eq!(useful, 256 + 63);
        assert!(tiling.work.len() * 10 <= useful * 11, "{}", tiling.work.len());
    }

    #[test]
    fn only_some_head_sizes_have_a_kernel() {
        assert!(kernel_for(128).is_ok_and(|kernel| kernel.name == "attention_128"));
        let error = kernel_for(80).unwrap_err().to_string();
        assert_eq!(error, "attention: head_dim is 80, expected one of [16, 32, 64, 96, 128]");
    }
}
