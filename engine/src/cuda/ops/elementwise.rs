//! What works on each row or number by itself: embedding, norm with the residual sum, rope with the way into KV,
//! SwiGLU. Shapes and twins stand in the kernels' heads.

use half::bf16;

use super::{MAX_GRID_YZ, Output};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::{EMBEDDING, RMS_NORM, ROPE_KV, SWIGLU};

/// Widest head whose kernels are there.
const MAX_HEAD_DIM: usize = 256;

/// Rows of a table, widened. Ids must be below the table's rows: whoever built the batch checked them.
#[derive(Debug)]
pub(crate) struct Embedding<'a, M> {
    /// `[vocab, hidden]`.
    pub(crate) table: &'a Tensor<M, bf16>,
    /// `[rows]`.
    pub(crate) token_ids: &'a Tensor<M, u32>,
    /// `[rows, hidden]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
}

impl<M> Embedding<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, rows: usize, hidden: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
        M: DeviceMemory,
    {
        let kernel = EMBEDDING.kernel(0);
        check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
        check_len(kernel.name, "token_ids", self.token_ids.len(), rows)?;
        check_len(kernel.name, "out", self.out.len(), rows * hidden)?;
        check(
            kernel.name,
            ("table", self.table.len()),
            self.table.len().is_multiple_of(hidden),
            "whole rows",
        )?;
        let params = Params::default().read(self.table).read(self.token_ids).write(self.out).u32(hidden);
        // SAFETY: the kernel's parameters; rows of `token_ids` and `out` are there by the checks, rows of the table
        // by the caller's.
        unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }
    }
}

/// Adds to the residual stream and normalises it.
#[derive(Debug)]
pub(crate) struct RmsNorm<'a, M> {
    /// `[hidden rows, width]`.
    pub(crate) hidden: &'a mut Tensor<M, f32>,
    /// What is added first, `[hidden rows, width]`.
    pub(crate) delta: Option<&'a Tensor<M, f32>>,
    /// `[width]`.
    pub(crate) weight: &'a Tensor<M, f32>,
    /// Which hidden row each output row is of, all different; else the same.
    pub(crate) row_map: Option<&'a Tensor<M, u32>>,
    pub(crate) eps: f32,
    /// `[rows, width]`.
    pub(crate) out: Output<'a, M>,
}

impl<M: DeviceMemory> RmsNorm<'_, M> {
    /// `hidden_rows` bounds what `row_map` may name.
    pub(crate) fn launch<E>(
        mut self,
        executor: &mut E,
        (rows, hidden_rows): (usize, usize),
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let kernel = self.out.choose(RMS_NORM.kernel(0), RMS_NORM.kernel(1));
        let width = self.weight.len();
        check(kernel.name, ("rows", rows), rows > 0 && rows <= hidden_rows, format!("1 to {hidden_rows}"))?;
        check_len(kernel.name, "hidden", self.hidden.len(), hidden_rows * width)?;
        check_len(kernel.name, "out", self.out.len(), rows * width)?;
        if let Some(delta) = self.delta {
            check_len(kernel.name, "delta", delta.len(), hidden_rows * width)?;
        }
        if let Some(map) = self.row_map {
            check_len(kernel.name, "row_map", map.len(), rows)?;
        }
        let params = Params::default().write(self.hidden).read_if(self.delta).read(self.weight);
        let params = self.out.param(params.read_if(self.row_map)).u32(width).f32(self.eps);
        // SAFETY: the kernel's parameters; every row is there by the checks, rows that `row_map` names by the caller's.
        unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }
    }
}

/// Queries' and keys', or cosines and sines.
type Pair<'a, M> = (&'a Tensor<M, f32>, &'a Tensor<M, f32>);

