//! One rank of a model, on one device: its weights, its KV, its buffers. A model that is not split is one rank.

use crate::EngineError;
use crate::backend::Backend;
use crate::collective::Collective;
use crate::forward_batch::{ForwardBatch, MAX_ROWS_PER_PASS, ReservedRows};
use crate::llama::{Device, Llama, Workspace};
use crate::stages::StageTimes;

/// What runs checked batches over reserved KV: a rank, or all of them together.
pub(crate) trait Runner: Send {
    /// Makes sure that KV blocks 0..`num_blocks` exist.
    fn grow_kv(&mut self, num_blocks: u32) -> Result<(), EngineError>;

    /// Copies a KV block.
    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), EngineError>;

    /// Appends KV for every row and returns the logits asked for, `[rows, vocab]`, in batch order; on ranks but
    /// the first, nothing.
    fn forward(&mut self, batch: &[ReservedRows<'_>]) -> Result<Vec<f32>, EngineError>;

    /// What forwards spent their time on since start; nothing where nobody keeps time.
    fn stage_times(&self) -> StageTimes {
        StageTimes::default()
    }
}

/// See the head of this file.
pub(crate) struct Rank<B: Backend> {
    backend: B,
    collective: Box<dyn Collective<B::Rows>>,
    model: Llama<B>,
    kv: B::Kv,
    workspace: Workspace<B>,
    /// Multiply-adds in a row, about.
    row_work: usize,
    is_first: bool,
}

impl<B: Backend> Rank<B> {
    /// Puts loaded weights and empty KV together. `rank` is this one's number.
    pub(crate) fn new(
        backend: B,
        collective: Box<dyn Collective<B::Rows>>,
        model: Llama<B>,
        kv: B::Kv,
        rank: usize,
    ) -> Self {
        let row_work = model.config.num_parameters() as usize;
        let workspace = Workspace::default();
        Self { backend, collective, model, kv, workspace, row_work, is_first: rank == 0 }
    }
}

impl<B: Backend> Runner for Rank<B> {
    fn grow_kv(&mut self, num_blocks: u32) -> Result<(), EngineError> {
        self.backend.grow_kv(&mut self.kv, num_blocks)
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), EngineError> {
        self.backend.copy_block(&mut self.kv, from, to);
        Ok(())
    }

    fn forward(&mut self, batch: &[ReservedRows<'_>]) -> Result<Vec<f32>, EngineError> {
        let passes = ForwardBatch::passes(batch, MAX_ROWS_PER_PASS);
        let rows: usize = passes.iter().map(ForwardBatch::num_rows).sum();
        let (backend, model, workspace) = (&self.backend, &self.model, &mut self.workspace);
        let mut device = Device { backend, collective: self.collective.as_ref(), kv: &mut self.kv };
        let is_first = self.is_first;
        backend.enter(rows * self.row_work, || {
            let mut logits = Vec::new();
            for pass in passes.iter().filter(|pass| pass.num_rows() > 0) {
                model.forward(&mut device, pass, workspace)?;
                if is_first && !pass.logit_rows.is_empty() {
                    backend.append_to(&mut logits, &mut workspace.logits)?;
                }
            }
            Ok(logits)
        })
    }

    fn stage_times(&self) -> StageTimes {
        self.backend.stage_times()
    }
}
