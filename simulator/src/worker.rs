//! A worker: the work of a device thread between two forwards, with a synthetic model in place of a real one.
//!
//! The real cache state admits steps ([`CachedSequence`]), the real batch former forms batches and decides
//! when they run, and the model answers with real replies. As at the device thread, steps that arrive during
//! a forward are processed when it is done.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use scheduling::batch::{RowLimits, StepChunk, StepRows, form_batch, prefill_rows};
use scheduling::batch_former::{Batch, BatchFormer, CompletedForward, Decision, ReadyStep};
use scheduling::cost::StepTimes;
use scheduling::profile::synthetic::{StepInProgress, SyntheticModel};
use scheduling::profile::{ForwardRows, Profile};
use scheduling::scheduler::events::{Frame, StepTiming};
use speculation::cached_sequence::{Admission, CachedSequence, WorkerLimits};
use speculation::tree::TreeGrowth;
use speculation::{Draft, Reply, ReplyBody, Role, SequenceId, Step};

use crate::Experiment;
use crate::clock::RouterFrame;

/// Settings of a worker in a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct WorkerSetup {
    /// Whether the KV of every prompt is cached from the start.
    pub(super) has_cached_prompts: bool,
    /// Rules of the worker, and what it reports about itself.
    pub(super) experiment: Experiment,
}

/// Next action of a worker.
#[derive(Debug, Clone, Copy)]
pub(super) enum NextAction {
    /// Nothing until something arrives.
    Idle,
    /// It delays its forward, at most for this time.
    Wait(Duration),
    /// It runs a forward of this many microseconds, without noise.
    Run(f64),
}

/// One sequence at this worker.
#[derive(Debug, Default)]
struct WorkerSequence {
    /// Absent while a step runs; [`RunningStep`] holds it then.
    cached: Option<CachedSequence>,
    /// Steps that wait for the running one, with their times of arrival.
    waiting: VecDeque<(Step, Duration)>,
    /// Number of tokens with KV.
    kv_tokens: u32,
}

/// A step in progress.
#[derive(Debug)]
struct RunningStep {
    step: Step,
    cached: CachedSequence,
    context_done: usize,
    drafted: Draft,
    tree_rows: usize,
    tree: Option<TreeGrowth>,
    agreed: Vec<bool>,
    received: Duration,
    /// Time until its first forward.
    queued: Option<Duration>,
}

#[derive(Debug)]
struct RunningForward {
    chunks: Vec<StepChunk>,
    rows: ForwardRows,
    began_at: Duration,
    prefill_before: u32,
}

/// The worker; see the module documentation.
#[derive(Debug)]
pub(super) struct Worker {
    model: SyntheticModel,
    setup: WorkerSetup,
    limits: WorkerLimits,
    batch_former: BatchFormer<SequenceId>,
    inbox: Vec<(RouterFrame, Duration)>,
    sequences: BTreeMap<SequenceId, WorkerSequence>,
    /// Sequences with waiting steps, oldest first.
    waiting: VecDeque<SequenceId>,
    running: Vec<RunningStep>,
    forward: Option<RunningForward>,
    /// Replies that do not come from a forward.
    outbox: Vec<Reply>,
}

impl Worker {
    pub(super) fn new(profile: &Arc<Profile>, role: Role, setup: WorkerSetup) -> Self {
        let model = SyntheticModel::new(Arc::clone(profile), role);
        let times = setup.experiment.reported_step_times(profile, role);
        Self {
            batch_former: BatchFormer::new(StepTimes::new(&times), setup.experiment.groups),
            limits: WorkerLimits {
                role,
                vocab_size: profile.vocab_size,
                max_model_len: u32::MAX,
                max_tree_tokens: setup.experiment.max_tree_tokens(role),
                grammars: false,
            },
            model,
            setup,
            inbox: Vec::new(),
            sequences: BTreeMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            forward: None,
            outbox: Vec::new(),
        }
    }

    pub(super) fn role(&self) -> Role {
        self.limits.role
    }

    pub(super) fn arrive(&mut self, now: Duration, frame: RouterFrame) {
        self.inbox.push((frame, now));
    }

