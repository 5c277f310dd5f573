//! Attention over a pass's tiles: checks and launches.

use std::ops::Range;

use cpu_kernels::HeadLayout;
use half::bf16;

use super::own_blocks::own_block_len;
use super::padding::padded_list;
use super::rows::check_rounded;
use super::tiling::{
    AttentionChunk, AttentionTile, LAST_BLOCK_PARTS, PANEL_HEAD_DIMS, PANELS, WIDTHS, WorkItem, part_len,
};
use super::{GatherBlocks, MAX_GRID_YZ, ProductInput};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, View, check, check_len};
use crate::cuda::sources::{ATTENTION, ATTENTION_MERGE, ATTENTION_PANELS, Kernel};

/// Maximum number of partial results of a row that one warp merges if few queries leave most of the device
/// idle. For more, eight warps merge them, with equal bits.
const MERGED_BY_A_WARP: usize = 8;
/// Number of warps that fill the device.
const FILLING_WARPS: usize = 4096;
/// Queries per block of the kernel in which one warp merges a query's splits.
const MERGED_QUERIES: usize = 4;
/// Head sizes with a kernel, in the order of the kernels.
const HEAD_DIMS: [usize; 5] = [16, 32, 64, 96, 128];

/// A pass's tiling on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TilingViews<'a> {
    pub(crate) tiles: View<'a, AttentionTile>,
    pub(crate) work: View<'a, WorkItem>,
    pub(crate) tile_of: View<'a, u32>,
    pub(crate) chunks: &'a [AttentionChunk],
}

impl TilingViews<'_> {
    /// Size of the partial results of the largest chunk, in numbers.
    pub(crate) fn partial_len(&self, layout: HeadLayout) -> usize {
        self.chunks.iter().map(|chunk| chunk.num_parts).max().unwrap_or(0) * part_len(layout)
    }

    /// Number of counters of finished blocks: as many for a pass that is padded as for one that is not, so that
    /// they need not be allocated again.
    pub(crate) fn arrived_len(&self, layout: HeadLayout) -> usize {
        padded_list(self.tiles.len()) * layout.num_kv_heads
    }

    /// Size of the own blocks of tree rows in the largest chunk, in numbers; 0 without trees.
    pub(crate) fn own_len(&self, layout: HeadLayout) -> usize {
        self.chunks.iter().map(|chunk| chunk.own.len()).max().unwrap_or(0) * own_block_len(layout)
    }
}

/// Own blocks of the rows of token trees; assembled for each chunk and layer.
#[derive(Debug)]
pub(crate) struct OwnBlockViews<'a, M> {
    /// `[own blocks of the pass][16]`.
    pub(crate) sources: View<'a, u32>,
    /// `[own blocks][kv heads][K | V of 16 keys]`, for the largest chunk.
    pub(crate) blocks: &'a mut Tensor<M, bf16>,
}

/// One layer's attention.
#[derive(Debug)]
pub(crate) struct Attention<'a, M> {
    /// `[rows, layout.row_width()]`.
    pub(crate) qkv: &'a Tensor<M, f32>,
    /// `[rows]`.
    pub(crate) positions: View<'a, u32>,
    /// In the layout of `WriteKv`: `[blocks][layers][kv heads][K | V of 16 keys]`.
    pub(crate) kv: &'a Tensor<M, bf16>,
    /// Present if the pass has token trees.
    pub(crate) own: Option<OwnBlockViews<'a, M>>,
    /// All block tables, concatenated. Each covers its tiles' keys with blocks inside `kv` or own blocks.
    pub(crate) tables: View<'a, u32>,
    pub(crate) tiling: TilingViews<'a>,
    /// `[parts][kv heads][head_dim + 8]`, for the largest chunk.
    pub(crate) partial: &'a mut Tensor<M, f32>,
    /// `[tiles][kv heads]`: finished blocks. Zeros before and after each launch.
    pub(crate) arrived: &'a mut Tensor<M, u32>,
    pub(crate) layout: HeadLayout,
    /// Index of this layer, and the number of layers.
    pub(crate) layer: (usize, usize),
    pub(crate) window: Option<u32>,
    /// `[rows, layout.q_width()]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
    /// `[rows, layout.q_width()]`: `out` as the input of a product.
    pub(crate) rounded: Option<ProductInput<'a, M>>,
}

