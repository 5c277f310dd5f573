//! The task that owns every sequence of this router: requests and worker frames in, steps and tokens out.
//!
//! It never waits for a worker or a client: steps go to bounded outboxes, tokens into the generation's bounded channel, and
//! whatever does not answer in time is a deadline of the sequence's own state machine.

mod measure;
mod rounds;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use proto::convert::{reply_from_wire, step_to_wire};
use proto::v1;
use service::health::Health;
use service::shutdown::Lifetime;
use speculation::sequence::{Action, Event, Limits, Sequence};
use speculation::spec::lane_number;
use speculation::{Role, SequenceId, SequenceSpec, Step, Work};
use tokio::time::Instant;

use crate::error::RouterError;
use crate::generation::{Delivery, Generation, GenerationEvent, GenerationSink, GenerationStream, channel};
use crate::lane::controllers::Controllers;
use crate::lane::policy::PolicyConfig;
use crate::lane::pool::Pool;
use crate::lane::running::{RoundClock, Running};
use crate::lane::{Inbox, LaneKey, Submission};
use crate::metrics::RouterMetrics;
use crate::workers::{WorkerEvent, WorkerKey};

/// What an operator sets for the rounds.
#[derive(Debug, Clone, Copy)]
pub struct RoundsConfig {
    /// k.
    pub policy: PolicyConfig,
    /// How long a target may take for one step before it is sent again.
    pub target_deadline: Duration,
    /// How long a sequence may wait for a target after it lost one.
    pub target_wait: Duration,
}

type Cancelled = Pin<Box<dyn Future<Output = SequenceId> + Send>>;

/// See the module's page.
pub struct Owner {
    config: RoundsConfig,
    metrics: RouterMetrics,
    health: Health,
    began: Instant,
    sequences: HashMap<SequenceId, Running>,
    next_sequence: u64,
    pool: Pool,
    controllers: Controllers,
    /// Sequences that have a target and wait for their lane; rounds begin when all that arrived was read, so that the
    /// steps of many sequences leave in one frame.
    ready: VecDeque<SequenceId>,
    /// Of these, the ones that begin plainly and wait for others of their target.
    plain: Vec<SequenceId>,
    waiting_for_target: VecDeque<SequenceId>,
    /// Deadlines, earliest first; those that no longer hold are skipped.
    timers: BinaryHeap<Reverse<(Duration, SequenceId)>>,
    cancelled: FuturesUnordered<Cancelled>,
}

impl Owner {
    /// An owner of nothing yet.
    pub fn new(config: RoundsConfig, metrics: RouterMetrics, health: Health) -> Self {
        Self {
            config,
            controllers: Controllers::new(config.policy.max_draft_tokens, metrics.clone()),
            metrics,
            health,
            began: Instant::now(),
            sequences: HashMap::new(),
            next_sequence: 1,
            pool: Pool::default(),
            ready: VecDeque::new(),
            plain: Vec::new(),
            waiting_for_target: VecDeque::new(),
            timers: BinaryHeap::new(),
            cancelled: FuturesUnordered::new(),
        }
    }

