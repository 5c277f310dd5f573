//! Inputs of one pass: ids, positions, slots, tiles and block tables. One copy serves all layers and
//! the draws, and the memory is reused by the next pass.

use cpu_kernels::BLOCK_SIZE;

use super::State;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Tensor, check_len};
use crate::cuda::ops::{
    Angles, AttentionChunk, AttentionTile, OwnBlocks, Place, StepArrays, Tiling, TilingKey, TilingViews,
    WorkItem,
};
use crate::draws::DrawPlan;
use crate::forward_batch::ForwardBatch;
use crate::rope::Rope;

/// Slot of a row that stores no keys and values (`NO_SLOT` of `heads.cu`).
const NO_SLOT: u32 = u32::MAX;

/// Where the inputs of the current pass are in the arrays of its step.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    pub(super) rows: RowPlaces,
    all_rows: PartInputs,
    logit_rows: PartInputs,
}

/// Where inputs of all rows are.
#[derive(Debug, Default)]
pub(super) struct RowPlaces {
    /// `[rows]`.
    pub(super) token_ids: Place<u32>,
    /// `[rows]`: block * 16 + offset, or [`NO_SLOT`].
    pub(super) slots: Place<u32>,
    /// Rows whose logits are requested.
    pub(super) logit_rows: Place<u32>,
}

/// Rows that operations work on. Layers compute all rows; after the last one has stored its keys and values,
/// it computes those with logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PassPart {
    AllRows,
    LogitRows,
}

/// Where the inputs of a part's attention are.
#[derive(Debug, Default)]
pub(super) struct PartInputs {
    /// `[rows]`.
    pub(super) positions: Place<u32>,
    /// Block tables of all segments, followed by those of rows of trees.
    pub(super) tables: Place<u32>,
    /// Blocks to copy from when blocks for rows of trees are gathered.
    pub(super) sources: Place<u32>,
    /// One per key that the model's layers have: usually one group size and few windows.
    tilings: Vec<PlacedTiling>,
}

/// Tiling for one key.
#[derive(Debug)]
struct PlacedTiling {
    key: TilingKey,
    chunks: Vec<AttentionChunk>,
    tiles: Place<AttentionTile>,
    work: Place<WorkItem>,
    /// The tiles of queries.
    tile_of: Place<u32>,
}

impl PlacedTiling {
    /// A tiling without tiles.
    fn new(key: TilingKey) -> Self {
        let (chunks, tiles, work, tile_of) = Default::default();
        Self { key, chunks, tiles, work, tile_of }
    }

    /// Arrays whose size depends only on the size of the pass come first, so that their offsets stay the same
    /// in the next pass.
    fn put<M>(&mut self, arrays: &mut StepArrays<M>, tiling: Tiling) {
        self.tile_of = arrays.put(&tiling.tile_of);
        self.tiles = arrays.put(&tiling.tiles);
        self.work = arrays.put(&tiling.work);
        self.chunks = tiling.chunks;
    }
}

/// A pass, as the layers use it.
#[derive(Debug)]
pub(crate) struct GpuPass<'a> {
    batch: &'a ForwardBatch<'a>,
    pub(super) part: PassPart,
}

impl<'a> GpuPass<'a> {
    /// The rows of `batch`, which are this part of the pass.
    pub(super) fn new(batch: &'a ForwardBatch<'a>, part: PassPart) -> Self {
        Self { batch, part }
    }

    pub(super) fn rows(&self) -> usize {
        self.batch.num_rows()
    }
}

impl<E: Executor> State<E> {
    /// Uploads what the kernels of a pass and of its draws read. `logit_part` are the rows with logits, if
    /// others have none.
    pub(super) fn begin(
        &mut self,
        (batch, logit_part): (&ForwardBatch<'_>, Option<&ForwardBatch<'_>>),
        draws: &DrawPlan,
        rope: &Rope,
    ) -> Result<(), CudaError> {
        // The table has an angle for every position of a sequence of the maximum length.
        let needed =
            batch.positions.iter().max().map_or(0, |&last| (last as usize + 1) * 2 * rope.half_dim());
        check_len("a pass", "angles", self.angles.as_ref().map_or(0, Tensor::len), needed)?;
        self.prepare_draws(draws, batch.is_padded);
        let Self { executor, inputs, drawing, .. } = self;
        drawing.arrays.end_draws();
        inputs.prepare(&mut drawing.arrays, batch, logit_part);
        drawing.put_edits(&draws.edits);
        drawing.upload(executor)
    }
}