/// Query and key heads normalised where the model does so and turned; keys and values stored.
#[derive(Debug)]
pub(crate) struct RopeKv<'a, M> {
    /// `[rows, (heads + 2 kv heads) * head_dim]`.
    pub(crate) qkv: &'a mut Tensor<M, f32>,
    /// Weights `[head_dim]` of the heads' norms.
    pub(crate) norms: Option<Pair<'a, M>>,
    /// Cosines and sines `[positions, head_dim / 2]`.
    pub(crate) angles: Pair<'a, M>,
    /// `[rows]`, each below the positions that have angles.
    pub(crate) positions: &'a Tensor<M, u32>,
    /// `[rows]`: block * 16 + offset, all different, each inside `kv`.
    pub(crate) slots: &'a Tensor<M, u32>,
    /// `[blocks][layers][kv heads][K: 16 x head_dim | V: head_dim x 16]`.
    pub(crate) kv: &'a mut Tensor<M, bf16>,
    pub(crate) heads: crate::backend::HeadLayout,
    /// This layer and how many there are.
    pub(crate) layer: (usize, usize),
    pub(crate) eps: f32,
}

impl<M: DeviceMemory> RopeKv<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, rows: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let kernel = ROPE_KV.kernel(0);
        let heads = self.heads;
        let (layer, layers) = self.layer;
        check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
        let is_good = heads.head_dim.is_multiple_of(2) && heads.head_dim <= MAX_HEAD_DIM;
        check(kernel.name, ("head_dim", heads.head_dim), is_good, format!("even, to {MAX_HEAD_DIM}"))?;
        check(kernel.name, ("layer", layer), layer < layers, format!("below {layers}"))?;
        let grid_y = heads.num_heads + 2 * heads.num_kv_heads;
        check(kernel.name, ("heads", grid_y), grid_y <= MAX_GRID_YZ, format!("to {MAX_GRID_YZ}"))?;
        check_len(kernel.name, "qkv", self.qkv.len(), rows * heads.row_width())?;
        check_len(kernel.name, "positions", self.positions.len(), rows)?;
        check_len(kernel.name, "slots", self.slots.len(), rows)?;
        let block = layers * heads.num_kv_heads * 32 * heads.head_dim;
        check(kernel.name, ("kv", self.kv.len()), self.kv.len().is_multiple_of(block), "whole blocks")?;
        for norm in self.norms.iter().flat_map(|(q, k)| [q, k]) {
            check_len(kernel.name, "norms", norm.len(), heads.head_dim)?;
        }
        let params = Params::default()
            .write(self.qkv)
            .read_if(self.norms.map(|n| n.0))
            .read_if(self.norms.map(|n| n.1));
        let params = params.read(self.angles.0).read(self.angles.1).read(self.positions).read(self.slots);
        let params = params.write(self.kv).u32(heads.num_heads).u32(heads.num_kv_heads).u32(heads.head_dim);
        let params = params.u32(layer).u32(layers).f32(self.eps);
        // SAFETY: the kernel's parameters; rows are there by the checks, positions and slots inside angles and KV by
        // the batch's.
        unsafe { executor.launch(kernel, [rows as u32, grid_y as u32, 1], &mut { params }) }
    }
}

/// silu(gate) * up.
#[derive(Debug)]
pub(crate) struct Swiglu<'a, M> {
    /// `[rows, 2 * width]`.
    pub(crate) gate_up: &'a Tensor<M, f32>,
    /// `[rows, width]`.
    pub(crate) out: Output<'a, M>,
}

impl<M: DeviceMemory> Swiglu<'_, M> {
    pub(crate) fn launch<E>(mut self, executor: &mut E, rows: usize, width: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let kernel = self.out.choose(SWIGLU.kernel(0), SWIGLU.kernel(1));
        check(kernel.name, ("rows", rows), (1..=MAX_GRID_YZ).contains(&rows), format!("1 to {MAX_GRID_YZ}"))?;
        check_len(kernel.name, "gate_up", self.gate_up.len(), rows * 2 * width)?;
        check_len(kernel.name, "out", self.out.len(), rows * width)?;
        let params = self.out.param(Params::default().read(self.gate_up)).u32(width);
        let grid = [width.div_ceil(kernel.threads as usize) as u32, rows as u32, 1];
        // SAFETY: the kernel's parameters; every row is there by the checks.
        unsafe { executor.launch(kernel, grid, &mut { params }) }
    }
}
