//! One rank of a model, on one device: its weights, its KV, its buffers. A model that is not split is one rank.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cpu_kernels::{StageTimes, TokenCopy};

use crate::EngineError;
use crate::backend::Backend;
use crate::collective::Collective;
use crate::draws::{DrawPlan, Outputs};
use crate::forward_batch::{ForwardBatch, ReservedRows};
use crate::llama::{Device, Llama, Workspace};

/// What runs checked batches over reserved KV: a rank, or all of them together.
pub(crate) trait Runner: Send {
    /// Makes sure that KV blocks 0..`num_blocks` exist.
    fn grow_kv(&mut self, num_blocks: u32) -> Result<(), EngineError>;

    /// Copies a KV block.
    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), EngineError>;

    /// Copies what single tokens left behind, one after the other. Asked of whom takes trees alone.
    fn copy_tokens(&mut self, copies: &[TokenCopy]) -> Result<(), EngineError>;

    /// Appends KV for every row and returns what was asked for: the draws of rows that `draws` names, and the logits of the
    /// others, `[rows, vocab]`, in batch order; on ranks but the first, nothing.
    fn forward(&mut self, batch: &[ReservedRows<'_>], draws: &DrawPlan) -> Result<Outputs, EngineError>;

    /// Threads of this process that compute.
    fn num_threads(&self) -> usize {
        1
    }

    /// Keeps those threads on `cores`, as many.
    fn pin(&mut self, _cores: &[usize]) -> Result<(), EngineError> {
        Ok(())
    }

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
        let workspace = Workspace::default();
        Self { backend, collective, model, kv, workspace, is_first: rank == 0 }
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

    fn copy_tokens(&mut self, copies: &[TokenCopy]) -> Result<(), EngineError> {
        self.backend.copy_tokens(&mut self.kv, copies);
        Ok(())
    }

    fn forward(&mut self, batch: &[ReservedRows<'_>], draws: &DrawPlan) -> Result<Outputs, EngineError> {
        let passes = ForwardBatch::passes(batch, B::PASS_LIMITS);
        let (backend, workspace) = (&self.backend, &mut self.workspace);
        let mut device = Device { backend, collective: self.collective.as_ref(), kv: &mut self.kv };
        let mut outputs = Outputs::default();
        let mut first = 0;
        for pass in passes.iter().filter(|pass| pass.num_rows() > 0) {
            self.model.forward(&mut device, pass, workspace)?;
            let rows = first..first + pass.logit_rows.len();
            first = rows.end;
            if !self.is_first || rows.is_empty() {
                continue;
            }
            let (num_rows, draws) = (rows.len(), draws.part(rows));
            if draws.is_empty() {
                backend.append_to(&mut outputs.logits, &mut workspace.logits)?;
            } else {
                backend.draw(&mut workspace.logits, num_rows, &draws, &mut outputs)?;
            }
        }
        Ok(outputs)
    }

    fn num_threads(&self) -> usize {
        self.backend.num_threads()
    }

    fn pin(&mut self, cores: &[usize]) -> Result<(), EngineError> {
        self.backend.pin(cores)
    }

    fn stage_times(&self) -> StageTimes {
        self.backend.stage_times()
    }
}

/// A rank that has no others. What panics in it, on whichever of its threads, is told as an error, and nothing is ever run
/// again: its KV may be half written.
pub(crate) struct LoneRank {
    runner: Box<dyn Runner>,
    lost: Option<String>,
}

impl LoneRank {
    pub(crate) fn new(runner: Box<dyn Runner>) -> Self {
        Self { runner, lost: None }
    }

    fn guard<R>(
        &mut self,
        run: impl FnOnce(&mut dyn Runner) -> Result<R, EngineError>,
    ) -> Result<R, EngineError> {
        let lost = |reason| EngineError::RankLost { rank: 0, reason };
        if let Some(reason) = &self.lost {
            return Err(lost(reason.clone()));
        }
        catch_unwind(AssertUnwindSafe(|| run(self.runner.as_mut()))).unwrap_or_else(|panic| {
            let reason = self.lost.insert(last_words(panic.as_ref()));
            Err(lost(reason.clone()))
        })
    }
}

impl Runner for LoneRank {
    fn grow_kv(&mut self, num_blocks: u32) -> Result<(), EngineError> {
        self.guard(|runner| runner.grow_kv(num_blocks))
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), EngineError> {
        self.guard(|runner| runner.copy_block(from, to))
    }

    fn copy_tokens(&mut self, copies: &[TokenCopy]) -> Result<(), EngineError> {
        self.guard(|runner| runner.copy_tokens(copies))
    }

    fn forward(&mut self, batch: &[ReservedRows<'_>], draws: &DrawPlan) -> Result<Outputs, EngineError> {
        self.guard(|runner| runner.forward(batch, draws))
    }

    fn num_threads(&self) -> usize {
        self.runner.num_threads()
    }

    fn pin(&mut self, cores: &[usize]) -> Result<(), EngineError> {
        self.guard(|runner| runner.pin(cores))
    }

    fn stage_times(&self) -> StageTimes {
        self.runner.stage_times()
    }
}

/// What a panic says of the rank that had it.
pub(crate) fn last_words(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<String>().map(String::as_str);
    let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    format!("it panicked: {words}")
}

#[cfg(test)]
mod tests {
    use cpu_kernels::Threads;

    use super::*;
    use crate::forward_batch::TreePart;

    /// A rank, one of whose threads panics where the batch has so many sequences.
    struct Faulty(Threads, usize);

    impl Runner for Faulty {
        fn grow_kv(&mut self, _num_blocks: u32) -> Result<(), EngineError> {
            Ok(())
        }

        fn copy_block(&mut self, _from: u32, _to: u32) -> Result<(), EngineError> {
            Ok(())
        }

        fn copy_tokens(&mut self, _copies: &[TokenCopy]) -> Result<(), EngineError> {
            Ok(())
        }

        fn forward(&mut self, batch: &[ReservedRows<'_>], _draws: &DrawPlan) -> Result<Outputs, EngineError> {
            let pieces: Vec<usize> = (0..64).collect();
            let logits = self.0.map(&pieces, |&piece| {
                assert!(piece != 50 || batch.len() != self.1, "piece {piece} fell over");
                piece as f32
            });
            Ok(Outputs { logits, ..Outputs::default() })
        }
    }

    #[test]
    fn a_panic_on_any_thread_is_an_error_and_the_end() {
        for threads in [1, 4] {
            let mut rank = LoneRank::new(Box::new(Faulty(Threads::new(threads).unwrap(), 2)));
            let rows = ReservedRows {
                token_ids: &[1],
                start: 0,
                block_table: &[0],
                num_logits: 0,
                tree: TreePart::default(),
            };
            let draws = DrawPlan::default();
            assert_eq!(rank.forward(&[rows], &draws).unwrap().logits.len(), 64);
            let error = rank.forward(&[rows, rows], &draws).unwrap_err().to_string();
            assert!(error.contains("rank 0 is lost") && error.contains("piece 50 fell over"), "{error}");
            assert_eq!(rank.forward(&[rows], &draws).unwrap_err().to_string(), error, "lost for good");
            assert_eq!(rank.grow_kv(1).unwrap_err().to_string(), error);
        }
    }
}
