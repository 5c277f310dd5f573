//! The thread that owns the model and all cached sequences: a bounded mailbox in, replies out.
//!
//! Each iteration drains the mailbox, admits waiting steps, runs one forward ([`forward`]) and sends the
//! finished replies, so sequences join and leave at every forward (continuous batching).
//! [`scheduling::batch_former`] decides which steps share a forward and when it starts. Messages and replies
//! go through the gRPC service; between short forwards this thread drives the service's runtime itself
//! ([`crate::reactor`]).

#[cfg(test)]
mod bench;
mod forward;
mod kv_blocks;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::time::Instant;

use proto::convert::reply_to_wire;
use proto::v1;
use scheduling::batch::GroupRules;
use scheduling::batch::StepRows;
use scheduling::batch_former::{BatchFormer, Decision};
use scheduling::cost::{ForwardShape, StepTimes};
use service::shutdown::{GateGuard, Lifetime};
use speculation::cached_sequence::{Admission, WorkerLimits};
use speculation::{Refusal, RefusalCause, Reply, ReplyBody, Role, SequenceId, Step, Work};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

use crate::ahead::DraftAhead;
use crate::executor::StepExecutor;
use crate::metrics::{StepOutcome, WorkerMetrics};
use crate::reactor::{Reactor, ReadDelay};
use crate::table::{RouterId, SequenceKey, SequenceTable};
use crate::task::Task;

/// Worker threads outside the runtime: the device thread.
pub const DEVICE_THREADS: usize = 1;

/// Capacity of the mailbox in frames; a full mailbox applies backpressure to the routers' streams.
pub const MAILBOX_FRAMES: usize = 1_024;

/// Capacity of a router's reply queue in frames; when it is full, frames are dropped and the router asks
/// again.
pub const REPLY_FRAMES: usize = 1_024;

/// Maximum queued steps per sequence. Beyond it the oldest is dropped, because its reply is no longer read.
const WAITING_STEPS: usize = 16;

/// Maximum sequences per worker, idle ones included; a router that opens more is refused.
const MAX_SEQUENCES: usize = 65_536;

/// Number of a stream within this process; messages of older streams can be recognized by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// A step and its trace span, as received from a router.
#[derive(Debug)]
pub struct SentStep {
    /// The step.
    pub step: Step,
    /// Span of the router's round, the parent of the step's span; 0: none.
    pub span_id: u64,
}

/// Messages from the gRPC service to the device thread.
#[derive(Debug)]
pub enum Message {
    /// A router connected. A newer stream of the same router replaces the older one and starts empty: the
    /// router has given up its sequences of the older stream.
    Opened {
        /// The router.
        router: RouterId,
        /// The router's stream.
        stream: StreamId,
        /// Channel for replies.
        replies: mpsc::Sender<v1::WorkerFrame>,
        /// Dropped when this stream is no longer the router's newest; the service then ends the stream.
        newest: oneshot::Sender<Infallible>,
    },
    /// A frame from a router.
    Frame {
        /// The router.
        router: RouterId,
        /// The stream that the frame arrived on. Steps of a replaced stream are dropped: their replies would
        /// go to the newer stream, where the router does not expect them.
        stream: StreamId,
        /// The steps, in order.
        steps: Vec<SentStep>,
        /// Sequences to close, each with the epoch that ended.
        closes: Vec<(SequenceId, u32)>,
        /// Estimated arrival time.
        received: Instant,
    },
    /// The worker is about to stop: routers are informed, and running sequences may finish.
    Drain,
    /// A stream ended; its router's sequences are closed, but prefixes stay cached.
    Closed {
        /// The router.
        router: RouterId,
        /// The stream that ended. Ignored if the router has a newer one.
        stream: StreamId,
    },
}

/// The sending side of the device thread's mailbox.
#[derive(Debug)]
pub struct Mailbox {
    /// Holds at most [`MAILBOX_FRAMES`] messages.
    pub messages: mpsc::Sender<Message>,
    /// Estimates when a frame that is read now arrived.
    pub read_delay: ReadDelay,
}

/// State of the device thread.
#[derive(Debug)]
pub struct StepLoop<M> {
    executor: M,
    limits: WorkerLimits,
    table: SequenceTable,
    routers: HashMap<RouterId, Router>,
    /// Sequences with queued steps, oldest first; once for each step.
    waiting: VecDeque<SequenceKey>,
    running: VecDeque<Task>,
    batch_former: BatchFormer<SequenceKey>,
    ahead: DraftAhead,
    /// Start of the batch former's clock.
    began: Instant,
    metrics: WorkerMetrics,
    is_draining: bool,
    /// Held while there are sequences, so that a drain waits for them.
    work: Option<GateGuard>,
}

