//! Attention of one layer. KV blocks for rows of token trees are gathered first, into memory that all layers
//! share.

use super::{GpuKv, GpuPass, GpuRows, State};
use crate::backend::AttentionLayer;
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{Attention, OwnBlockViews, TilingKey, ensure_capacity};

impl<E: Executor> State<E> {
    /// Attention of the pass's rows of queries in `qkv` over the KV blocks of their sequences.
    pub(super) fn attend(
        &mut self,
        kv: &GpuKv<E::Memory>,
        at: AttentionLayer,
        (pass, qkv): (&GpuPass<'_>, &Tensor<E::Memory, f32>),
        out: &mut GpuRows<E::Memory>,
    ) -> Result<(), CudaError> {
        let AttentionLayer { layout, layer, window } = at;
        let (layer, kv, out_len, rows) = ((layer, kv.shape.num_layers), &kv.blocks, out.len, pass.rows());
        let size = (rows, out_len / rows);
        let rounding = self.ensure_rounded(size)?;
        let Self { executor, partial, arrived, own, inputs, drawing, rounded, .. } = self;
        let (arrays, part) = (&drawing.arrays, inputs.part(pass.part));
        let tiling = part.tiling(arrays, TilingKey::of(layout, window, executor.attends_in_panels()));
        let partial =
            ensure_capacity(partial, executor, tiling.partial_len(layout), "partial sums of attention")?;
        // New memory is zero, and kernels leave zeros.
        let num_counters = tiling.arrived_len(layout);
        let arrived = ensure_capacity(arrived, executor, num_counters, "counters of attention's blocks")?;
        let own = match tiling.own_len(layout) {
            0 => None,
            len => {
                let blocks = ensure_capacity(own, executor, len, "blocks of rows of token trees")?;
                Some(OwnBlockViews { sources: arrays.input(&part.sources), blocks })
            }
        };
        let (positions, tables) = (arrays.input(&part.positions), arrays.input(&part.tables));
        let (out, _) = out.write();
        let (address, rounded) = (out.address(), rounded.as_mut().zip(rounding));
        let attention = Attention {
            qkv,
            positions,
            kv,
            own,
            tables,
            tiling,
            partial,
            arrived,
            layout,
            layer,
            window,
            out,
            rounded,
        };
        attention.launch(executor, rows)?;
        self.set_rounded_source(address, size, rounding);
        Ok(())
    }
}