    /// Returns the next action. Begins a forward unless one runs, nothing is ready, or the batch former
    /// delays it.
    pub(super) fn next_action(&mut self, now: Duration) -> NextAction {
        if self.forward.is_some() {
            return NextAction::Idle;
        }
        self.read_inbox();
        self.admit_waiting(now);
        if self.running.is_empty() {
            return NextAction::Idle;
        }
        let ready: Vec<ReadyStep<SequenceId>> = self.running.iter().map(RunningStep::ready_step).collect();
        match self.batch_former.decide(now, &ready) {
            Decision::Wait(delay) => NextAction::Wait(delay),
            Decision::Run(batch) => NextAction::Run(self.begin_forward(now, &ready, &batch)),
        }
    }

    fn read_inbox(&mut self) {
        for (frame, received) in std::mem::take(&mut self.inbox) {
            for step in frame.steps {
                let id = step.sequence_id;
                let sequence = self.sequences.entry(id).or_insert_with(|| WorkerSequence {
                    cached: Some(CachedSequence::default()),
                    ..WorkerSequence::default()
                });
                self.batch_former.arrived(received, id, StepRows::remaining(&step, 0, 0));
                sequence.waiting.push_back((step, received));
                self.waiting.push_back(id);
            }
            for (id, epoch) in frame.closes {
                self.close(id, epoch);
            }
        }
    }

