//! Operations on the heads of a row. Shapes and twins are documented in `heads.cu`.

use cpu_kernels::HeadLayout;
use half::bf16;

use super::check_grid;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, View, check, check_len};
use crate::cuda::sources::{HEADS, Kernel};

/// Angles of rows.
#[derive(Debug)]
pub(crate) struct Angles<'a, M> {
    /// `[rows]`, all in the table.
    pub(crate) positions: View<'a, u32>,
    /// Cosines, then sines of every position from 0 on, `[positions][head_dim]`.
    pub(crate) table: &'a Tensor<M, f32>,
}

impl<M: DeviceMemory> Angles<'_, M> {
    fn check(&self, kernel: &'static Kernel, rows: usize, head_dim: usize) -> Result<(), CudaError> {
        check_len(kernel.name, "positions", self.positions.len(), rows)?;
        check_len(kernel.name, "angles", self.table.len(), head_dim)
    }
}

/// RMS norm of each query and key head.
#[derive(Debug)]
pub(crate) struct NormHeads<'a, M> {
    /// `[rows, layout.row_width()]`, changed in place.
    pub(crate) qkv: &'a mut Tensor<M, f32>,
    pub(crate) layout: HeadLayout,
    /// `[head_dim]`.
    pub(crate) q_weight: &'a Tensor<M, f32>,
    pub(crate) q_eps: f32,
    /// `[head_dim]`.
    pub(crate) k_weight: &'a Tensor<M, f32>,
    pub(crate) k_eps: f32,
}

impl<M: DeviceMemory> NormHeads<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, rows: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let (kernel, Self { qkv, layout, q_weight, q_eps, k_weight, k_eps }) = (HEADS.kernel(0), self);
        check_heads(kernel, rows, layout, qkv.len())?;
        for weight in [q_weight, k_weight] {
            check_len(kernel.name, "norm", weight.len(), layout.head_dim)?;
        }
        let params = Params::default().write(qkv).read(q_weight).read(k_weight);
        let params = params.u32(layout.num_heads).u32(layout.num_kv_heads).u32(layout.head_dim);
        let params = params.f32(q_eps).f32(k_eps);
        let grid = [rows as u32, (layout.num_heads + layout.num_kv_heads) as u32, 1];
        // SAFETY: these are the kernel's parameters; the checks ensure that every head is in bounds.
        unsafe { executor.launch(kernel, grid, &mut { params }) }
    }
}

/// Applies rotary embedding to the query and key heads by the angles of each row.
pub(crate) fn rotate<E: Executor>(
    executor: &mut E,
    qkv: &mut Tensor<E::Memory, f32>,
    angles: &Angles<'_, E::Memory>,
    (rows, layout): (usize, HeadLayout),
) -> Result<(), CudaError> {
    check_heads(HEADS.kernel(1), rows, layout, qkv.len())?;
    // SAFETY: the check ensures that every head is in bounds.
    unsafe { rotate_at(executor, qkv.address(), angles, (rows, layout)) }
}

/// [`rotate`] by address.
///
/// # Safety
/// `qkv` must hold `rows` rows of the layout that outlive the launch, and nothing else may write them.
pub(crate) unsafe fn rotate_at<E: Executor>(
    executor: &mut E,
    qkv: u64,
    angles: &Angles<'_, E::Memory>,
    (rows, layout): (usize, HeadLayout),
) -> Result<(), CudaError> {
    let kernel = HEADS.kernel(1);
    angles.check(kernel, rows, layout.head_dim)?;
    let params = Params::default().u64(qkv).view(angles.positions).read(angles.table);
    let params = params.u32(layout.num_heads).u32(layout.num_kv_heads).u32(layout.head_dim);
    let grid = [rows as u32, (layout.num_heads + layout.num_kv_heads) as u32, 1];
    // SAFETY: these are the kernel's parameters; the checks ensure that every head is in bounds, `begin` that
    // positions are inside the table.
    unsafe { executor.launch(kernel, grid, &mut { params }) }
}

