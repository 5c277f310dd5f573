//! One forward of the device thread: its members and its timing. [`scheduling::batch_former`] decides; this
//! file passes it the ready steps and the clock.

use std::collections::VecDeque;
use std::time::Instant;

use proto::convert::proposal_ahead_to_wire;
use proto::v1;
use scheduling::batch::prefill_rows;
use scheduling::batch_former::{Batch, CompletedForward, Decision, ReadyStep};
use speculation::ReplyBody;

use crate::Task;
use crate::executor::{OutOfKvBlocks, StepExecutor};
use crate::reactor::{ForwardSize, Reactor};
use crate::step_loop::StepLoop;
use crate::table::SequenceKey;

impl<M: StepExecutor> StepLoop<M> {
    /// Returns which running tasks take part in the next forward, or how long to delay it.
    pub(super) fn next_forward(&mut self) -> Decision {
        let ready: Vec<ReadyStep<SequenceKey>> = self.running.iter().map(Task::ready_step).collect();
        self.batch_former.decide(self.began.elapsed(), &ready)
    }

    /// Rows and sequences waiting for the next forward.
    pub(super) fn forward_size(&self) -> ForwardSize {
        let rows = self.running.iter().map(|task| task.rows_left().rows()).sum();
        ForwardSize { rows, sequences: self.running.len() }
    }

    /// Runs one forward over the tasks in `batch` and puts the replies into the outboxes. Does nothing if no
    /// task takes part.
    pub(super) fn forward(&mut self, batch: &Batch) -> v1::StepTiming {
        let began = Instant::now();
        let before = self.executor.stats();
        let mut timing = v1::StepTiming::default();
        let mut others = self.take_non_members(&batch.members);
        if self.running.is_empty() {
            self.running = others;
            return timing;
        }
        let (prefill, cached) = (prefill_left(&self.running), num_cached(self.running.iter()));
        let mut advanced = self.executor.advance(&mut self.running, batch.prompt_rows);
        let prefill_now_left = prefill_left(&self.running);
        let finished = advanced.iter().flatten().map(|(task, _)| task);
        let newly_cached = num_cached(self.running.iter().chain(finished)).saturating_sub(cached);
        let finished = advanced.iter_mut().flatten().map(|(task, _)| task);
        for task in self.running.iter_mut().filter(|task| task.has_run).chain(finished) {
            task.first_forward.get_or_insert(began);
        }
        // Keep tasks in order of age. If tasks left out of this forward always came first, a step that found
        // no free rows could starve.
        self.running.append(&mut others);
        self.running.make_contiguous().sort_by_key(|task| task.started);
        match advanced {
            // All of them wait for their grammars.
            Ok(finished) if finished.is_empty() && self.executor.stats().sequences == before.sequences => {}
            Ok(finished) => {
                let after = self.executor.stats();
                timing.rows = (after.rows - before.rows) as u32;
                let progress = prefill.saturating_sub(prefill_now_left);
                timing.prefill_rows = progress.saturating_sub(newly_cached).min(timing.rows);
                timing.kv_tokens = after.kv_tokens - before.kv_tokens;
                timing.sequences = (after.sequences - before.sequences) as u32;
                let took = began.elapsed();
                timing.compute_us = took.as_micros() as u64;
                timing.queue_us = mean_queue_us(&finished);
                self.metrics.forward(took);
                if timing.prefill_rows == 0 {
                    self.ahead.record_forward(took);
                }
                self.batch_former.forward_done(completed_forward(&timing), took);
                for (task, body) in finished {
                    self.finish(task, body);
                }
            }
            // First drop what was drafted ahead.
            Err(OutOfKvBlocks) if self.ahead.drop_all(&mut self.executor) => {}
            Err(OutOfKvBlocks) => self.free_kv_blocks(),
        }
        timing
    }

    /// Runs one forward of branches while the worker is otherwise idle, and sends routers what it drafted to
    /// the end. Its timing is not reported to routers.
    pub(super) fn forward_ahead(&mut self, reactor: &mut Reactor, rows: u32) {
        let size = ForwardSize { rows, sequences: 1 };
        reactor.run_forward(size, || {
            let (rows, drafted) = self.ahead.forward(&mut self.executor, &mut self.table);
            for (router, ahead) in drafted {
                if let Some(router) = self.routers.get_mut(&router) {
                    router.outbox.ahead.push(proposal_ahead_to_wire(ahead));
                }
            }
            v1::StepTiming { rows, ..v1::StepTiming::default() }
        });
        reactor.write_and_read(|| self.flush(&v1::StepTiming::default()));
    }

    /// Removes the tasks that are not part of the next forward from `running` and returns them.
    fn take_non_members(&mut self, members: &[bool]) -> VecDeque<Task> {
        let (go, others): (Vec<_>, Vec<_>) =
            self.running.drain(..).zip(members).partition(|(_, is_member)| **is_member);
        let tasks = |part: Vec<(Task, &bool)>| part.into_iter().map(|(task, _)| task).collect();
        self.running = tasks(go);
        tasks(others)
    }
}

fn completed_forward(timing: &v1::StepTiming) -> CompletedForward {
    CompletedForward {
        rows: timing.rows,
        prefill_rows: timing.prefill_rows,
        sequences: timing.sequences,
        kv_tokens: timing.kv_tokens,
    }
}

/// Number of prompt and replay ids still to run.
fn prefill_left(tasks: &VecDeque<Task>) -> u32 {
    prefill_rows(tasks.iter().map(Task::rows_left))
}

/// Number of these tasks' context ids whose KV came from the prefix cache: no forward computes them.
fn num_cached<'a>(tasks: impl Iterator<Item = &'a Task>) -> u32 {
    tasks.map(|task| task.num_cached).sum()
}

/// Mean time until the first forward of these steps, in microseconds. Waits for steps of other sequences are
/// part of it: otherwise a router would take them for network time.
fn mean_queue_us(finished: &[(Task, ReplyBody)]) -> u64 {
    let waited: u128 = finished.iter().map(|(task, _)| task.queue_time().as_micros()).sum();
    (waited / finished.len().max(1) as u128) as u64
}
