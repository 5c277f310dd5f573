//! Attention: queries cut into tiles that share a KV head, keys into splits at fixed positions. All index
//! arithmetic of the host's side is here, pure.

use half::bf16;

use super::MAX_GRID_YZ;
use crate::backend::HeadLayout;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::{ATTENTION, Kernel};
use crate::forward_batch::Segment;

/// Keys that a warp sums by itself: part of the numerics, as `attention.cu` has it.
const SPLIT_KEYS: usize = 128;
/// Queries of a tile, one dimension of the tensor cores' shape.
const TILE_QUERIES: usize = 16;
/// Head sizes that have a kernel, in its order.
const HEAD_DIMS: [usize; 5] = [16, 32, 64, 96, 128];

/// A tile, as `attention.cu` reads it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Query {
    first_query: u32,
    num_queries: u32,
    table: u32,
    first_key: u32,
    end_key: u32,
}

/// The tiles of a pass for one group size and window. `table_starts` says where each segment's block table begins.
pub(crate) fn tiles(
    segments: &[Segment<'_>],
    table_starts: &[u32],
    group: usize,
    window: Option<u32>,
) -> Vec<Query> {
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
            });
        }
    }
    tiles
}

/// Splits that the longest of these positions needs.
pub(crate) fn num_splits(positions: &[u32]) -> usize {
    positions.iter().max().map_or(0, |&last| (last as usize + 1).div_ceil(SPLIT_KEYS))
}

/// One layer's attention.
#[derive(Debug)]
pub(crate) struct Attention<'a, M> {
    /// `[rows, layout.row_width()]`.
    pub(crate) qkv: &'a Tensor<M, f32>,
    /// `[rows]`.
    pub(crate) positions: &'a Tensor<M, u32>,
    /// As `WriteKv` lays it out: `[blocks][layers][kv heads][K: 16 x head_dim | V: head_dim x 16]`.
    pub(crate) kv: &'a Tensor<M, bf16>,
    /// All block tables, one behind the other; each covers its tiles' keys with blocks inside `kv`.
    pub(crate) tables: &'a Tensor<M, u32>,
    pub(crate) tiles: &'a Tensor<M, Query>,
    /// `[rows, heads, splits, head_dim + 2]`.
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
    pub(crate) fn launch<E>(
        self,
        executor: &mut E,
        (rows, num_tiles, splits): (usize, usize, usize),
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let HeadLayout { num_heads, num_kv_heads, head_dim } = self.layout;
        let kernel = kernel_for(head_dim)?;
        let (layer, layers) = self.layer;
        check(kernel.name, ("rows", rows), rows > 0 && num_tiles > 0, "at least 1, with tiles")?;
        check(
            kernel.name,
            ("splits", splits),
            (1..=MAX_GRID_YZ).contains(&splits),
            format!("1 to {MAX_GRID_YZ}"),
        )?;
        check(kernel.name, ("layer", layer), layer < layers, format!("below {layers}"))?;
        let is_good = num_kv_heads > 0 && num_heads.is_multiple_of(num_kv_heads) && num_heads <= MAX_GRID_YZ;
        check(kernel.name, ("heads", num_heads), is_good, format!("a multiple of {num_kv_heads}"))?;
        check_len(kernel.name, "qkv", self.qkv.len(), rows * self.layout.row_width())?;
        check_len(kernel.name, "positions", self.positions.len(), rows)?;
        check_len(kernel.name, "tiles", self.tiles.len(), num_tiles)?;
        check_len(kernel.name, "partial", self.partial.len(), rows * num_heads * splits * (head_dim + 2))?;
        check_len(kernel.name, "out", self.out.len(), rows * self.layout.q_width())?;
        let rounded_len = self.rounded.as_ref().map_or(self.out.len(), |rounded| rounded.len());
        check_len(kernel.name, "rounded", rounded_len, rows * self.layout.q_width())?;
        let window = self.window.unwrap_or(0) as usize;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let params = Params::default().read(self.qkv).read(self.positions).read(self.kv).read(self.tables);
        let params = params.read(self.tiles).write(self.partial).u32(self.layout.row_width());
        let params = params.u32(num_heads / num_kv_heads).u32(layer).u32(layers).u32(window).f32(scale);
        // SAFETY: the kernel's parameters; rows, tiles and partial sums are there by the checks, blocks by the batch's.
        unsafe {
            executor
                .launch(kernel, [num_tiles as u32, num_kv_heads as u32, splits as u32], &mut { params })?;
        }
        let merge = ATTENTION.kernel(HEAD_DIMS.len());
        let params = Params::default().read(self.partial).read(self.positions).write(self.out);
        let params = params.write_if(self.rounded).u32(head_dim).u32(splits).u32(window);
        // SAFETY: as above; every split that a position needs is below `splits`, which the caller counted from them.
        unsafe { executor.launch(merge, [rows as u32, num_heads as u32, 1], &mut { params }) }
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

    #[test]
    fn splits_are_counted_from_the_last_position() {
        assert_eq!(num_splits(&[0]), 1);
        assert_eq!(num_splits(&[5, 127]), 1);
        assert_eq!(num_splits(&[128, 3]), 2);
        assert!(kernel_for(128).is_ok_and(|kernel| kernel.name == "attention_128"));
        let error = kernel_for(80).unwrap_err().to_string();
        assert_eq!(error, "attention: head_dim is 80, expected one of [16, 32, 64, 96, 128]");
    }
}
