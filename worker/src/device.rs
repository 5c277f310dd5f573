//! The one thread that owns the model and all that is held: a bounded mailbox in, replies out.
//!
//! Each turn it drains the mailbox, admits what waits, runs one forward and answers whatever is done, so that sequences
//! join and leave at every forward. A forward may wait a moment for sequences that are about to come back ([`formation`]). What it sends and
//! is sent goes through the door; between short forwards it drives that itself ([`crate::reactor`]).

mod formation;
mod room;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use proto::convert::reply_to_wire;
use proto::v1;
use speculation::batch::ROUND_CONTEXT;
use speculation::holding::{Admission, Limits};
use speculation::{Reply, ReplyBody, SequenceId, Step};
use tokio::sync::mpsc;

use crate::device::formation::Formation;
use crate::method::{Method, NeedRoom};
use crate::metrics::{StepOutcome, WorkerMetrics};
use crate::reactor::{ForwardSize, Lateness, Reactor};
use crate::table::{RouterId, SequenceKey, Table};
use crate::task::Task;

/// Threads of a worker that are not its runtime's: this one.
pub const DEVICE_THREADS: usize = 1;

/// Frames that wait for the device thread; a full mailbox holds up the routers' streams.
pub const MAILBOX_FRAMES: usize = 1_024;

/// Frames that wait for a router to read them; past it frames are dropped, and the router asks again.
pub const REPLY_FRAMES: usize = 1_024;

/// Steps of one sequence that wait for the one that runs; past it the oldest is dropped, for its reply is not read anymore.
const WAITING_STEPS: usize = 16;

/// Counts the streams of one process, so that a message about an older one is known as such.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// A step as a router sent it.
#[derive(Debug)]
pub struct SentStep {
    /// The step.
    pub step: Step,
    /// The round's span, below which the step is traced; 0: none.
    pub span_id: u64,
}

/// What the door tells the device thread.
#[derive(Debug)]
pub enum Message {
    /// A router connected; a newer stream of the same router replaces the older one and keeps its sequences.
    Opened {
        /// Which router.
        router: RouterId,
        /// Which of its streams.
        stream: StreamId,
        /// Where replies go.
        replies: mpsc::Sender<v1::WorkerFrame>,
    },
    /// One frame.
    Frame {
        /// Which router.
        router: RouterId,
        /// In order.
        steps: Vec<SentStep>,
        /// Sequences to forget, with the generation that is over.
        closes: Vec<(SequenceId, u32)>,
        /// When it arrived, as far as is known.
        received: Instant,
    },
    /// The router was away for its whole grace period.
    Expired {
        /// Which router.
        router: RouterId,
        /// Its last stream; nothing happens if there is a newer one.
        stream: StreamId,
    },
}

/// The way to the device thread.
#[derive(Debug)]
pub struct Mailbox {
    /// At most [`MAILBOX_FRAMES`] wait in it.
    pub messages: mpsc::Sender<Message>,
    /// When a frame that is read now arrived.
    pub lateness: Lateness,
}

/// The device thread's state.
#[derive(Debug)]
pub struct Device<M> {
    method: M,
    limits: Limits,
    table: Table,
    routers: HashMap<RouterId, Router>,
    /// Sequences with waiting steps, oldest first.
    waiting: VecDeque<SequenceKey>,
    running: VecDeque<Task>,
    formation: Formation,
    metrics: WorkerMetrics,
}

#[derive(Debug)]
struct Router {
    stream: StreamId,
    replies: mpsc::Sender<v1::WorkerFrame>,
    outbox: v1::WorkerFrame,
    /// Credits that were told last.
    told: Option<u64>,
}

impl<M: Method> Device<M> {
    /// A device that holds nothing; `step_times` is what the method's forwards take, as far as that was profiled.
    pub fn new(method: M, step_times: &[v1::StepTimePoint], metrics: WorkerMetrics) -> Self {
        let limits = method.limits();
        Self {
            method,
            limits,
            table: Table::default(),
            routers: HashMap::new(),
            waiting: VecDeque::new(),
            running: VecDeque::new(),
            formation: Formation::new(step_times),
            metrics,
        }
    }

