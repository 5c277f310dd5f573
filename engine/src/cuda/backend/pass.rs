//! One pass's ids, positions, slots, angles and block tables, uploaded once for all layers.

use std::sync::{Arc, Mutex, PoisonError};

use crate::block_manager::BLOCK_SIZE;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Tensor};
use crate::cuda::ops::{Query, tiles};
use crate::forward_batch::ForwardBatch;
use crate::rope::Rope;

/// What kernels read of a pass.
#[derive(Debug)]
pub(super) struct Inputs<M> {
    /// `[rows]`.
    pub(super) token_ids: Tensor<M, u32>,
    /// `[rows]`.
    pub(super) positions: Tensor<M, u32>,
    /// `[rows]`: block * 16 + offset.
    pub(super) slots: Tensor<M, u32>,
    /// `[rows, head_dim / 2]`.
    pub(super) cos: Tensor<M, f32>,
    pub(super) sin: Tensor<M, f32>,
    /// Block tables of all segments, one behind the other.
    pub(super) tables: Tensor<M, u32>,
    /// Rows that want logits.
    pub(super) logit_rows: Tensor<M, u32>,
    /// Where each segment's block table begins.
    table_starts: Vec<u32>,
}

/// Group and window, and the tiles for them.
type Tiles<M> = ((usize, Option<u32>), Arc<Tensor<M, Query>>);

/// A pass on its way through the layers.
#[derive(Debug)]
pub(crate) struct GpuPass<'a, M> {
    batch: &'a ForwardBatch<'a>,
    /// None where uploading failed: nothing then runs that reads them.
    inputs: Option<Inputs<M>>,
    /// A model has one group and few windows, so there are few of these.
    tiles: Mutex<Vec<Tiles<M>>>,
}

impl<'a, M> GpuPass<'a, M> {
    pub(super) fn new(batch: &'a ForwardBatch<'a>, inputs: Option<Inputs<M>>) -> Self {
        Self { batch, inputs, tiles: Mutex::default() }
    }

    pub(super) fn batch(&self) -> &ForwardBatch<'a> {
        self.batch
    }

    pub(super) fn rows(&self) -> usize {
        self.batch.num_rows()
    }

    pub(super) fn inputs(&self) -> &Inputs<M> {
        self.inputs.as_ref().expect("operations stop at the first error")
    }
}

impl<M: DeviceMemory> GpuPass<'_, M> {
    /// The pass's queries as attention takes them.
    pub(super) fn tiles<E: Executor<Memory = M>>(
        &self,
        executor: &mut E,
        group: usize,
        window: Option<u32>,
    ) -> Result<Arc<Tensor<M, Query>>, CudaError> {
        let mut known = self.tiles.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, tiles)) = known.iter().find(|(key, _)| *key == (group, window)) {
            return Ok(Arc::clone(tiles));
        }
        let made = tiles(&self.batch.segments, &self.inputs().table_starts, group, window);
        let uploaded = Arc::new(Tensor::of(executor, &made, "tiles of queries")?);
        known.push(((group, window), Arc::clone(&uploaded)));
        Ok(uploaded)
    }
}

/// Uploads a pass; `rope` turns its positions into angles.
pub(super) fn upload<E: Executor>(
    executor: &mut E,
    batch: &ForwardBatch<'_>,
    rope: &Rope,
) -> Result<Inputs<E::Memory>, CudaError> {
    let half = rope.half_dim();
    let (mut cos, mut sin) = (vec![0.0f32; batch.num_rows() * half], vec![0.0f32; batch.num_rows() * half]);
    for ((&position, cos), sin) in
        batch.positions.iter().zip(cos.chunks_exact_mut(half)).zip(sin.chunks_exact_mut(half))
    {
        rope.angles(position, cos, sin);
    }
    let slots: Vec<u32> =
        batch.slot_mapping.iter().map(|slot| slot.block * BLOCK_SIZE as u32 + slot.offset).collect();
    let logit_rows: Vec<u32> = batch.logit_rows.iter().map(|&row| row as u32).collect();
    let (mut tables, mut table_starts) = (Vec::new(), Vec::new());
    for segment in &batch.segments {
        table_starts.push(tables.len() as u32);
        tables.extend_from_slice(segment.block_table);
    }
    Ok(Inputs {
        token_ids: Tensor::of(executor, &batch.token_ids, "ids of a pass")?,
        positions: Tensor::of(executor, &batch.positions, "positions of a pass")?,
        slots: Tensor::of(executor, &slots, "slots of a pass")?,
        cos: Tensor::of(executor, &cos, "angles of a pass")?,
        sin: Tensor::of(executor, &sin, "angles of a pass")?,
        tables: Tensor::of(executor, &tables, "block tables of a pass")?,
        logit_rows: Tensor::of(executor, &logit_rows, "logit rows of a pass")?,
        table_starts,
    })
}
