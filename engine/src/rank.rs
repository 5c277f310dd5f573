//! One rank of a model on one device: weights, KV cache and buffers. A model that is not split has one rank.

use std::any::Any;
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cpu_kernels::{StageTimes, TokenCopy};

use crate::EngineError;
use crate::backend::Backend;
use crate::collective::Collective;
use crate::draws::{DrawPlan, RankOutput};
use crate::forward_batch::{ForwardBatch, ReservedRows};
use crate::llama::{DeviceContext, Llama, Workspace};

/// Runs checked batches over reserved KV: one rank, or all ranks together.
pub(crate) trait Runner: Send {
    /// Allocates KV blocks 0..`num_blocks` if they do not exist.
    fn grow_kv(&mut self, num_blocks: u32) -> Result<(), EngineError>;

    /// Copies a KV block.
    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), EngineError>;

    /// Copies the KV of single tokens, in order. Only called on runners that support token trees.
    fn copy_tokens(&mut self, copies: &[TokenCopy]) -> Result<(), EngineError>;

    /// Appends KV for every row and returns the requested results in batch order: the draws of the rows in
    /// `draws`, and the logits `[rows, vocab]` of the other rows. Ranks other than the first return nothing.
    fn forward(
        &mut self,
        batch: &[ReservedRows<'_>],
        draws: &Arc<DrawPlan>,
    ) -> Result<RankOutput, EngineError>;

    /// Number of compute threads in this process.
    fn num_threads(&self) -> usize {
        1
    }

    /// Pins those threads to `cores`, one core per thread.
    fn pin(&mut self, _cores: &[usize]) -> Result<(), EngineError> {
        Ok(())
    }

    /// Time per stage of all forwards since start; zeros if the runner does not measure it.
    fn stage_times(&self) -> StageTimes {
        StageTimes::default()
    }
}

/// A rank, see the module's docs.
pub(crate) struct Rank<B: Backend> {
    backend: B,
    collective: Box<dyn Collective<B::Rows>>,
    model: Llama<B>,
    kv: B::Kv,
    workspace: Workspace<B>,
    is_first: bool,
}

