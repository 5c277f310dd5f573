//! What token trees need of KV: rows' own blocks, put together before attention reads them, and the path that stays, copied to
//! where a chain's would lie.

use cpu_kernels::{BLOCK_SIZE, HeadLayout, KvShape, TokenCopy};
use half::bf16;

use super::{Held, MAX_GRID_YZ};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, View, check, check_len};
use crate::cuda::sources::TREES;

/// Blocks of rows of trees.
#[derive(Debug)]
pub(crate) struct GatherBlocks<'a, M> {
    /// `[blocks][layers][kv heads][K: 16 x head_dim | V: head_dim x 16]`.
    pub(crate) kv: &'a Tensor<M, bf16>,
    /// `[own blocks][16]`: slots inside `kv`, or none.
    pub(crate) sources: View<'a, u32>,
    /// `[own blocks][kv heads][K: 16 x head_dim | V: head_dim x 16]`.
    pub(crate) own: &'a mut Tensor<M, bf16>,
    pub(crate) layout: HeadLayout,
    /// This layer and how many there are.
    pub(crate) layer: (usize, usize),
}

impl<M: DeviceMemory> GatherBlocks<'_, M> {
    /// Puts the blocks of `which` together, the first of them at the beginning of `own`.
    pub(crate) fn launch<E>(self, executor: &mut E, which: std::ops::Range<usize>) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let (kernel, (layer, layers)) = (TREES.kernel(0), self.layer);
        let HeadLayout { num_kv_heads, head_dim, .. } = self.layout;
        check_head_dim(kernel.name, head_dim)?;
        let is_good = (1..=MAX_GRID_YZ).contains(&num_kv_heads);
        check(kernel.name, ("kv heads", num_kv_heads), is_good, format!("1 to {MAX_GRID_YZ}"))?;
        check(kernel.name, ("layer", layer), layer < layers, format!("below {layers}"))?;
        check(kernel.name, ("blocks", which.len()), !which.is_empty(), "at least 1")?;
        check_len(kernel.name, "sources", self.sources.len(), which.end * BLOCK_SIZE)?;
        let len = which.len() * 2 * BLOCK_SIZE * num_kv_heads * head_dim;
        check_len(kernel.name, "own blocks", self.own.len(), len)?;
        let params =
            Params::default().read(self.kv).view_from(self.sources, which.start * BLOCK_SIZE).write(self.own);
        let params = params.u32(head_dim).u32(layer).u32(layers);
        let grid = [which.len() as u32, num_kv_heads as u32, 1];
        // SAFETY: the kernel's parameters; blocks are there by the checks, slots inside KV by the batch's.
        unsafe { executor.launch(kernel, grid, &mut { params }) }
    }
}

/// Copies what tokens left behind in all layers, one after the other. Slots must be inside `kv`: whoever names them has reserved them.
pub(crate) fn copy_tokens<E: Executor>(
    executor: &mut E,
    (kv, shape): (&mut Tensor<E::Memory, bf16>, KvShape),
    copies: &[TokenCopy],
    held: &mut Held<E::Memory, u32>,
) -> Result<(), CudaError> {
    let kernel = TREES.kernel(1);
    check_head_dim(kernel.name, shape.head_dim)?;
    check(kernel.name, ("copies", copies.len()), !copies.is_empty(), "at least 1")?;
    let is_good = (1..=MAX_GRID_YZ).contains(&shape.num_kv_heads);
    check(kernel.name, ("kv heads", shape.num_kv_heads), is_good, format!("1 to {MAX_GRID_YZ}"))?;
    let most = copies.iter().map(|copy| copy.from.block.max(copy.to.block)).max().unwrap_or_default();
    check_len(kernel.name, "kv", kv.len(), (most as usize + 1) * shape.block_len())?;
    let slot = |slot: cpu_kernels::KvSlot| slot.block * BLOCK_SIZE as u32 + slot.offset;
    let slots: Vec<u32> = copies.iter().flat_map(|copy| [slot(copy.from), slot(copy.to)]).collect();
    let on_device = held.fill(executor, &slots, "copies of tokens")?;
    let params = Params::default().write(kv).read(on_device).u32(copies.len()).u32(shape.head_dim);
    let grid = [shape.num_layers as u32, shape.num_kv_heads as u32, 1];
    // SAFETY: the kernel's parameters; blocks of KV are there by the check.
    unsafe { executor.launch(kernel, grid, &mut { params }) }
}

/// Heads are copied in chunks of 16 bytes, and a thread has a dimension.
fn check_head_dim(kernel: &'static str, head_dim: usize) -> Result<(), CudaError> {
    let is_good = head_dim.is_multiple_of(8) && (8..=128).contains(&head_dim);
    check(kernel, ("head_dim", head_dim), is_good, "a multiple of 8, at most 128")
}
