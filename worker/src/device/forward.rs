//! One forward of the device thread: who takes part, and what it took. [`scheduling::batch_former`] decides;
//! this file tells it what is ready and hands it the clock.

use std::collections::VecDeque;
use std::time::Instant;

use proto::v1;
use scheduling::batch::prefill_rows;
use scheduling::batch_former::{Decision, RanForward, ReadyStep, Turn};
use speculation::ReplyBody;

use crate::Task;
use crate::device::Device;
use crate::method::{Method, NeedRoom};
use crate::reactor::{ForwardSize, Reactor};
use crate::table::SequenceKey;

impl<M: Method> Device<M> {
    /// Which of the running tasks take part in the next forward, or how long it is delayed.
    pub(super) fn next_forward(&mut self) -> Decision {
        let ready: Vec<ReadyStep<SequenceKey>> = self.running.iter().map(Task::ready_step).collect();
        self.former.next(self.began.elapsed(), &ready)
    }

    /// What the next forward has to work on.
    pub(super) fn forward_size(&self) -> ForwardSize {
        let rows = self.running.iter().map(|task| task.rows_left().rows()).sum();
        ForwardSize { rows, sequences: self.running.len() }
    }

    /// One forward of the tasks whose `turn` it is, and its answers into the outboxes; nothing where nothing is to
    /// be run.
    pub(super) fn forward(&mut self, turn: &Turn) -> v1::StepTiming {
        let began = Instant::now();
        let before = self.method.stats();
        let mut timing = v1::StepTiming::default();
        let mut others = self.take_others(&turn.members);
        if self.running.is_empty() {
            self.running = others;
            return timing;
        }
        let prefill = prefill_left(&self.running);
        let advanced = self.method.advance(&mut self.running, turn.prompt_rows);
        let prefill_now_left = prefill_left(&self.running);
        // In order of age: were those put first that the forward went without, a step that found no rows left in it
        // could fall behind others for ever.
        self.running.append(&mut others);
        self.running.make_contiguous().sort_by_key(|task| task.started);
        match advanced {
            Ok(finished) => {
                let after = self.method.stats();
                timing.rows = (after.rows - before.rows) as u32;
                timing.prefill_rows = prefill.saturating_sub(prefill_now_left).min(timing.rows);
                timing.kv_tokens = after.kv_tokens - before.kv_tokens;
                timing.sequences = (after.sequences - before.sequences) as u32;
                let took = began.elapsed();
                timing.compute_us = took.as_micros() as u64;
                timing.queue_us = mean_queue_us(&finished);
                self.metrics.forward(took);
                self.ahead.ran(took);
                self.former.ran(ran_forward(&timing), took);
                for (task, body) in finished {
                    self.finish(task, body);
                }
            }
            // What was computed ahead gives way first.
            Err(NeedRoom) if self.ahead.forget_all(&mut self.method) => {}
            Err(NeedRoom) => self.make_room(),
        }
        timing
    }

    /// One forward of what is drafted ahead, while there is nothing else to do. Nobody is told its time.
    pub(super) fn forward_ahead(&mut self, reactor: &mut Reactor, rows: u32) {
        let size = ForwardSize { rows, sequences: 1 };
        reactor.during(size, || {
            let rows = self.ahead.forward(&mut self.method, &mut self.table);
            v1::StepTiming { rows, ..v1::StepTiming::default() }
        });
        reactor.exchange(|| ());
    }

    /// Takes the tasks out that the next forward goes without.
    fn take_others(&mut self, members: &[bool]) -> VecDeque<Task> {
        let (go, others): (Vec<_>, Vec<_>) =
            self.running.drain(..).zip(members).partition(|(_, is_member)| **is_member);
        let tasks = |part: Vec<(Task, &bool)>| part.into_iter().map(|(task, _)| task).collect();
        self.running = tasks(go);
        tasks(others)
    }
}

fn ran_forward(timing: &v1::StepTiming) -> RanForward {
    RanForward {
        rows: timing.rows,
        prefill_rows: timing.prefill_rows,
        sequences: timing.sequences,
        kv_tokens: timing.kv_tokens,
    }
}

/// Ids of prompts and replays that are still to be run.
fn prefill_left(tasks: &VecDeque<Task>) -> u32 {
    prefill_rows(tasks.iter().map(Task::rows_left))
}

/// How long the steps that are answered now had waited to be admitted, on average.
fn mean_queue_us(finished: &[(Task, ReplyBody)]) -> u64 {
    let waited: u128 = finished.iter().map(|(task, _)| (task.started - task.received).as_micros()).sum();
    (waited / finished.len().max(1) as u128) as u64
}