    /// Runs until the lifetime is cancelled.
    pub async fn run(mut self, mut inbox: Inbox, lifetime: Lifetime) {
        let stopped = lifetime.cancelled();
        tokio::pin!(stopped);
        let mut flush_again = None;
        loop {
            let wake = self.wake_at(flush_again);
            tokio::select! {
                biased;
                // The process ends.
                () = &mut stopped => return,
                // Clients that left or have all they want: first, for their work is waste.
                Some(id) = self.cancelled.next(), if !self.cancelled.is_empty() => self.cancel(id),
                // What workers said moves sequences that are under way.
                Some(event) = inbox.workers.recv() => self.worker_event(event),
                // New requests.
                Some(submission) = inbox.submissions.recv() => self.submit(submission),
                // An operator asks why.
                Some(answer) = inbox.questions.recv() => drop(answer.send(self.controllers.explain())),
                // Deadlines.
                () = tokio::time::sleep_until(wake) => self.fire_timers(),
            }
            while let Ok(event) = inbox.workers.try_recv() {
                self.worker_event(event);
            }
            self.begin_rounds();
            flush_again = self.pool.flush();
        }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn wake_at(&self, flush_again: Option<Duration>) -> Instant {
        const IDLE: Duration = Duration::from_secs(3_600);
        let timer = self.timers.peek().map(|Reverse((at, _))| self.began + *at);
        let flush = flush_again.map(|wait| Instant::now() + wait);
        timer.into_iter().chain(flush).min().unwrap_or_else(|| Instant::now() + IDLE)
    }

    fn submit(&mut self, Submission { generation, answer }: Submission) {
        // A client that left before its answer is seen by the sink.
        drop(answer.send(self.accept(generation)));
    }

    fn accept(&mut self, generation: Generation) -> Result<GenerationStream, RouterError> {
        let Some(vocab_size) = self.pool.vocab_size_of(&generation.model) else {
            let reason = format!("no target worker is ready for model `{}`", generation.model);
            return Err(RouterError::Unavailable { reason });
        };
        let limits = Limits { vocab_size, target_deadline: self.config.target_deadline };
        let (sink, stream) = channel(generation.num_choices);
        for choice in 0..generation.num_choices {
            self.start_sequence(&generation, choice, limits, sink.clone());
        }
        Ok(stream)
    }

    fn start_sequence(&mut self, generation: &Generation, choice: u32, limits: Limits, sink: GenerationSink) {
        let id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        let spec = SequenceSpec {
            choice,
            lane: lane_number(generation.task_type.as_deref().unwrap_or_default()),
            // The prompt is scored once.
            prompt_logprobs: generation.spec.prompt_logprobs.filter(|_| choice == 0),
            traceparent: service::telemetry::traceparent_of(&generation.span).unwrap_or_default(),
            ..generation.spec.clone()
        };
        let cancelled = sink.cancelled(choice);
        self.cancelled.push(Box::pin(async move {
            cancelled.cancelled_owned().await;
            id
        }));
        let running = Running {
            sequence: Sequence::new(id, Arc::new(spec), &generation.prompt_ids, limits),
            sink,
            choice,
            lane: self.controllers.join(LaneKey::of(generation)),
            request: generation.speculation,
            target: None,
            draft: None,
            numerics_id: None,
            clock: RoundClock::default(),
            target_by: self.now() + self.config.target_wait,
            disabled_reason: None,
            span: generation.span.clone(),
            round: tracing::Span::none(),
        };
        self.sequences.insert(id, running);
        self.find_target(id);
    }

    fn cancel(&mut self, id: SequenceId) {
        self.drive(id, Event::Cancel);
        self.forget(id);
    }

    fn worker_event(&mut self, event: WorkerEvent) {
        match event {
            WorkerEvent::Up(worker) => {
                let role = worker.role;
                self.pool.join(worker);
                match role {
                    Role::Target => self.find_targets(),
                    Role::Draft => self.find_drafts(),
                }
                self.show_health();
            }
            WorkerEvent::Down(key) => {
                self.worker_down(key);
                self.show_health();
            }
            WorkerEvent::Frame(key, frame) => self.worker_frame(key, frame),
        }
    }

    /// A router without a target serves nobody.
    fn show_health(&self) {
        if self.pool.has_target() {
            self.health.set_ready();
        } else {
            self.health.set_not_ready("no target worker is connected");
        }
    }

    fn worker_down(&mut self, key: WorkerKey) {
        let Some(worker) = self.pool.leave(key) else { return };
        let role = worker.role;
        let orphans: Vec<SequenceId> = self
            .sequences
            .iter()
            .filter(|(_, running)| running.worker(role) == Some(key))
            .map(|(id, _)| *id)
            .collect();
        if !orphans.is_empty() {
            tracing::warn!(
                role = role.as_str(),
                worker.address,
                sequences = orphans.len(),
                "worker lost: replaying"
            );
        }
        for id in orphans {
            self.drive(id, Event::Lost(role));
        }
    }

    fn worker_frame(&mut self, key: WorkerKey, frame: v1::WorkerFrame) {
        let Some(role) = self.pool.role_of(key) else { return };
        let timing = frame.timing.unwrap_or_default();
        self.measure_step(key, &timing, frame.replies.len());
        for reply in frame.replies {
            let id = SequenceId(reply.sequence_id);
            if !self.is_at(id, role, key) {
                continue;
            }
            match reply_from_wire(reply) {
                Ok(reply) => {
                    self.measure_reply(id, (role, key), &timing);
                    self.drive(id, Event::Reply(role, reply));
                }
                Err(error) => tracing::warn!(role = role.as_str(), %error, "a worker's reply makes no sense"),
            }
        }
        for preempted in frame.preempted {
            let id = SequenceId(preempted.sequence_id);
            if self.is_at(id, role, key) {
                self.drive(id, Event::Preempted(role, preempted.generation));
            }
        }
    }

    /// Whether the sequence is this worker's business still.
    fn is_at(&self, id: SequenceId, role: Role, key: WorkerKey) -> bool {
        self.sequences.get(&id).is_some_and(|running| running.worker(role) == Some(key))
    }

    fn fire_timers(&mut self) {
        let now = self.now();
        while let Some(Reverse((at, id))) = self.timers.peek().copied() {
            if at > now {
                return;
            }
            self.timers.pop();
            let Some(running) = self.sequences.get(&id) else { continue };
            if running.target.is_none() && now >= running.target_by {
                let reason = format!("no target worker came back for model `{}`", running.lane.model);
                running.sink.send_last(GenerationEvent::Failed(RouterError::Unavailable { reason }));
                self.cancel(id);
            } else if running.sequence.next_deadline().is_some_and(|deadline| deadline <= now) {
                self.drive(id, Event::Tick);
            }
        }
    }

    /// Feeds one event to a sequence, and whatever follows from it.
    fn drive(&mut self, id: SequenceId, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let now = self.now();
            let Some(running) = self.sequences.get_mut(&id) else { return };
            for action in running.sequence.step(now, event) {
                self.act(id, action, &mut events);
            }
        }
        let Some(running) = self.sequences.get(&id) else { return };
        if running.sequence.is_done() {
            return self.forget(id);
        }
        if let Some(deadline) = running.sequence.next_deadline() {
            self.timers.push(Reverse((deadline, id)));
        }
    }