    /// Runs until every sender of the mailbox is gone.
    pub fn run(mut self, mut mailbox: mpsc::Receiver<Message>, mut reactor: Reactor) {
        self.method.begin();
        while let Some(message) = reactor.next(&mut mailbox) {
            self.receive(message);
            loop {
                while let Ok(message) = mailbox.try_recv() {
                    self.receive(message);
                }
                if self.waiting.is_empty() && self.running.is_empty() {
                    break;
                }
                self.admit_waiting();
                match self.formation.hold(&self.running) {
                    Some(wait) => {
                        let message = reactor.next_within(&mut mailbox, wait);
                        message.into_iter().for_each(|message| self.receive(message));
                    }
                    None => {
                        let timing = reactor.during(size(&self.running), || self.forward());
                        reactor.exchange(|| self.flush(&timing));
                        self.metrics.observe(self.method.stats(), self.table.len());
                    }
                }
            }
            self.flush(&v1::StepTiming::default());
            self.metrics.observe(self.method.stats(), self.table.len());
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Opened { router, stream, replies } => {
                let outbox = v1::WorkerFrame::default();
                self.routers.insert(router, Router { stream, replies, outbox, told: None });
                // The shares of all others changed with it.
                self.flush(&v1::StepTiming::default());
            }
            Message::Frame { router, steps, closes, received } => {
                // Steps first: a close in the same frame is the later word on its generation.
                for step in steps {
                    self.enqueue(SequenceKey { router, sequence: step.step.sequence_id }, step, received);
                }
                for (sequence, generation) in closes {
                    self.close(SequenceKey { router, sequence }, generation);
                }
            }
            Message::Expired { router, stream } => {
                if self.routers.get(&router).is_some_and(|known| known.stream <= stream) {
                    self.routers.remove(&router);
                    for key in self.table.keys_of(router) {
                        self.close(key, u32::MAX);
                    }
                }
            }
        }
    }

    fn enqueue(&mut self, key: SequenceKey, sent: SentStep, received: Instant) {
        if self.table.is_over(&key, sent.step.generation) {
            return self.metrics.count(StepOutcome::Stale);
        }
        let method = &mut self.method;
        let held = self.table.entry(key, || method.open());
        if held.waiting.len() >= WAITING_STEPS {
            held.waiting.pop_front();
            self.metrics.count(StepOutcome::Overrun);
        }
        self.formation.arrived(key, &sent.step);
        held.waiting.push_back((sent, received));
        self.waiting.push_back(key);
    }

    /// Forgets a sequence, in the middle of its step too: nobody reads what that would say. A close of an older generation
    /// says nothing about what is held now.
    fn close(&mut self, key: SequenceKey, generation: u32) {
        let Some(held) = self.table.get_mut(&key) else { return };
        held.waiting.retain(|(sent, _)| sent.step.generation > generation);
        if held.holding.is_none() {
            let is_over = |task: &Task| task.key == key && task.step.generation <= generation;
            let running = self.running.iter().position(is_over);
            let Some(mut task) = running.and_then(|index| self.running.remove(index)) else { return };
            task.holding.cut(0);
            self.method.truncate(task.slot, 0);
            held.holding = Some(task.holding);
        }
        let is_over = held.holding.as_ref().is_some_and(|holding| holding.generation() <= generation);
        if is_over && held.waiting.is_empty() {
            let slot = held.slot;
            self.table.remove(&key);
            self.formation.forget(&key);
            self.method.close(slot);
        }
    }

    /// One forward, and its answers into the outboxes; nothing where nothing is to be run.
    fn forward(&mut self) -> v1::StepTiming {
        let began = Instant::now();
        let before = self.method.stats();
        let mut timing = v1::StepTiming::default();
        let mut aside = self.formation.set_aside(&mut self.running);
        let sequences = self.running.len();
        let prompts = prompt_rows_left(&self.running);
        if !self.running.is_empty() {
            let advanced = self.method.advance(&mut self.running);
            let prompts_left = prompt_rows_left(&self.running);
            // They waited: they come before what is admitted after them.
            aside.append(&mut self.running);
            self.running = aside;
            match advanced {
                Ok(finished) => {
                    let after = self.method.stats();
                    timing.rows = (after.rows - before.rows) as u32;
                    timing.prefill_rows = prompts.saturating_sub(prompts_left).min(timing.rows);
                    timing.kv_tokens = after.kv_tokens - before.kv_tokens;
                    let took = began.elapsed();
                    timing.compute_us = took.as_micros() as u64;
                    timing.queue_us = mean_queue_us(&finished);
                    self.metrics.forward(took);
                    self.formation.ran(&timing, sequences, took);
                    for (task, body) in finished {
                        self.finish(task, body);
                    }
                }
                Err(NeedRoom) => self.make_room(),
            }
        }
        timing
    }