/// The rounded output, and the kernels' parameter `panels`.
type Rounded<'b, 'a, M> = (&'b mut Option<&'a mut Tensor<M, bf16>>, usize);

impl<M: DeviceMemory> Attention<'_, M> {
    pub(crate) fn launch<E>(mut self, executor: &mut E, rows: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let HeadLayout { num_heads, num_kv_heads, head_dim } = self.layout;
        let kernel = kernel_for(head_dim, 0)?;
        let (layer, layers) = self.layer;
        let TilingViews { tiles, work, tile_of, chunks } = self.tiling;
        check(kernel.name, ("rows", rows), rows > 0 && !chunks.is_empty(), "at least 1, with tiles")?;
        check(kernel.name, ("layer", layer), layer < layers, format_args!("below {layers}"))?;
        let is_good = num_kv_heads > 0 && num_heads.is_multiple_of(num_kv_heads) && num_heads <= MAX_GRID_YZ;
        check(kernel.name, ("heads", num_heads), is_good, format_args!("a multiple of {num_kv_heads}"))?;
        check_len(kernel.name, "qkv", self.qkv.len(), rows * self.layout.row_width())?;
        check_len(kernel.name, "positions", self.positions.len(), rows)?;
        let queries = rows * num_heads / num_kv_heads;
        check_len(kernel.name, "tiles of queries", tile_of.len(), queries)?;
        let last = chunks
            .iter()
            .map(|chunk| (chunk.work[WIDTHS - 1].end, chunk.queries.end))
            .max()
            .unwrap_or_default();
        check_len(kernel.name, "work", work.len(), last.0)?;
        check(kernel.name, ("queries", last.1), last.1 == queries && tiles.len() > 0, queries)?;
        check_len(kernel.name, "partial", self.partial.len(), self.tiling.partial_len(self.layout))?;
        check_len(kernel.name, "counters", self.arrived.len(), self.tiling.arrived_len(self.layout))?;
        let most = chunks.iter().map(|chunk| chunk.blocks_merge).max().unwrap_or(0);
        let is_good = most <= LAST_BLOCK_PARTS;
        check(kernel.name, ("parts", most), is_good, format_args!("at most {LAST_BLOCK_PARTS}"))?;
        let own_len = self.own.as_ref().map_or(0, |own| own.blocks.len());
        check_len(kernel.name, "own blocks", own_len, self.tiling.own_len(self.layout))?;
        check_len(kernel.name, "out", self.out.len(), rows * self.layout.q_width())?;
        let size = (rows, self.layout.q_width());
        let (mut rounded, panels) = check_rounded(kernel.name, self.rounded.take(), size)?;
        chunks.iter().try_for_each(|chunk| self.launch_chunk(executor, chunk, (&mut rounded, panels)))
    }

    /// Launches a chunk: own blocks of trees, splits, and the merge unless blocks merge what they share.
    /// `launch` has checked everything.
    fn launch_chunk<E>(
        &mut self,
        executor: &mut E,
        chunk: &AttentionChunk,
        (rounded, panels): Rounded<'_, '_, M>,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        if let Some(OwnBlockViews { sources, blocks }) = self.own.as_mut().filter(|_| !chunk.own.is_empty()) {
            let (kv, layout, layer) = (self.kv, self.layout, self.layer);
            GatherBlocks { kv, sources: *sources, own: blocks, layout, layer }
                .launch(executor, chunk.own.clone())?;
        }
        for (width, work) in chunk.work.iter().enumerate().filter(|(_, work)| !work.is_empty()) {
            self.launch_work(executor, (work, chunk.own.start), width, (&mut *rounded, panels))?;
        }
        if chunk.launch_merges == 0 {
            return Ok(());
        }
        self.launch_merge(executor, chunk, (rounded, panels))
    }

    /// Launches the splits of the tiles of one width. The second item is the first own block of the chunk.
    fn launch_work<E>(
        &mut self,
        executor: &mut E,
        (turn_work, first_own): (&Range<usize>, usize),
        width: usize,
        (rounded, panels): Rounded<'_, '_, M>,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let HeadLayout { num_heads, num_kv_heads, head_dim } = self.layout;
        let TilingViews { tiles, work, .. } = self.tiling;
        let (layer, layers) = self.layer;
        let (group, window) = (num_heads / num_kv_heads, self.window.unwrap_or(0) as usize);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let own = self.own.as_ref().map(|own| &*own.blocks);
        let params = Params::default().read(self.qkv).view(self.positions).read(self.kv).read_if(own);
        let params =
            params.view(self.tables).view(tiles).view_from(work, turn_work.start).write(self.partial);
        let params = params.write(self.arrived).write(self.out).write_if(rounded.as_deref_mut());
        let params = params.u32(first_own).u32(self.layout.row_width()).u32(group).u32(layer).u32(layers);
        let params = params.u32(window).f32(scale).u32(panels);
        let grid = [turn_work.len() as u32, num_kv_heads as u32, 1];
        // SAFETY: these are the kernel's parameters; `launch` has checked rows, tiles, partial results,
        // counters and outputs, the batch its blocks.
        unsafe { executor.launch(kernel_for(head_dim, width)?, grid, &mut { params }) }
    }

    fn launch_merge<E>(
        &mut self,
        executor: &mut E,
        chunk: &AttentionChunk,
        (rounded, panels): Rounded<'_, '_, M>,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let HeadLayout { num_heads, num_kv_heads, head_dim } = self.layout;
        let TilingViews { tiles, tile_of, .. } = self.tiling;
        let (group, window) = (num_heads / num_kv_heads, self.window.unwrap_or(0) as usize);
        let queries = chunk.queries.len();
        let is_long = chunk.launch_merges > MERGED_BY_A_WARP && queries * num_kv_heads < FILLING_WARPS;
        let merge = ATTENTION_MERGE.kernel(usize::from(is_long));
        let params = Params::default().read(self.partial).view(self.positions).view(tiles).view(tile_of);
        let params = params.write(self.out).write_if(rounded.as_deref_mut()).u32(chunk.queries.start);
        let params = params.u32(queries).u32(group).u32(head_dim).u32(window).u32(panels);
        let blocks = if is_long { queries } else { queries.div_ceil(MERGED_QUERIES) };
        let grid = [blocks as u32, num_kv_heads as u32, 1];
        // SAFETY: these are the kernel's parameters; the tiles of these queries have every partial
        // result that a position needs.
        unsafe { executor.launch(merge, grid, &mut { params }) }
    }
}