    fn act(&mut self, id: SequenceId, action: Action, events: &mut VecDeque<Event>) {
        let Some(running) = self.sequences.get_mut(&id) else { return };
        let delivery = match action {
            Action::Send(role, step) => return self.send(id, role, &step),
            Action::Close(role, generation) => return self.close(id, role, generation),
            Action::Assign(role) => return self.reassign(id, role, events),
            Action::Ready => return self.ready.push_back(id),
            Action::Commit(commit) => {
                let (k, accepted) = (commit.num_draft_tokens, commit.num_accepted);
                self.metrics.observe_verification(&running.lane.model, k, accepted);
                running.round.record("outrider.spec.drafted", k).record("outrider.spec.accepted", accepted);
                running.round = tracing::Span::none();
                self.landed(id);
                self.measure_round(id, &commit);
                let Some(running) = self.sequences.get(&id) else { return };
                running.sink.send(running.tokens(commit))
            }
            Action::PromptLogprobs(scores) => running.sink.send(GenerationEvent::PromptLogprobs(scores)),
            Action::Finished(reason) => {
                running.sink.send_last(running.finished(reason));
                return;
            }
            Action::Failed(reason) => {
                running.sink.send_last(GenerationEvent::Failed(RouterError::Refused { reason }));
                return;
            }
            Action::Ignored(why) => {
                self.metrics.ignored(why);
                if why == speculation::sequence::Ignored::LateDraft
                    && let Some(pooled) = running.draft.and_then(|key| self.pool.get_mut(key))
                {
                    pooled.draft_time.missed();
                }
                return;
            }
        };
        if delivery == Delivery::Unwanted {
            events.push_back(Event::Cancel);
        }
    }

    fn send(&mut self, id: SequenceId, role: Role, step: &Step) {
        let now = self.now();
        let Some(running) = self.sequences.get_mut(&id) else { return };
        match &step.work {
            Work::Propose { num_draft_tokens } => {
                running.clock.asked = *num_draft_tokens;
                running.clock.asked_at = now;
            }
            Work::Verify { draft } if running.clock.verify_at.is_none() => {
                running.clock.verify_at = Some(now);
                if running.clock.asked > 0 {
                    let supplied = draft.token_ids.len() as u32;
                    self.controllers.observe_proposal(&running.lane, running.clock.asked, supplied);
                }
            }
            Work::Verify { .. } | Work::Feed => {}
        }
        if let Some(pooled) = running.worker(role).and_then(|key| self.pool.get_mut(key)) {
            pooled.outgoing.steps.push(step_to_wire(step));
        }
    }

