//! One pass's ids, positions, slots, angles and block tables, uploaded once for all layers into memory that passes share.

use crate::block_manager::BLOCK_SIZE;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor};
use crate::cuda::ops::{Held, Query, tiles};
use crate::forward_batch::ForwardBatch;
use crate::rope::Rope;

/// What kernels read of the pass under way.
#[derive(Debug)]
pub(super) struct Inputs<M> {
    /// `[rows]`.
    pub(super) token_ids: Held<M, u32>,
    /// `[rows]`.
    pub(super) positions: Held<M, u32>,
    /// `[rows]`: block * 16 + offset.
    pub(super) slots: Held<M, u32>,
    /// `[rows, head_dim / 2]`.
    pub(super) cos: Held<M, f32>,
    pub(super) sin: Held<M, f32>,
    /// Block tables of all segments, one behind the other.
    pub(super) tables: Held<M, u32>,
    /// Rows that want logits.
    pub(super) logit_rows: Held<M, u32>,
    /// Queries as attention takes them; a model has one group and few windows, so there are few of these.
    tiles: Vec<Tiles<M>>,
}

/// The tiles for one group size and window.
#[derive(Debug)]
struct Tiles<M> {
    key: (usize, Option<u32>),
    queries: Held<M, Query>,
    /// Whether they are this pass's.
    is_fresh: bool,
}

impl<M> Default for Inputs<M> {
    fn default() -> Self {
        Self {
            token_ids: Held::default(),
            positions: Held::default(),
            slots: Held::default(),
            cos: Held::default(),
            sin: Held::default(),
            tables: Held::default(),
            logit_rows: Held::default(),
            tiles: Vec::new(),
        }
    }
}

/// A pass on its way through the layers.
#[derive(Debug)]
pub(crate) struct GpuPass<'a> {
    pub(super) batch: &'a ForwardBatch<'a>,
    /// Where each segment's block table begins.
    table_starts: Vec<u32>,
}

impl<'a> GpuPass<'a> {
    pub(super) fn new(batch: &'a ForwardBatch<'a>) -> Self {
        let starts = batch
            .segments
            .iter()
            .scan(0, |next, segment| Some(std::mem::replace(next, *next + segment.block_table.len() as u32)));
        Self { batch, table_starts: starts.collect() }
    }

    pub(super) fn rows(&self) -> usize {
        self.batch.num_rows()
    }
}

impl<M: DeviceMemory> Inputs<M> {
    /// Uploads a pass; `rope` turns its positions into angles.
    pub(super) fn upload<E: Executor<Memory = M>>(
        &mut self,
        executor: &mut E,
        batch: &ForwardBatch<'_>,
        rope: &Rope,
    ) -> Result<(), CudaError> {
        let half = rope.half_dim();
        let (mut cos, mut sin) =
            (vec![0.0f32; batch.num_rows() * half], vec![0.0f32; batch.num_rows() * half]);
        for ((&position, cos), sin) in
            batch.positions.iter().zip(cos.chunks_exact_mut(half)).zip(sin.chunks_exact_mut(half))
        {
            rope.angles(position, cos, sin);
        }
        let slots: Vec<u32> =
            batch.slot_mapping.iter().map(|slot| slot.block * BLOCK_SIZE as u32 + slot.offset).collect();
        let logit_rows: Vec<u32> = batch.logit_rows.iter().map(|&row| row as u32).collect();
        let tables: Vec<u32> =
            batch.segments.iter().flat_map(|segment| segment.block_table).copied().collect();
        self.token_ids.fill(executor, &batch.token_ids, "ids of a pass")?;
        self.positions.fill(executor, &batch.positions, "positions of a pass")?;
        self.slots.fill(executor, &slots, "slots of a pass")?;
        self.cos.fill(executor, &cos, "angles of a pass")?;
        self.sin.fill(executor, &sin, "angles of a pass")?;
        self.tables.fill(executor, &tables, "block tables of a pass")?;
        self.logit_rows.fill(executor, &logit_rows, "logit rows of a pass")?;
        self.tiles.iter_mut().for_each(|tiles| tiles.is_fresh = false);
        Ok(())
    }

    /// Makes the pass's queries for a group size and window be there, and says where among [`Inputs::tiles_at`].
    pub(super) fn make_tiles<E: Executor<Memory = M>>(
        &mut self,
        executor: &mut E,
        pass: &GpuPass<'_>,
        key: (usize, Option<u32>),
    ) -> Result<usize, CudaError> {
        let at = self.tiles.iter().position(|tiles| tiles.key == key).unwrap_or_else(|| {
            self.tiles.push(Tiles { key, queries: Held::default(), is_fresh: false });
            self.tiles.len() - 1
        });
        let entry = &mut self.tiles[at];
        if !entry.is_fresh {
            let made = tiles(&pass.batch.segments, &pass.table_starts, key.0, key.1);
            entry.queries.fill(executor, &made, "tiles of queries")?;
            entry.is_fresh = true;
        }
        Ok(at)
    }

    /// See [`Inputs::make_tiles`].
    pub(super) fn tiles_at(&self, at: usize) -> &Held<M, Query> {
        &self.tiles[at].queries
    }
}
