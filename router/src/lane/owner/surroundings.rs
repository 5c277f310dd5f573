//! What the actions of a sequence touch besides the sequence itself: workers, lanes, timers, those that wait. Kept apart from the sequences, so that
//! one of them can be worked on while these are changed. It finds no sequence and keeps none.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proto::convert::step_to_wire;
use speculation::draft_health::HealthReport;
use speculation::sequence::{Action, Ignored};
use speculation::turns::Turns;
use speculation::{FinishReason, Step, Work};

use super::*;
use crate::generation::Delivery;
use crate::lane::controllers::Controllers;
use crate::lane::pool::Pool;
use crate::lane::running::Asked;
use crate::lane::{LanesReport, WorkerReport};
use crate::waits::Waits;

/// See the module's page.
pub(super) struct Surroundings {
    pub(super) config: RoundsConfig,
    pub(super) metrics: RouterMetrics,
    began: Instant,
    /// Since then, when the clock was last looked at.
    now: Duration,
    pub(super) pool: Pool,
    pub(super) controllers: Controllers,
    /// Sequences that have a target and wait for their lane; rounds begin when all that arrived was read, so that the
    /// steps of many sequences leave in one frame.
    pub(super) ready: VecDeque<SequenceId>,
    /// Of these, the ones that begin plainly and wait for others of their target, and until when the first of them waits.
    pub(super) plain: Vec<SequenceId>,
    pub(super) plain_until: Option<Duration>,
    /// Sequences that wait for a target with room, by model. Some of them may be gone by the time it is their turn.
    pub(super) waiting: BTreeMap<String, Turns<u32, SequenceId>>,
    /// How long those waited that had their turn.
    pub(super) target_waits: Waits,
    /// Whether somebody joined those since they were looked at, or something made room.
    pub(super) has_room: bool,
    /// What clients are to hear once the steps of the rounds that begin now are on their way.
    unsaid: Vec<(GenerationSink, GenerationEvent)>,
    /// The earliest deadline of each sequence that has one.
    timers: BTreeSet<(Duration, SequenceId)>,
}

impl Surroundings {
    pub(super) fn new(config: RoundsConfig, metrics: RouterMetrics) -> Self {
        Self {
            controllers: Controllers::new(config.policy.clone(), metrics.clone()),
            pool: Pool::new(metrics.clone()),
            config,
            metrics,
            began: Instant::now(),
            now: Duration::ZERO,
            ready: VecDeque::new(),
            plain: Vec::new(),
            plain_until: None,
            waiting: BTreeMap::new(),
            target_waits: Waits::default(),
            has_room: false,
            unsaid: Vec::new(),
            timers: BTreeSet::new(),
        }
    }

    /// Looks at the clock. What came in one frame came at one time: to look for every step of every reply would be some eleven looks a drafted round.
    pub(super) fn look_at_clock(&mut self) {
        self.now = self.began.elapsed();
    }

    /// When the clock was last looked at.
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn wake_at(&self, flush_again: Option<Duration>) -> Instant {
        const IDLE: Duration = Duration::from_secs(3_600);
        let timer = self.timers.first().map(|(at, _)| *at);
        let due = timer.into_iter().chain(self.plain_until).min().map(|at| self.began + at);
        let flush = flush_again.map(|wait| Instant::now() + wait);
        due.into_iter().chain(flush).min().unwrap_or_else(|| Instant::now() + IDLE)
    }

    /// The next sequence whose timer is due.
    pub(super) fn next_timer(&mut self, now: Duration) -> Option<SequenceId> {
        let first = *self.timers.first()?;
        (first.0 <= now && self.timers.remove(&first)).then_some(first.1)
    }

    /// The sequence whose timer is first, and when that is due.
    pub(super) fn first_timer(&self) -> Option<(Duration, SequenceId)> {
        self.timers.first().copied()
    }

    /// Moves the timer of a sequence whose deadline is later by now.
    pub(super) fn postpone(&mut self, running: &mut Running) {
        if let Some(earlier) = running.timer.take() {
            self.timers.remove(&(earlier, running.id));
        }
        self.arm(running);
    }

    /// Sees to it that the sequence is woken at its deadline. A timer that is set earlier stays until it is the first of all.
    pub(super) fn arm(&mut self, running: &mut Running) {
        let Some(at) = deadline(running) else { return };
        if running.timer.is_some_and(|set| set <= at) {
            return;
        }
        if let Some(later) = running.timer.replace(at) {
            self.timers.remove(&(later, running.id));
        }
        self.timers.insert((at, running.id));
    }

    /// Feeds one event to a sequence, and whatever follows from it.
    pub(super) fn drive(&mut self, running: &mut Running, event: Event) {
        let (mut next, mut events) = (Some(event), VecDeque::new());
        while let Some(event) = next {
            for action in running.sequence.step(self.now, event) {
                self.act(running, action, &mut events);
            }
            next = events.pop_front();
        }
        if !running.sequence.is_done() {
            self.arm(running);
        }
    }

    fn act(&mut self, running: &mut Running, action: Action, events: &mut VecDeque<Event>) {
        let delivery = match action {
            Action::Send(role, step) => return self.send(running, role, step),
            Action::Close(role, generation) => return self.close(running, role, generation),
            Action::Assign(role) => return self.reassign(running, role, events),
            Action::Ready => return self.ready.push_back(running.id),
            Action::Commit(commit) => {
                let (k, accepted) = (commit.num_draft_tokens, commit.num_accepted);
                running.round.record("outrider.spec.drafted", k).record("outrider.spec.accepted", accepted);
                (running.round, running.round_span_id) = (tracing::Span::none(), 0);
                self.landed(running);
                self.settle(running);
                self.measure_round(running, &commit);
                self.say(running, running.tokens(commit))
            }
            Action::PromptLogprobs(scores) => self.say(running, GenerationEvent::PromptLogprobs(scores)),
            Action::Finished(reason) => return self.finished(running, reason),
            Action::Failed(reason) => return self.fail(running, RouterError::Refused { reason }),
            Action::Ignored(why) => return self.ignored(running, why),
        };
        if delivery == Delivery::Unwanted {
            events.push_back(Event::Cancel);
        }
    }