#[derive(Debug)]
struct Router {
    /// The newest stream, the only one that is read and answered.
    stream: StreamId,
    replies: mpsc::Sender<v1::WorkerFrame>,
    /// Held while `stream` is the newest; see [`Message::Opened`].
    _newest: oneshot::Sender<Infallible>,
    outbox: v1::WorkerFrame,
    /// Credits that were sent last.
    last_credits: Option<u64>,
    /// Whether this router was informed of the drain.
    is_drain_sent: bool,
}

impl<M: StepExecutor> StepLoop<M> {
    /// Creates a loop without sequences. `times` are the executor's forward times, as far as they were
    /// profiled.
    pub fn new(executor: M, times: &StepTimes, metrics: WorkerMetrics) -> Self {
        let limits = executor.limits();
        Self {
            executor,
            limits,
            table: SequenceTable::default(),
            routers: HashMap::new(),
            waiting: VecDeque::new(),
            running: VecDeque::new(),
            batch_former: BatchFormer::new(times.clone(), GroupRules::default()),
            ahead: DraftAhead::new(0),
            began: Instant::now(),
            metrics,
            is_draining: false,
            work: None,
        }
    }

    /// Enables drafting ahead with at most `max_branches` branches per proposal.
    pub fn drafting_ahead(self, max_branches: usize, times: &StepTimes) -> Self {
        Self { ahead: DraftAhead::new(max_cheap_rows(max_branches, times)), ..self }
    }

    /// Runs until all senders of the mailbox are dropped. A drain of `lifetime` waits for the sequences.
    pub fn run(mut self, mut mailbox: mpsc::Receiver<Message>, mut reactor: Reactor, lifetime: &Lifetime) {
        self.executor.begin();
        while let Some(message) = reactor.recv(&mut mailbox) {
            self.receive(message);
            while self.turn(&mut mailbox, &mut reactor, lifetime) {}
            self.flush(&v1::StepTiming::default());
            self.observe();
            if self.table.is_empty() {
                self.work = None;
            }
        }
    }

    /// Handles the messages that have arrived, then runs or delays at most one forward. Returns false if
    /// there is nothing to do until the next message.
    fn turn(
        &mut self,
        mailbox: &mut mpsc::Receiver<Message>,
        reactor: &mut Reactor,
        lifetime: &Lifetime,
    ) -> bool {
        while let Ok(message) = mailbox.try_recv() {
            self.receive(message);
        }
        if self.work.is_none() && !self.table.is_empty() {
            self.work = Some(lifetime.work("sequences"));
        }
        if self.waiting.is_empty() && self.running.is_empty() {
            let Some(rows) = self.ahead.next_rows() else { return false };
            self.forward_ahead(reactor, rows);
            return true;
        }
        if let Some(queue_us) = self.admit_waiting() {
            // Replies that need no forward do not wait for one.
            let timing = v1::StepTiming { queue_us, ..v1::StepTiming::default() };
            reactor.write_and_read(|| self.flush(&timing));
        }
        if self.running.is_empty() {
            return true;
        }
        match self.next_forward() {
            Decision::Wait(wait) => {
                let message = reactor.recv_timeout(mailbox, wait);
                message.into_iter().for_each(|message| self.receive(message));
            }
            Decision::Run(batch) => {
                let timing = reactor.run_forward(self.forward_size(), || self.forward(&batch));
                reactor.write_and_read(|| self.flush(&timing));
                self.observe();
            }
        }
        true
    }

