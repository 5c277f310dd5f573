//! KV operations for token trees: assembles rows' own blocks before attention reads them, and copies the
//! accepted path to the slots of a chain.

use cpu_kernels::{BLOCK_SIZE, HeadLayout, KvShape, TokenCopy};
use half::bf16;

use super::{StepBuffer, check_grid};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, View, check, check_len};
use crate::cuda::sources::TREES;

/// Own blocks of tree rows.
#[derive(Debug)]
pub(crate) struct GatherBlocks<'a, M> {
    /// `[blocks][layers][kv heads][K | V of 16 keys]`.
    pub(crate) kv: &'a Tensor<M, bf16>,
    /// `[own blocks][16]`: slots inside `kv`, or `EMPTY_SLOT`.
    pub(crate) sources: View<'a, u32>,
    /// `[own blocks][kv heads][K | V of 16 keys]`.
    pub(crate) own: &'a mut Tensor<M, bf16>,
    pub(crate) layout: HeadLayout,
    /// Index of this layer, and the number of layers.
    pub(crate) layer: (usize, usize),
}

impl<M: DeviceMemory> GatherBlocks<'_, M> {
    /// Assembles the blocks of `which`; the first of them goes to the beginning of `own`.
    pub(crate) fn launch<E>(self, executor: &mut E, which: std::ops::Range<usize>) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let (kernel, (layer, layers)) = (TREES.kernel(0), self.layer);
        let HeadLayout { num_kv_heads, head_dim, .. } = self.layout;
        check_head_dim(kernel.name, head_dim)?;
        check_grid(kernel.name, "kv heads", num_kv_heads)?;
        check(kernel.name, ("layer", layer), layer < layers, format_args!("below {layers}"))?;
        check(kernel.name, ("blocks", which.len()), !which.is_empty(), "at least 1")?;
        check_len(kernel.name, "sources", self.sources.len(), which.end * BLOCK_SIZE)?;
        let len = which.len() * 2 * BLOCK_SIZE * num_kv_heads * head_dim;
        check_len(kernel.name, "own blocks", self.own.len(), len)?;
        let params =
            Params::default().read(self.kv).view_from(self.sources, which.start * BLOCK_SIZE).write(self.own);
        let params = params.u32(head_dim).u32(layer).u32(layers);
        let grid = [which.len() as u32, num_kv_heads as u32, 1];
        // SAFETY: these are the kernel's parameters; the checks ensure that blocks are in bounds, the batch
        // that slots are inside KV.
        unsafe { executor.launch(kernel, grid, &mut { params }) }
    }
}

/// Copies the keys and values of tokens in all layers, in order. Slots must be inside `kv`: the caller has
/// reserved them.
pub(crate) fn copy_tokens<E: Executor>(
    executor: &mut E,
    (kv, shape): (&mut Tensor<E::Memory, bf16>, KvShape),
    copies: &[TokenCopy],
    buffer: &mut StepBuffer<E::Memory, u32>,
) -> Result<(), CudaError> {
    let kernel = TREES.kernel(1);
    check_head_dim(kernel.name, shape.head_dim)?;
    check(kernel.name, ("copies", copies.len()), !copies.is_empty(), "at least 1")?;
    check_grid(kernel.name, "kv heads", shape.num_kv_heads)?;
    let most = copies.iter().map(|copy| copy.from.block.max(copy.to.block)).max().unwrap_or_default();
    check_len(kernel.name, "kv", kv.len(), (most as usize + 1) * shape.block_len())?;
    let slot = |slot: cpu_kernels::KvSlot| slot.block * BLOCK_SIZE as u32 + slot.offset;
    let slots: Vec<u32> = copies.iter().flat_map(|copy| [slot(copy.from), slot(copy.to)]).collect();
    let on_device = buffer.fill(executor, &slots, "copies of tokens")?;
    let params = Params::default().write(kv).read(on_device).u32(copies.len()).u32(shape.head_dim);
    let grid = [shape.num_layers as u32, shape.num_kv_heads as u32, 1];
    // SAFETY: these are the kernel's parameters; the check ensures that blocks of KV are in bounds.
    unsafe { executor.launch(kernel, grid, &mut { params }) }
}

/// Checks the head size: the kernel copies chunks of 16 bytes, with one thread per dimension.
fn check_head_dim(kernel: &'static str, head_dim: usize) -> Result<(), CudaError> {
    let is_good = head_dim.is_multiple_of(8) && (8..=128).contains(&head_dim);
    check(kernel, ("head_dim", head_dim), is_good, "a multiple of 8, at most 128")
}