    fn close(&mut self, id: SequenceId, role: Role, generation: u32) {
        let Some(running) = self.sequences.get_mut(&id) else { return };
        if let Some(pooled) = running.worker(role).and_then(|key| self.pool.get_mut(key)) {
            pooled.outgoing.closes.push(v1::CloseSequence { sequence_id: id.0, generation });
        }
    }

    /// The sequence lost its worker of this role: another one, if there is one, takes over.
    fn reassign(&mut self, id: SequenceId, role: Role, events: &mut VecDeque<Event>) {
        let target_by = self.now() + self.config.target_wait;
        if role == Role::Target {
            self.landed(id);
        }
        let Some(running) = self.sequences.get_mut(&id) else { return };
        let before = running.worker_mut(role).take();
        running.target_by = target_by;
        if let Some(key) = before {
            self.pool.release(key);
        }
        match role {
            Role::Target => match self.take_target(id, before) {
                true => events.push_back(Event::Assigned(Role::Target)),
                false => self.wait_for_target(id),
            },
            Role::Draft => {
                if self.take_draft(id, before) {
                    events.push_back(Event::Assigned(Role::Draft));
                }
            }
        }
    }

    fn find_target(&mut self, id: SequenceId) {
        if !self.take_target(id, None) {
            return self.wait_for_target(id);
        }
        if self.take_draft(id, None) {
            self.drive(id, Event::Assigned(Role::Draft));
        }
        self.drive(id, Event::Assigned(Role::Target));
    }

    fn wait_for_target(&mut self, id: SequenceId) {
        self.waiting_for_target.push_back(id);
        if let Some(running) = self.sequences.get(&id) {
            self.timers.push(Reverse((running.target_by, id)));
        }
    }

    /// A target joined: those that waited longest come first.
    fn find_targets(&mut self) {
        for id in std::mem::take(&mut self.waiting_for_target) {
            if self.sequences.get(&id).is_some_and(|running| running.target.is_none()) {
                self.find_target(id);
            }
        }
    }

    /// A draft worker joined: sequences without one get it.
    fn find_drafts(&mut self) {
        let without: Vec<SequenceId> = self
            .sequences
            .iter()
            .filter(|(_, running)| running.draft.is_none() && running.target.is_some())
            .map(|(id, _)| *id)
            .collect();
        for id in without {
            if self.take_draft(id, None) {
                self.drive(id, Event::Assigned(Role::Draft));
            }
        }
    }

    fn take_target(&mut self, id: SequenceId, not: Option<WorkerKey>) -> bool {
        let Some(running) = self.sequences.get_mut(&id) else { return false };
        let chosen = self.pool.assign_target(&running.lane.model, running.numerics_id.as_deref(), not);
        running.target = chosen;
        let Some(hello) = chosen.and_then(|key| self.pool.hello_of(key)) else { return false };
        if running.numerics_id.as_ref().is_some_and(|before| *before != hello.numerics_id) {
            tracing::warn!(
                sequence = id.0,
                "the text goes on at a target of other bits: it may differ from here on"
            );
        }
        running.numerics_id = Some(hello.numerics_id.clone());
        true
    }

    fn take_draft(&mut self, id: SequenceId, not: Option<WorkerKey>) -> bool {
        let Some(running) = self.sequences.get_mut(&id) else { return false };
        if running.draft.is_some() || running.refuses_drafts() || running.sequence.draft_refusal().is_some() {
            return false;
        }
        let Some(target) = running.target else { return false };
        running.draft = self.pool.assign_draft(target, &running.lane.task_type, not);
        running.draft.is_some()
    }

    fn forget(&mut self, id: SequenceId) {
        self.landed(id);
        if let Some(running) = self.sequences.remove(&id) {
            self.controllers.leave(&running.lane);
            for key in running.target.into_iter().chain(running.draft) {
                self.pool.release(key);
            }
        }
    }
}