impl<B: Backend> Rank<B> {
    /// Combines loaded weights and an empty KV cache. `rank` is this rank's number.
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
        self.backend.check()
    }

    fn copy_tokens(&mut self, copies: &[TokenCopy]) -> Result<(), EngineError> {
        self.backend.copy_tokens(&mut self.kv, copies);
        self.backend.check()
    }

    fn forward(
        &mut self,
        batch: &[ReservedRows<'_>],
        draws: &Arc<DrawPlan>,
    ) -> Result<RankOutput, EngineError> {
        let mut passes = ForwardBatch::passes(batch, B::PASS_LIMITS);
        let (backend, workspace) = (&self.backend, &mut self.workspace);
        let mut device = DeviceContext { backend, collective: self.collective.as_ref(), kv: &mut self.kv };
        let mut outputs = RankOutput::default();
        let (mut first, mut has_read_last) = (0, false);
        for pass in passes.iter_mut().filter(|pass| pass.num_rows() > 0) {
            let num_rows = pass.logit_rows.len();
            pass.pad(|rows| backend.padded_rows(rows));
            let rows = first..first + num_rows;
            first = rows.end;
            // Other ranks have no logits to draw from.
            let draws = if self.is_first { draws.part(rows) } else { Cow::Owned(DrawPlan::default()) };
            self.model.forward(&mut device, pass, &draws, workspace)?;
            has_read_last = self.is_first && num_rows > 0;
            if !has_read_last {
                continue;
            }
            if draws.is_empty() {
                let len = num_rows * self.model.config.vocab_size;
                backend.append_to(&mut outputs.logits, &mut workspace.logits, len)?;
            } else {
                backend.draw(&mut workspace.logits, num_rows, &draws, &mut outputs)?;
            }
        }
        // A pass without logits reads nothing: its errors are still stored, and its device may be busy.
        // Callers measure how long a forward takes, and must not request the next ones at the host's speed:
        // an urgent forward would wait for all of them.
        if self.is_first && !has_read_last {
            backend.wait()?;
        } else {
            backend.check()?;
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

/// The only rank of a process. A panic on any of its threads is returned as an error, and every later call
/// fails: its KV may be partially written.
pub(crate) struct SingleRankRunner {
    rank: usize,
    runner: Box<dyn Runner>,
    lost: Option<String>,
}

impl SingleRankRunner {
    pub(crate) fn new(rank: usize, runner: Box<dyn Runner>) -> Self {
        Self { rank, runner, lost: None }
    }

    fn guard<R>(
        &mut self,
        run: impl FnOnce(&mut dyn Runner) -> Result<R, EngineError>,
    ) -> Result<R, EngineError> {
        let rank = self.rank;
        let lost = |reason| EngineError::RankLost { rank, reason };
        if let Some(reason) = &self.lost {
            return Err(lost(reason.clone()));
        }
        catch_unwind(AssertUnwindSafe(|| run(self.runner.as_mut()))).unwrap_or_else(|panic| {
            let reason = self.lost.insert(panic_message(panic.as_ref()));
            Err(lost(reason.clone()))
        })
    }
}

impl Runner for SingleRankRunner {
    fn grow_kv(&mut self, num_blocks: u32) -> Result<(), EngineError> {
        self.guard(|runner| runner.grow_kv(num_blocks))
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), EngineError> {
        self.guard(|runner| runner.copy_block(from, to))
    }

    fn copy_tokens(&mut self, copies: &[TokenCopy]) -> Result<(), EngineError> {
        self.guard(|runner| runner.copy_tokens(copies))
    }

    fn forward(
        &mut self,
        batch: &[ReservedRows<'_>],
        draws: &Arc<DrawPlan>,
    ) -> Result<RankOutput, EngineError> {
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

/// Runs a job for each rank, each on a thread of its own, and returns what the jobs return, in order of rank.
/// A panic is that rank's error.
pub(crate) fn on_threads<T: Send, R: Send>(
    ranks: impl IntoIterator<Item = T>,
    run: impl Fn(usize, T) -> Result<R, EngineError> + Sync,
) -> Result<Vec<R>, EngineError> {
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> =
            ranks.into_iter().enumerate().map(|(rank, of)| scope.spawn(move || run(rank, of))).collect();
        let joined = threads.into_iter().enumerate().map(|(rank, thread)| {
            thread.join().unwrap_or_else(|panic| {
                Err(EngineError::RankLost { rank, reason: panic_message(panic.as_ref()) })
            })
        });
        // All are joined before the first error is returned: the scope would pass on a panic of the others.
        joined.collect::<Vec<_>>().into_iter().collect()
    })
}

/// Returns the message of a rank's panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    format!("it panicked: {message}")
}

#[cfg(test)]
mod tests {
    use cpu_kernels::Threads;

    use super::*;
    use crate::forward_batch::TreePart;

    /// A rank with a thread that panics if the batch has this many sequences.
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

        fn forward(
            &mut self,
            batch: &[ReservedRows<'_>],
            _draws: &Arc<DrawPlan>,
        ) -> Result<RankOutput, EngineError> {
            let pieces: Vec<usize> = (0..64).collect();
            let logits = self.0.map(&pieces, |&piece| {
                assert!(piece != 50 || batch.len() != self.1, "piece {piece} fell over");
                piece as f32
            });
            Ok(RankOutput { logits, ..RankOutput::default() })
        }
    }

    #[test]
    fn a_panic_on_any_thread_fails_this_and_all_later_calls() {
        for threads in [1, 4] {
            let mut rank = SingleRankRunner::new(0, Box::new(Faulty(Threads::new(threads).unwrap(), 2)));
            let rows = ReservedRows {
                token_ids: &[1],
                start: 0,
                block_table: &[0],
                num_logits: 0,
                tree: TreePart::default(),
            };
            let draws = Arc::default();
            assert_eq!(rank.forward(&[rows], &draws).unwrap().logits.len(), 64);
            let error = rank.forward(&[rows, rows], &draws).unwrap_err().to_string();
            assert!(error.contains("rank 0 is lost") && error.contains("piece 50 fell over"), "{error}");
            assert_eq!(rank.forward(&[rows], &draws).unwrap_err().to_string(), error, "lost for good");
            assert_eq!(rank.grow_kv(1).unwrap_err().to_string(), error);
        }
    }

    #[test]
    fn jobs_of_ranks_end_in_order_and_a_panic_names_its_rank() {
        let numbers = on_threads([3, 2, 1], |rank, number| Ok(10 * rank + number));
        assert_eq!(numbers.unwrap(), [3, 12, 21]);
        let lost = on_threads([false, true, true], |rank, panics| {
            assert!(!panics, "rank {rank} has no memory");
            Ok(())
        });
        let error = lost.unwrap_err().to_string();
        assert!(error.contains("rank 1 has no memory"), "{error}");
    }
}