/// Writes keys and values to paged KV.
#[derive(Debug)]
pub(crate) struct WriteKv<'a, M> {
    /// `[rows, layout.row_width()]`.
    pub(crate) qkv: &'a Tensor<M, f32>,
    /// `[rows]`: block * 16 + offset, all different, each inside `kv`, or `u32::MAX` for a row that is not
    /// stored.
    pub(crate) slots: View<'a, u32>,
    /// `[blocks][layers][kv heads][K | V of 16 keys]`, in the layout of `kv.cuh`.
    pub(crate) kv: &'a mut Tensor<M, bf16>,
    pub(crate) layout: HeadLayout,
    /// Index of this layer, and the number of layers.
    pub(crate) layer: (usize, usize),
}

impl<M: DeviceMemory> WriteKv<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, rows: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let (kernel, layout, (layer, layers)) = (HEADS.kernel(2), self.layout, self.layer);
        self.check(kernel, rows)?;
        let params = Params::default().read(self.qkv).view(self.slots).write(self.kv).u32(layout.num_heads);
        let params = params.u32(layout.num_kv_heads).u32(layout.head_dim).u32(layer).u32(layers);
        // SAFETY: these are the kernel's parameters; the checks ensure that rows are in bounds, the batch
        // that slots are inside KV.
        unsafe { executor.launch(kernel, [rows as u32, layout.num_kv_heads as u32, 1], &mut { params }) }
    }
}

impl<M: DeviceMemory> WriteKv<'_, M> {
    /// Fused [`rotate`] and write; the keys in `qkv` stay unrotated.
    ///
    /// # Safety
    /// The owner of `qkv` must expect its queries to be rotated in place.
    pub(crate) unsafe fn launch_with_rotate<E>(
        self,
        executor: &mut E,
        angles: &Angles<'_, M>,
        rows: usize,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let kernel = HEADS.kernel(3);
        self.check(kernel, rows)?;
        let Self { qkv, slots, kv, layout, layer: (layer, layers) } = self;
        angles.check(kernel, rows, layout.head_dim)?;
        let params = Params::default().read(qkv).view(angles.positions).read(angles.table);
        let params = params.view(slots).write(kv);
        let params = params.u32(layout.num_heads).u32(layout.num_kv_heads).u32(layout.head_dim);
        let grid = [rows as u32, (layout.num_heads + layout.num_kv_heads) as u32, 1];
        // SAFETY: these are the kernel's parameters; the checks ensure that heads are in bounds, the batch
        // that slots are inside KV, `begin` that positions are inside the table.
        unsafe { executor.launch(kernel, grid, &mut { params.u32(layer).u32(layers) }) }
    }

    fn check(&self, kernel: &'static Kernel, rows: usize) -> Result<(), CudaError> {
        let (layout, (layer, layers)) = (self.layout, self.layer);
        check_heads(kernel, rows, layout, self.qkv.len())?;
        let head_dim = layout.head_dim;
        check(kernel.name, ("head_dim", head_dim), head_dim.is_multiple_of(8), "a multiple of 8")?;
        check(kernel.name, ("layer", layer), layer < layers, format_args!("below {layers}"))?;
        check_len(kernel.name, "slots", self.slots.len(), rows)?;
        let block = layers * layout.num_kv_heads * 32 * head_dim;
        check(kernel.name, ("kv", self.kv.len()), self.kv.len().is_multiple_of(block), "whole blocks")
    }
}

fn check_heads(
    kernel: &'static Kernel,
    rows: usize,
    layout: HeadLayout,
    len: usize,
) -> Result<(), CudaError> {
    check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
    check(kernel.name, ("head_dim", layout.head_dim), layout.head_dim.is_multiple_of(2), "even")?;
    let heads = layout.num_heads + layout.num_kv_heads;
    check_grid(kernel.name, "heads", heads)?;
    check_len(kernel.name, "qkv", len, rows * layout.row_width())
}