/// Returns an error if no kernel supports heads of this size.
pub(crate) fn check_head_dim(head_dim: usize) -> Result<(), CudaError> {
    kernel_for(head_dim, 0).map(drop)
}

/// Returns the kernel for tiles of up to 16, 32, 64 or 128 queries.
fn kernel_for(head_dim: usize, width: usize) -> Result<&'static Kernel, CudaError> {
    if width == PANELS {
        let index = PANEL_HEAD_DIMS.iter().position(|&size| size == head_dim);
        let expected = format_args!("one of {PANEL_HEAD_DIMS:?}");
        check("attention_panels", ("head_dim", head_dim), index.is_some(), expected)?;
        return Ok(ATTENTION_PANELS.kernel(index.unwrap_or(0)));
    }
    let index = HEAD_DIMS.iter().position(|&size| size == head_dim);
    check("attention", ("head_dim", head_dim), index.is_some(), format_args!("one of {HEAD_DIMS:?}"))?;
    Ok(ATTENTION.kernel(index.unwrap_or(0) + width * HEAD_DIMS.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_some_head_sizes_have_a_kernel() {
        assert!(kernel_for(128, 0).is_ok_and(|kernel| kernel.name == "attention_128"));
        assert!(kernel_for(128, 2).is_ok_and(|kernel| kernel.name == "attention_wide_128"));
        assert!(kernel_for(16, 1).is_ok_and(|kernel| kernel.name == "attention_pair_16"));
        assert!(kernel_for(128, PANELS).is_ok_and(|kernel| kernel.name == "attention_panels_128"));
        let error = kernel_for(96, PANELS).unwrap_err().to_string();
        assert_eq!(error, "attention_panels: head_dim is 96, expected one of [64, 128]");
        let error = kernel_for(80, 2).unwrap_err().to_string();
        assert_eq!(error, "attention: head_dim is 80, expected one of [16, 32, 64, 96, 128]");
    }
}