impl Inputs {
    /// Adds the inputs of a pass to the arrays of its step.
    fn prepare<M>(
        &mut self,
        arrays: &mut StepArrays<M>,
        batch: &ForwardBatch<'_>,
        logit_part: Option<&ForwardBatch<'_>>,
    ) {
        let Self { rows, all_rows, logit_rows } = self;
        *rows = RowPlaces::put(arrays, batch);
        let of_all = all_rows.put(arrays, batch);
        let of_logits = logit_part.map(|part| logit_rows.put(arrays, part));
        // Last, because tables grow with every block and would move the arrays after them.
        all_rows.put_tables(arrays, &of_all);
        of_logits.iter().for_each(|tables| logit_rows.put_tables(arrays, tables));
    }

    pub(super) fn part(&self, part: PassPart) -> &PartInputs {
        match part {
            PassPart::AllRows => &self.all_rows,
            PassPart::LogitRows => &self.logit_rows,
        }
    }

    /// Adds a key: every later pass gets a tiling for it.
    pub(super) fn add_tiling_key(&mut self, key: TilingKey) {
        for PartInputs { tilings, .. } in [&mut self.all_rows, &mut self.logit_rows] {
            if tilings.iter().all(|placed| placed.key != key) {
                tilings.push(PlacedTiling::new(key));
            }
        }
    }
}

impl RowPlaces {
    fn put<M>(arrays: &mut StepArrays<M>, batch: &ForwardBatch<'_>) -> Self {
        let mut slots: Vec<u32> =
            batch.slot_mapping.iter().map(|slot| slot.block * BLOCK_SIZE as u32 + slot.offset).collect();
        slots.resize(batch.num_rows(), NO_SLOT);
        let logit_rows: Vec<u32> = batch.logit_rows.iter().map(|&row| row as u32).collect();
        Self {
            token_ids: arrays.put(&batch.token_ids),
            slots: arrays.put(&slots),
            logit_rows: arrays.put(&logit_rows),
        }
    }
}

/// Block tables of a part, and the blocks to copy from.
struct Tables {
    tables: Vec<u32>,
    own: OwnBlocks,
}

impl PartInputs {
    /// Adds the inputs of a part, tables excepted.
    fn put<M>(&mut self, arrays: &mut StepArrays<M>, batch: &ForwardBatch<'_>) -> Tables {
        let mut tables: Vec<u32> =
            batch.segments.iter().flat_map(|segment| segment.block_table).copied().collect();
        let starts = table_starts(batch);
        let own = OwnBlocks::new(&batch.segments, &mut tables);
        self.positions = arrays.put(&batch.positions);
        for placed in &mut self.tilings {
            let key = placed.key.padded(batch.is_padded);
            let mut tiling = Tiling::new(&batch.segments, &starts, &own, key);
            if batch.is_padded {
                tiling.pad(batch.num_rows() * key.group);
            }
            placed.put(arrays, tiling);
        }
        Tables { tables, own }
    }

    fn put_tables<M>(&mut self, arrays: &mut StepArrays<M>, Tables { tables, own }: &Tables) {
        self.tables = arrays.put(tables);
        self.sources = arrays.put(&own.sources);
    }

    /// The current pass's tiling for a key that was added with [`Inputs::add_tiling_key`].
    pub(super) fn tiling<'a, M: DeviceMemory>(
        &'a self,
        arrays: &'a StepArrays<M>,
        key: TilingKey,
    ) -> TilingViews<'a> {
        let placed = self.tilings.iter().find(|placed| placed.key == key);
        let PlacedTiling { chunks, tiles, work, tile_of, .. } =
            placed.expect("a model's groups and windows are told as it is loaded");
        let (tiles, work, tile_of) = (arrays.input(tiles), arrays.input(work), arrays.input(tile_of));
        TilingViews { tiles, work, tile_of, chunks }
    }

    /// Angles of all rows, which are in `table`.
    pub(super) fn angles<'a, M: DeviceMemory>(
        &self,
        arrays: &'a StepArrays<M>,
        table: Option<&'a Tensor<M, f32>>,
    ) -> Angles<'a, M> {
        let table = table.expect("`begin` has found the angles of its positions");
        Angles { positions: arrays.input(&self.positions), table }
    }
}

/// Offset of each segment's block table.
fn table_starts(batch: &ForwardBatch<'_>) -> Vec<u32> {
    let starts = batch
        .segments
        .iter()
        .scan(0, |next, segment| Some(std::mem::replace(next, *next + segment.block_table.len() as u32)));
    starts.collect()
}