    fn close(&mut self, id: SequenceId, epoch: u32) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.waiting.retain(|(step, _)| step.epoch > epoch);
        if sequence.cached.is_none() {
            let is_over =
                |running: &RunningStep| running.step.sequence_id == id && running.step.epoch <= epoch;
            let Some(index) = self.running.iter().position(is_over) else { return };
            sequence.cached = Some(self.running.remove(index).cached);
        }
        let is_over = sequence.cached.as_ref().is_some_and(|cached| cached.epoch() <= epoch);
        if is_over && sequence.waiting.is_empty() {
            self.sequences.remove(&id);
            self.batch_former.forget(&id);
        }
    }

    fn admit_waiting(&mut self, now: Duration) {
        for _ in 0..self.waiting.len() {
            let Some(id) = self.waiting.pop_front() else { return };
            let Some(sequence) = self.sequences.get_mut(&id) else { continue };
            let Some(mut cached) = sequence.cached.take() else {
                // It is admitted when the running step is done.
                self.waiting.push_back(id);
                continue;
            };
            let Some((step, received)) = sequence.waiting.pop_front() else {
                sequence.cached = Some(cached);
                continue;
            };
            let body = match cached.admit(&step, &self.limits) {
                Admission::Run => {
                    sequence.kv_tokens = step.base_len.min(sequence.kv_tokens);
                    let mut running = RunningStep::new(step, cached, received);
                    let num_drafting = self.running.len() as u32 + 1;
                    running.tree_rows = self.batch_former.tree_rows(num_drafting, running.step.start());
                    if self.setup.has_cached_prompts && running.step.base_len == 0 {
                        // Everything except the row whose logits are needed comes from the prefix cache.
                        running.context_done = running.step.append_ids.len().saturating_sub(1);
                        sequence.kv_tokens = running.context_done as u32;
                    }
                    self.running.push(running);
                    continue;
                }
                Admission::Stale => None,
                Admission::NeedContext { cached_len, has_spec } => {
                    Some(ReplyBody::NeedContext { cached_len, has_spec })
                }
                Admission::Refused(refusal) => Some(ReplyBody::Refused(refusal)),
            };
            sequence.cached = Some(cached);
            if let Some(body) = body {
                self.batch_former.answered(now, &id);
                self.outbox.push(Reply::to(&step, body));
            }
        }
    }

    fn begin_forward(&mut self, now: Duration, ready: &[ReadyStep<SequenceId>], batch: &Batch) -> f64 {
        let rows: Vec<StepRows> = ready.iter().map(|step| step.rows).collect();
        let limits = RowLimits { all: self.model.pool().max_batch_rows, prompts: batch.prompt_rows };
        let chunks = form_batch(&rows, limits, |index, _| batch.members[index]);
        let mut forward = ForwardRows::default();
        for chunk in &chunks {
            let sequence = self
                .sequences
                .get_mut(&ready[chunk.index].key)
                .expect("the sequence of a running step is known");
            let running = &mut self.running[chunk.index];
            running.queued.get_or_insert(now - running.received);
            let tail = chunk.rows(&rows[chunk.index]) - chunk.context;
            sequence.kv_tokens += chunk.context + tail;
            forward.add((chunk.context, tail), sequence.kv_tokens);
        }
        let prefill_before = prefill_rows(rows.into_iter());
        self.forward = Some(RunningForward { chunks, rows: forward, began_at: now, prefill_before });
        self.model.pool().curve.micros(forward)
    }

    /// Completes the forward, `seconds` after the start of the run. Returns the frame for the router and the
    /// duration of the forward.
    pub(super) fn forward_done(&mut self, now: Duration, seconds: f64) -> (Frame, Duration) {
        let forward = self.forward.take().expect("a completed forward was started");
        let mut answers: BTreeMap<usize, ReplyBody> = BTreeMap::new();
        for chunk in &forward.chunks {
            let body = self.model.advance(&mut self.running[chunk.index].in_progress(), chunk, seconds);
            answers.extend(body.map(|body| (chunk.index, body)));
        }
        let took = now - forward.began_at;
        let prefill_after = prefill_rows(self.running.iter().map(RunningStep::rows_left));
        let rows = forward.rows.rows + forward.rows.prefill_rows;
        let ran = CompletedForward {
            rows,
            prefill_rows: forward.prefill_before.saturating_sub(prefill_after).min(rows),
            sequences: forward.chunks.len() as u32,
            kv_tokens: forward.rows.kv_tokens,
        };
        self.batch_former.forward_done(ran, took);
        let (replies, queue) = self.finish(now, answers);
        let CompletedForward { rows, prefill_rows, sequences, kv_tokens } = ran;
        let (queue, compute) = (whole_micros(queue), whole_micros(took));
        let timing = StepTiming { rows, prefill_rows, sequences, kv_tokens, queue, compute };
        (Frame { timing, replies, ..Frame::default() }, took)
    }

    /// Answers the complete steps. Returns the replies and their mean time until their first forward.
    fn finish(&mut self, now: Duration, mut answers: BTreeMap<usize, ReplyBody>) -> (Vec<Reply>, Duration) {
        let mut replies = std::mem::take(&mut self.outbox);
        let (mut queue, num_answers) = (Duration::ZERO, answers.len().max(1) as u32);
        if answers.is_empty() {
            return (replies, queue);
        }
        for (index, running) in std::mem::take(&mut self.running).into_iter().enumerate() {
            let Some(body) = answers.remove(&index) else {
                self.running.push(running);
                continue;
            };
            let RunningStep { step, cached, agreed, queued, .. } = running;
            queue += queued.unwrap_or_default();
            let id = step.sequence_id;
            let sequence = self.sequences.get_mut(&id).expect("the sequence of a running step is known");
            sequence.kv_tokens = cached.len();
            sequence.cached = Some(cached);
            self.batch_former.answered(now, &id);
            let agreed = if self.setup.experiment.reports_agreement { agreed } else { Vec::new() };
            replies.push(Reply { agreed, ..Reply::to(&step, body) });
        }
        (replies, queue / num_answers)
    }

    /// Takes replies that are due although no forward runs.
    pub(super) fn take_outbox(&mut self) -> Option<Frame> {
        let replies = std::mem::take(&mut self.outbox);
        (!replies.is_empty()).then(|| Frame { replies, ..Frame::default() })
    }
}

/// Rounds down to whole microseconds, as frames do.
fn whole_micros(duration: Duration) -> Duration {
    Duration::from_micros(duration.as_micros() as u64)
}

impl RunningStep {
    fn new(step: Step, cached: CachedSequence, received: Duration) -> Self {
        Self {
            step,
            cached,
            context_done: 0,
            drafted: Draft::default(),
            tree_rows: 0,
            tree: None,
            agreed: Vec::new(),
            received,
            queued: None,
        }
    }

    fn in_progress(&mut self) -> StepInProgress<'_> {
        StepInProgress {
            step: &self.step,
            cached: &mut self.cached,
            context_done: &mut self.context_done,
            drafted: &mut self.drafted,
            tree_rows: self.tree_rows,
            tree: &mut self.tree,
            agreed: &mut self.agreed,
        }
    }

    fn rows_left(&self) -> StepRows {
        match &self.tree {
            Some(tree) => StepRows::of_tree(tree),
            None => StepRows::remaining(&self.step, self.context_done, self.drafted.token_ids.len()),
        }
    }

    fn ready_step(&self) -> ReadyStep<SequenceId> {
        ReadyStep::new(self.step.sequence_id, &self.step, &self.cached, self.rows_left())
    }
}
