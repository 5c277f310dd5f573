//! The device thread without a model: an executor that counts blocks and answers at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use scheduling::cost::StepTimePoint;
use service::metrics::Metrics;
use speculation::prefix::Prefix;
use speculation::{Role, SequenceSpec, TokenId};

use super::*;
use crate::executor::{ExecutorStats, OutOfKvBlocks};
use crate::task::Slot;

/// An executor with one block per token; a task needs its whole context at once.
pub(super) struct Blocks {
    total: usize,
    used: HashMap<Slot, u32>,
    next: u64,
}

impl StepExecutor for Blocks {
    fn limits(&self) -> WorkerLimits {
        WorkerLimits {
            role: Role::Target,
            vocab_size: 1_000,
            max_model_len: 1_000,
            max_tree_tokens: 0,
            grammars: false,
        }
    }

    fn open(&mut self) -> Slot {
        self.next += 1;
        self.used.insert(Slot(self.next), 0);
        Slot(self.next)
    }

    fn close(&mut self, slot: Slot) {
        self.used.remove(&slot).expect("closed once");
    }

    fn truncate(&mut self, slot: Slot, len: u32) {
        let used = self.used.get_mut(&slot).expect("open");
        *used = len.min(*used);
    }

    fn advance(
        &mut self,
        tasks: &mut VecDeque<Task>,
        _prompt_rows: u32,
    ) -> Result<Vec<(Task, ReplyBody)>, OutOfKvBlocks> {
        let free = self.total - self.used.values().sum::<u32>() as usize;
        let first = tasks.front().expect("called with tasks").step.append_ids.len();
        // A forward has rows.
        if first > free || first == 0 {
            return Err(OutOfKvBlocks);
        }
        let task = tasks.pop_front().expect("there is one");
        *self.used.get_mut(&task.slot).expect("open") = task.step.start();
        let cached_len = task.step.start();
        Ok(vec![(task, ReplyBody::Fed { cached_len, prompt_logprobs: None })])
    }

    fn blocks_held(&self, slot: Slot) -> u64 {
        self.used.get(&slot).map_or(0, |used| u64::from(*used))
    }

    fn stats(&self) -> ExecutorStats {
        let kv_blocks_used = self.used.values().map(|used| u64::from(*used)).sum();
        ExecutorStats { kv_blocks_used, kv_blocks_total: self.total as u64, ..ExecutorStats::default() }
    }
}

pub(super) struct Bench<M = Blocks> {
    pub(super) step_loop: StepLoop<M>,
    step_seq: u64,
}

impl Bench {
    pub(super) fn new(total: usize) -> Self {
        Self::with_step_times(total, &[])
    }

    pub(super) fn with_step_times(total: usize, times: &[StepTimePoint]) -> Self {
        Self::of(Blocks { total, used: HashMap::new(), next: 0 }, times)
    }
}

impl<M: StepExecutor> Bench<M> {
    pub(super) fn of(executor: M, times: &[StepTimePoint]) -> Self {
        let (times, metrics) = (StepTimes::new(times), WorkerMetrics::new(&Metrics::new()));
        Self { step_loop: StepLoop::new(executor, &times, metrics), step_seq: 0 }
    }

    pub(super) fn open(&mut self, router: u64, stream: u64) -> mpsc::Receiver<v1::WorkerFrame> {
        self.open_stream(router, stream).0
    }

    /// Opens a stream. Returns its frames, and a receiver that closes when the stream is replaced.
    pub(super) fn open_stream(
        &mut self,
        router: u64,
        stream: u64,
    ) -> (mpsc::Receiver<v1::WorkerFrame>, oneshot::Receiver<Infallible>) {
        let (replies, received) = mpsc::channel(64);
        let (newest, replaced) = oneshot::channel();
        let (router, stream) = (RouterId(router), StreamId(stream));
        self.step_loop.receive(Message::Opened { router, stream, replies, newest });
        (received, replaced)
    }

    pub(super) fn step(
        &mut self,
        sequence: u64,
        epoch: u32,
        base: &[TokenId],
        append_ids: &[TokenId],
    ) -> Step {
        self.step_seq += 1;
        Step {
            sequence_id: SequenceId(sequence),
            epoch,
            step_seq: self.step_seq,
            spec: base.is_empty().then(|| Arc::new(SequenceSpec::default())),
            base_len: base.len() as u32,
            prefix_hash: Prefix::new(base).hash_at(base.len() as u32).unwrap(),
            append_ids: append_ids.to_vec(),
            work: Work::Feed,
        }
    }

    /// Sends a frame on the router's newest stream.
    pub(super) fn send(&mut self, router: u64, steps: Vec<Step>, closes: &[(u64, u32)]) {
        let stream = self.step_loop.routers.get(&RouterId(router)).map_or(0, |known| known.stream.0);
        self.send_by((router, stream), steps, closes);
    }

    pub(super) fn send_by(&mut self, (router, stream): (u64, u64), steps: Vec<Step>, closes: &[(u64, u32)]) {
        self.receive((router, stream), steps, closes);
        while !self.step_loop.waiting.is_empty() || !self.step_loop.running.is_empty() {
            self.step_loop.admit_waiting();
            let Decision::Run(batch) = self.step_loop.next_forward() else { continue };
            let timing = self.step_loop.forward(&batch);
            self.step_loop.flush(&timing);
        }
    }

    /// Queues a frame's steps without running them.
    pub(super) fn receive(&mut self, (router, stream): (u64, u64), steps: Vec<Step>, closes: &[(u64, u32)]) {
        let closes = closes.iter().map(|(id, epoch)| (SequenceId(*id), *epoch)).collect();
        let steps = steps.into_iter().map(|step| SentStep { step, span_id: 0 }).collect();
        let (router, stream) = (RouterId(router), StreamId(stream));
        self.step_loop.receive(Message::Frame { router, stream, steps, closes, received: Instant::now() });
    }

    /// Makes the running tasks older, as if this much time had passed since their last event.
    pub(super) fn age_running(&mut self, time: Duration) {
        for task in &mut self.step_loop.running {
            task.received -= time;
            task.started -= time;
            task.first_forward = task.first_forward.map(|began| began - time);
        }
    }

    pub(super) fn blocks_used(&self) -> u64 {
        self.step_loop.executor.stats().kv_blocks_used
    }
}

/// Reads the frames that a router received: (sequence, text).
pub(super) fn read(replies: &mut mpsc::Receiver<v1::WorkerFrame>) -> Vec<(u64, String)> {
    // Credits are read by `credits`.
    use v1::reply::Body;
    let mut read = Vec::new();
    while let Ok(frame) = replies.try_recv() {
        read.extend(frame.preempted.iter().map(|preempted| (preempted.sequence_id, "preempted".to_owned())));
        read.extend(frame.replies.into_iter().map(|reply| {
            let words = match reply.body.unwrap() {
                Body::Fed(fed) => format!("fed {}", fed.cached_len),
                Body::NeedContext(need) => format!("need {} {}", need.cached_len, need.has_spec),
                Body::Refused(refused) => format!("{}: {}", refused.cause().as_str_name(), refused.reason),
                Body::Proposal(_) | Body::Span(_) => unreachable!("the executor only feeds"),
            };
            (reply.sequence_id, words)
        }));
    }
    read
}

pub(super) fn said(sequence: u64, words: &str) -> (u64, String) {
    (sequence, words.to_owned())
}