    fn admit_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(key) = self.waiting.pop_front() else { return };
            let Some(held) = self.table.get_mut(&key) else { continue };
            if held.holding.is_none() {
                // Its turn comes when the step that runs is done.
                self.waiting.push_back(key);
                continue;
            }
            if let Some((sent, received)) = held.waiting.pop_front() {
                self.admit(key, sent, received);
            }
        }
    }

    fn admit(&mut self, key: SequenceKey, SentStep { step, span_id }: SentStep, received: Instant) {
        let held = self.table.get_mut(&key).expect("the caller found it");
        let mut holding = held.holding.take().expect("the caller saw it idle");
        let slot = held.slot;
        let (outcome, body) = match holding.admit(&step, &self.limits) {
            Admission::Run => {
                self.method.truncate(slot, step.base_len);
                self.metrics.count(StepOutcome::Run);
                let task = Task::new(key, slot, step, holding, received).traced(span_id);
                return self.running.push_back(task);
            }
            Admission::Stale => (StepOutcome::Stale, None),
            Admission::NeedContext { have_len, have_spec } => {
                (StepOutcome::NeedContext, Some(ReplyBody::NeedContext { have_len, have_spec }))
            }
            Admission::Refused(reason) => (StepOutcome::Refused, Some(ReplyBody::Refused { reason })),
        };
        held.holding = Some(holding);
        self.metrics.count(outcome);
        if let Some(body) = body {
            self.answer(key.router, &Reply::to(&step, body));
        }
    }

    fn finish(&mut self, task: Task, body: ReplyBody) {
        let reply = task.reply(body);
        let (key, queue) = (task.key, task.started - task.received);
        self.give_back(task);
        self.metrics.queued(queue);
        self.answer(key.router, &reply);
    }

    /// Returns a task's holding to the table.
    fn give_back(&mut self, task: Task) {
        let held = self.table.get_mut(&task.key).expect("a sequence stays in the table while its step runs");
        held.holding = Some(task.holding);
    }

    fn answer(&mut self, router: RouterId, reply: &Reply) {
        self.formation.answered(&SequenceKey { router, sequence: reply.sequence_id });
        if let Some(router) = self.routers.get_mut(&router) {
            router.outbox.replies.push(reply_to_wire(reply));
        }
    }

    /// Sends what there is for each router; `timing` goes with replies only.
    fn flush(&mut self, timing: &v1::StepTiming) {
        self.grant_credits();
        for router in self.routers.values_mut() {
            if router.outbox == v1::WorkerFrame::default() {
                continue;
            }
            let mut frame = std::mem::take(&mut router.outbox);
            frame.timing = (!frame.replies.is_empty()).then_some(*timing);
            if router.replies.try_send(frame).is_err() {
                self.metrics.count(StepOutcome::ReplyDropped);
            }
        }
    }
}

/// What the next forward has to work on.
fn size(tasks: &VecDeque<Task>) -> ForwardSize {
    let rows = tasks.iter().map(Task::waiting).map(|waiting| waiting.context + waiting.tail).sum();
    ForwardSize { rows, sequences: tasks.len() }
}

/// Ids of prompts, and of other contexts longer than a round's, that are still to be run.
fn prompt_rows_left(tasks: &VecDeque<Task>) -> u32 {
    let left =
        tasks.iter().map(|task| task.context_left().len()).filter(|left| *left > ROUND_CONTEXT as usize);
    left.sum::<usize>() as u32
}

/// How long the steps that are answered now had waited to be admitted, on average.
fn mean_queue_us(finished: &[(Task, ReplyBody)]) -> u64 {
    let waited: u128 = finished.iter().map(|(task, _)| (task.started - task.received).as_micros()).sum();
    (waited / finished.len().max(1) as u128) as u64
}