    /// Has the sequence's client hear of it, if it still wants to.
    fn say(&mut self, running: &Running, event: GenerationEvent) -> Delivery {
        if running.sink.is_cancelled(running.choice) {
            return Delivery::Unwanted;
        }
        self.unsaid.push((running.sink.clone(), event));
        Delivery::Delivered
    }

    /// The last that the sequence's client hears.
    pub(super) fn fail(&mut self, running: &Running, error: RouterError) {
        self.unsaid.push((running.sink.clone(), GenerationEvent::Failed(error)));
    }

    pub(super) fn has_unsaid(&self) -> bool {
        !self.unsaid.is_empty()
    }

    /// Hands clients what is unsaid, in order.
    pub(super) fn speak(&mut self) {
        for (sink, event) in self.unsaid.drain(..) {
            // A client that is cut off here has its sequences cancelled as one that left has.
            sink.send_last(event);
        }
    }

    fn send(&mut self, running: &mut Running, role: Role, step: Step) {
        match &step.work {
            Work::Propose { num_draft_tokens } => self.note_asked(running, step.round, *num_draft_tokens),
            Work::Verify { draft } if running.clock.verify_at.is_none() => {
                running.clock.verify_at = Some(self.now());
                if running.clock.asked > 0 {
                    let supplied = draft.token_ids.len() as u32;
                    self.controllers.observe_proposal(&running.lane, running.clock.asked, supplied);
                }
            }
            Work::Verify { .. } | Work::Feed => {}
        }
        if let Some(pooled) = running.worker(role).and_then(|key| self.pool.get_mut(key)) {
            let span_id = running.round_span_id;
            pooled.outgoing.steps.push(v1::Step { span_id, ..step_to_wire(step) });
        }
    }

    /// A draft worker is asked for a proposal.
    fn note_asked(&mut self, running: &mut Running, round: u64, num_draft_tokens: u32) {
        let predicted = self.predicted_proposal(running, num_draft_tokens);
        running.asked = Some(Asked { round, at: self.now(), num_draft_tokens, predicted });
        if !running.clock.is_probing {
            running.clock.asked = num_draft_tokens;
        }
    }

    fn close(&mut self, running: &Running, role: Role, generation: u32) {
        if let Some(pooled) = running.worker(role).and_then(|key| self.pool.get_mut(key)) {
            pooled.outgoing.closes.push(v1::CloseSequence { sequence_id: running.id.0, generation });
        }
    }

    fn finished(&mut self, running: &Running, reason: FinishReason) {
        self.controllers.observe_output(&running.lane, running.output_len());
        self.unsaid.push((running.sink.clone(), running.finished(reason)));
    }

    fn ignored(&mut self, running: &Running, why: Ignored) {
        self.metrics.ignored(why);
        if why != Ignored::LateDraft {
            return;
        }
        let (now, asked_at) = (self.now(), running.asked.map(|asked| asked.at));
        let Some(asked_at) = asked_at else { return };
        let Some(pooled) = running.worker(Role::Draft).and_then(|key| self.pool.get_mut(key)) else { return };
        if pooled.health.missed(asked_at, now) {
            self.metrics.draft_outage();
            tracing::warn!(
                address = pooled.worker.address,
                waited_ms = (now - asked_at).as_millis() as u64,
                "a draft worker does not answer: rounds go on without it until it does"
            );
        }
    }

    /// The sequence is over: its places are free.
    pub(super) fn let_go(&mut self, mut running: Running) {
        self.landed(&mut running);
        self.controllers.leave(&running.lane);
        if let Some(at) = running.timer {
            self.timers.remove(&(at, running.id));
        }
        for seat in running.target.into_iter().chain(running.draft) {
            self.pool.release(seat);
        }
        self.has_room = true;
    }

    /// Why lanes and workers are as they are.
    pub(super) fn explain(&self) -> LanesReport {
        let now = self.now();
        let workers = self.pool.values().map(|pooled| {
            let (credit_blocks, reserved_blocks) = pooled.blocks();
            let is_draft = pooled.worker.role == Role::Draft;
            WorkerReport {
                role: pooled.worker.role,
                address: pooled.worker.address.clone(),
                model: pooled.worker.hello.model_id.clone(),
                task_types: pooled.worker.hello.task_types.clone(),
                sequences: pooled.load,
                credit_blocks,
                reserved_blocks,
                wire_us: pooled.cost.wire_micros(),
                health: is_draft.then(|| -> HealthReport { pooled.health.report(now) }),
            }
        });
        let mut waiting = BTreeMap::new();
        for (priority, (count, since)) in self.waiting.values().flat_map(Turns::waiting) {
            let (all, first) = waiting.entry(priority).or_insert((0, since));
            *all += count;
            *first = since.min(*first);
        }
        LanesReport {
            lanes: self.controllers.explain(),
            workers: workers.collect(),
            waiting_for_target: self.waiting.values().map(Turns::len).sum(),
            // The doors know these.
            admission_waits: Vec::new(),
            target_waits: self.target_waits.report(&waiting, now),
        }
    }
}

/// When the sequence has to be looked at, if nothing else happens to it.
pub(super) fn deadline(running: &Running) -> Option<Duration> {
    running.sequence.next_deadline().or(running.target.is_none().then_some(running.target_by))
}