    fn observe(&self) {
        self.metrics.observe(self.executor.stats(), self.table.len());
        self.metrics.observe_ahead(self.ahead.stats());
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Opened { router, stream, replies, newest } => {
                if self.routers.get(&router).is_some_and(|known| known.stream > stream) {
                    // Two streams opened at once, and this message arrived after the newer one's.
                    return;
                }
                self.close_sequences_of(router);
                let outbox = v1::WorkerFrame::default();
                let newest = Router {
                    stream,
                    replies,
                    _newest: newest,
                    outbox,
                    last_credits: None,
                    is_drain_sent: false,
                };
                self.routers.insert(router, newest);
                // The new router changes the shares of all others.
                self.flush(&v1::StepTiming::default());
            }
            Message::Frame { router, stream, steps, closes, received } => {
                let is_newest = self.routers.get(&router).is_some_and(|known| known.stream == stream);
                // Steps first: a close in the same frame applies to them too.
                for step in steps {
                    if is_newest {
                        self.enqueue(SequenceKey { router, sequence: step.step.sequence_id }, step, received);
                    } else {
                        self.metrics.count(StepOutcome::Stale);
                    }
                }
                for (sequence, epoch) in closes {
                    self.close(SequenceKey { router, sequence }, epoch);
                }
            }
            Message::Drain => {
                self.is_draining = true;
                self.flush(&v1::StepTiming::default());
            }
            Message::Closed { router, stream } => {
                if self.routers.get(&router).is_some_and(|known| known.stream == stream) {
                    self.routers.remove(&router);
                    self.close_sequences_of(router);
                }
            }
        }
    }

    fn close_sequences_of(&mut self, router: RouterId) {
        for key in self.table.keys_of(router) {
            self.close(key, u32::MAX);
        }
    }

    fn enqueue(&mut self, key: SequenceKey, sent: SentStep, received: Instant) {
        if self.table.is_preempted(&key, sent.step.epoch) {
            return self.metrics.count(StepOutcome::Stale);
        }
        if self.table.len() >= MAX_SEQUENCES && self.table.get_mut(&key).is_none() {
            self.metrics.count(StepOutcome::Refused);
            let reason = format!("this worker already has {MAX_SEQUENCES} open sequences, its maximum");
            let refusal = Refusal { cause: RefusalCause::Capacity, reason };
            return self.answer(key.router, &Reply::to(&sent.step, ReplyBody::Refused(refusal)));
        }
        let executor = &mut self.executor;
        let entry = self.table.entry(key, || executor.open());
        if entry.waiting.len() < WAITING_STEPS {
            self.waiting.push_back(key);
        } else {
            entry.waiting.pop_front();
            self.metrics.count(StepOutcome::Overrun);
        }
        // The arrival time, not the time of reading: a step that arrived during a forward would otherwise
        // seem to have arrived at its end.
        let arrived_at = received.saturating_duration_since(self.began);
        self.batch_former.arrived(arrived_at, key, StepRows::remaining(&sent.step, 0, 0));
        entry.waiting.push_back((sent, received));
    }

    /// Closes a sequence, even while its step runs, because the router ignores the reply. A close of an older
    /// epoch does not affect the current one.
    fn close(&mut self, key: SequenceKey, epoch: u32) {
        let Some(entry) = self.table.get_mut(&key) else { return };
        entry.waiting.retain(|(sent, _)| sent.step.epoch > epoch);
        if entry.cached.is_none() {
            let is_over = |task: &Task| task.key == key && task.step.epoch <= epoch;
            let running = self.running.iter().position(is_over);
            let Some(mut task) = running.and_then(|index| self.running.remove(index)) else { return };
            task.cached.truncate(0);
            self.executor.truncate(task.slot, 0);
            entry.cached = Some(task.cached);
        }
        let is_over = entry.cached.as_ref().is_some_and(|cached| cached.epoch() <= epoch);
        if is_over && entry.waiting.is_empty() {
            let slot = entry.slot;
            self.table.remove(&key);
            self.batch_former.forget(&key);
            self.ahead.drop_sequence(&mut self.executor, &key);
            self.executor.close(slot);
        }
    }

    /// Admits queued steps. If one was answered without a forward, returns its queue time in microseconds.
    fn admit_waiting(&mut self) -> Option<u64> {
        let mut answered = None;
        for _ in 0..self.waiting.len() {
            let Some(key) = self.waiting.pop_front() else { break };
            let Some(entry) = self.table.get_mut(&key) else { continue };
            if entry.cached.is_none() {
                // It is admitted after the running step is done.
                self.waiting.push_back(key);
                continue;
            }
            if let Some((sent, received)) = entry.waiting.pop_front() {
                answered = self.admit(key, sent, received).or(answered);
            }
        }
        answered
    }

    /// Admits one step. If it is answered without a forward, returns its queue time in microseconds.
    fn admit(
        &mut self,
        key: SequenceKey,
        SentStep { mut step, span_id }: SentStep,
        received: Instant,
    ) -> Option<u64> {
        limit_to_window(&mut step, self.limits.max_model_len);
        let entry = self.table.get_mut(&key).expect("the caller found it");
        let mut cached = entry.cached.take().expect("the caller checked that it is idle");
        let slot = entry.slot;
        let (outcome, body) = match cached.admit(&step, &self.limits) {
            // A feed that only cuts: no forward could run it, because it has no rows.
            Admission::Run if step.append_ids.is_empty() => {
                self.ahead.drop_sequence(&mut self.executor, &key);
                let (cached_len, prompt_logprobs) = (step.base_len, None);
                (StepOutcome::Run, Some(ReplyBody::Fed { cached_len, prompt_logprobs }))
            }
            Admission::Run => {
                self.metrics.count(StepOutcome::Run);
                let found = self.ahead.take(&mut self.executor, (&key, &step, &cached), received);
                let mut task = Task::new(key, slot, step, cached, received).traced(span_id);
                if self.limits.role == Role::Draft && !self.ahead.is_enabled() {
                    let num_drafting = self.running.len() as u32 + 1;
                    task.tree_rows = self.batch_former.tree_rows(num_drafting, task.step.start());
                }
                let Some(found) = found else {
                    self.executor.truncate(slot, task.step.base_len);
                    self.running.push_back(task);
                    return None;
                };
                entry.slot = found.slot;
                self.executor.close(slot);
                let mut task = task.resumed_from(found);
                let Some(body) = self.executor.resume(&mut task) else {
                    self.running.push_back(task);
                    return None;
                };
                let queue = task.queue_time().as_micros() as u64;
                self.finish(task, body);
                return Some(queue);
            }
            Admission::Stale => (StepOutcome::Stale, None),
            Admission::NeedContext { cached_len, has_spec } => {
                (StepOutcome::NeedContext, Some(ReplyBody::NeedContext { cached_len, has_spec }))
            }
            Admission::Refused(refusal) => (StepOutcome::Refused, Some(ReplyBody::Refused(refusal))),
        };
        // A higher epoch discards what is cached even if its step does not run. The KV of a sequence without
        // ids could not be evicted.
        self.executor.truncate(slot, cached.len());
        entry.cached = Some(cached);
        self.metrics.count(outcome);
        self.answer(key.router, &Reply::to(&step, body?));
        Some(received.elapsed().as_micros() as u64)
    }

    /// Answers a step that the executor has computed, or could not compute.
    fn finish(&mut self, task: Task, body: ReplyBody) {
        if matches!(body, ReplyBody::Refused(_)) {
            self.metrics.count(StepOutcome::Failed);
        }
        self.end(task, body);
    }

    /// Answers a running step.
    fn end(&mut self, mut task: Task, body: ReplyBody) {
        self.ahead.on_reply(&mut task, &body, self.table.len());
        let reply = task.reply(body);
        let (key, queue) = (task.key, task.queue_time());
        self.return_to_table(task);
        self.metrics.queued(queue);
        self.answer(key.router, &reply);
    }

    /// Returns a task's cached sequence to the table.
    fn return_to_table(&mut self, task: Task) {
        let entry = self.table.get_mut(&task.key).expect("a sequence stays in the table while its step runs");
        entry.cached = Some(task.cached);
    }

    fn answer(&mut self, router: RouterId, reply: &Reply) {
        self.batch_former
            .answered(self.began.elapsed(), &SequenceKey { router, sequence: reply.sequence_id });
        if let Some(router) = self.routers.get_mut(&router) {
            router.outbox.replies.push(reply_to_wire(reply));
        }
    }

    /// Sends the contents of the outboxes; `timing` is attached to frames with replies only.
    fn flush(&mut self, timing: &v1::StepTiming) {
        self.grant_credits();
        for router in self.routers.values_mut() {
            router.outbox.draining = self.is_draining && !router.is_drain_sent;
            if router.outbox == v1::WorkerFrame::default() {
                continue;
            }
            let mut frame = std::mem::take(&mut router.outbox);
            frame.timing = (!frame.replies.is_empty()).then_some(*timing);
            match router.replies.try_send(frame) {
                Ok(()) => router.is_drain_sent = self.is_draining,
                // The router asks again for replies; it does not know what else there was.
                Err(TrySendError::Full(frame)) => {
                    self.metrics.count(StepOutcome::ReplyDropped);
                    let v1::WorkerFrame { preempted, credits, .. } = frame;
                    router.outbox = v1::WorkerFrame { preempted, credits, ..v1::WorkerFrame::default() };
                }
                Err(TrySendError::Closed(_)) => self.metrics.count(StepOutcome::ReplyDropped),
            }
        }
    }
}

