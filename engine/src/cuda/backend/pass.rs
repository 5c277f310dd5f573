//! Inputs of one pass: ids, positions, slots, angles, tiles and block tables. One copy serves all layers, and
//! the memory is reused by the next pass.

use std::ops::Range;

use cpu_kernels::BLOCK_SIZE;

use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, View};
use crate::cuda::ops::{AttentionChunk, OwnBlocks, StepBuffer, Tiling, TilingKey, TilingViews};
use crate::forward_batch::ForwardBatch;
use crate::rope::{AngleTable, Rope};

/// Inputs that kernels read in the current pass, in one allocation, so that one copy uploads them.
#[derive(Debug)]
pub(super) struct Inputs<M> {
    words: StepBuffer<M, u32>,
    places: InputOffsets,
    /// Angles of the positions of all passes so far.
    angles: AngleTable,
    /// One per key that the model's layers have: usually one group size and few windows.
    tilings: Vec<PlacedTiling>,
}

/// Where each input is, in words.
#[derive(Debug, Clone, Default)]
struct InputOffsets {
    /// `[rows]`.
    token_ids: Range<usize>,
    /// `[rows]`.
    positions: Range<usize>,
    /// `[rows]`: block * 16 + offset.
    slots: Range<usize>,
    /// `[rows, head_dim / 2]`.
    cos: Range<usize>,
    sin: Range<usize>,
    /// Rows whose logits are requested.
    logit_rows: Range<usize>,
    /// Block tables of all segments, followed by those of rows of trees.
    tables: Range<usize>,
    /// Blocks to copy from when blocks for rows of trees are gathered.
    sources: Range<usize>,
}

/// Tiling for one key.
#[derive(Debug)]
struct PlacedTiling {
    key: TilingKey,
    chunks: Vec<AttentionChunk>,
    /// Tiles, their work list, and the tiles of queries.
    places: [Range<usize>; 3],
}

impl<M> Default for Inputs<M> {
    fn default() -> Self {
        let (words, places, angles) = Default::default();
        Self { words, places, angles, tilings: Vec::new() }
    }
}

/// Arrays in sequence, each aligned to 16 bytes.
#[derive(Debug, Default)]
struct PackedWords(Vec<u32>);

impl PackedWords {
    fn put<T: bytemuck::Pod>(&mut self, elements: &[T]) -> Range<usize> {
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        let start = self.0.len();
        self.0.extend_from_slice(bytemuck::cast_slice(elements));
        start..self.0.len()
    }

    /// Arrays whose size depends only on the size of the pass come first, so that their offsets stay the same
    /// in the next pass.
    fn put_tiling(&mut self, tiling: &Tiling) -> [Range<usize>; 3] {
        let tile_of = self.put(&tiling.tile_of);
        let tiles = self.put(&tiling.tiles);
        [tiles, self.put(&tiling.work), tile_of]
    }
}

/// A pass, as the layers use it.
#[derive(Debug)]
pub(crate) struct GpuPass<'a> {
    pub(super) batch: &'a ForwardBatch<'a>,
}

impl<'a> GpuPass<'a> {
    pub(super) fn new(batch: &'a ForwardBatch<'a>) -> Self {
        Self { batch }
    }

    pub(super) fn rows(&self) -> usize {
        self.batch.num_rows()
    }
}

impl<M: DeviceMemory> Inputs<M> {
    /// Uploads the inputs of a pass; `rope` converts positions to angles.
    pub(super) fn upload<E: Executor<Memory = M>>(
        &mut self,
        executor: &mut E,
        batch: &ForwardBatch<'_>,
        rope: &Rope,
    ) -> Result<(), CudaError> {
        let (cos, sin) = self.angles.of(rope, &batch.positions);
        let slots: Vec<u32> =
            batch.slot_mapping.iter().map(|slot| slot.block * BLOCK_SIZE as u32 + slot.offset).collect();
        let logit_rows: Vec<u32> = batch.logit_rows.iter().map(|&row| row as u32).collect();
        let mut tables: Vec<u32> =
            batch.segments.iter().flat_map(|segment| segment.block_table).copied().collect();
        let starts = table_starts(batch);
        let own = OwnBlocks::new(&batch.segments, &mut tables);
        let mut packed = PackedWords::default();
        let mut places = InputOffsets {
            token_ids: packed.put(&batch.token_ids),
            positions: packed.put(&batch.positions),
            slots: packed.put(&slots),
            cos: packed.put(&cos),
            sin: packed.put(&sin),
            logit_rows: packed.put(&logit_rows),
            ..InputOffsets::default()
        };
        for placed in &mut self.tilings {
            let tiling = Tiling::new(&batch.segments, &starts, &own, placed.key);
            placed.places = packed.put_tiling(&tiling);
            placed.chunks = tiling.chunks;
        }
        // Last, because tables grow with every block and would move the arrays after them.
        places.tables = packed.put(&tables);
        places.sources = packed.put(&own.sources);
        self.places = places;
        self.words.fill(executor, &packed.0, "inputs of a pass")?;
        Ok(())
    }

    /// Adds a key: every later pass gets a tiling for it.
    pub(super) fn add_tiling_key(&mut self, key: TilingKey) {
        if self.tilings.iter().all(|placed| placed.key != key) {
            self.tilings.push(PlacedTiling { key, chunks: Vec::new(), places: [0..0, 0..0, 0..0] });
        }
    }

    /// The current pass's tiling for a key that was added with [`Inputs::add_tiling_key`].
    pub(super) fn tiling(&self, key: TilingKey) -> TilingViews<'_> {
        let placed = self.tilings.iter().find(|placed| placed.key == key);
        let PlacedTiling { chunks, places: [tiles, work, tile_of], .. } =
            placed.expect("a model's groups and windows are told as it is loaded");
        let words = self.words.tensor();
        TilingViews {
            tiles: words.view_as(tiles.clone()),
            work: words.view_as(work.clone()),
            tile_of: words.view_as(tile_of.clone()),
            chunks,
        }
    }

    pub(super) fn token_ids(&self) -> View<'_, u32> {
        self.words.tensor().view_as(self.places.token_ids.clone())
    }

    pub(super) fn positions(&self) -> View<'_, u32> {
        self.words.tensor().view_as(self.places.positions.clone())
    }

    pub(super) fn slots(&self) -> View<'_, u32> {
        self.words.tensor().view_as(self.places.slots.clone())
    }

    /// Cosines and sines of all rows.
    pub(super) fn angles(&self) -> (View<'_, f32>, View<'_, f32>) {
        let words = self.words.tensor();
        (words.view_as(self.places.cos.clone()), words.view_as(self.places.sin.clone()))
    }

    pub(super) fn logit_rows(&self) -> View<'_, u32> {
        self.words.tensor().view_as(self.places.logit_rows.clone())
    }

    pub(super) fn tables(&self) -> View<'_, u32> {
        self.words.tensor().view_as(self.places.tables.clone())
    }

    pub(super) fn sources(&self) -> View<'_, u32> {
        self.words.tensor().view_as(self.places.sources.clone())
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