/// Maximum cost of a forward of branches, relative to a forward of one row: steps that arrive meanwhile wait
/// for its end.
const MAX_BRANCH_COST: f64 = 1.25;

/// Largest number of rows up to `most` that costs little more than one row; 0 if there is none.
fn max_cheap_rows(most: usize, times: &StepTimes) -> usize {
    let micros = |rows: usize| times.micros(ForwardShape::plain(rows as f64, 0.0));
    (1..=most).rev().find(|&rows| micros(rows) <= MAX_BRANCH_COST * micros(1)).unwrap_or(0)
}

/// Shortens a proposal that would exceed the worker's window; a chain remains a chain. Every guess but the last
/// runs as a row, so one row too many would fail the forward for all sequences in it.
fn limit_to_window(step: &mut Step, max_model_len: u32) {
    let start = u64::from(step.base_len) + step.append_ids.len() as u64;
    if let Work::Propose { num_draft_tokens, num_tree_tokens } = &mut step.work {
        let is_chain = num_tree_tokens <= num_draft_tokens;
        let rows_left = u64::from(max_model_len).saturating_sub(start);
        *num_draft_tokens = (*num_draft_tokens).min(u32::try_from(rows_left + 1).unwrap_or(u32::MAX));
        if is_chain {
            *num_tree_tokens = (*num_tree_tokens).min(*num_draft_tokens);
        }
    }
}
