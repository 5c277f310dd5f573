//! Assignment of workers to sequences. Sequences without a target wait in one fair queue per model
//! ([`crate::fair_queue`]) until a target has capacity: KV blocks within its credit, and few enough prefills
//! in progress. Sequences that lost their target wait in a separate queue, unless it refused them before
//! their first token. That queue is served first and within a budget ([`crate::replay_budget`]), so that a
//! mass failover is processed in order and new sequences still get turns.
//!
//! A sequence that finds no capacity keeps the targets for which it waits from all that come after it;
//! otherwise long sequences would starve. Those that come after it get other targets: of another numerics
//! class, or with a context window that is too small for it.

use std::collections::BTreeSet;
use std::time::Duration;

use speculation::sequence::Event;
use speculation::{Role, SequenceId};

use super::Scheduler;
use super::active::{ActiveSequence, FollowUps};
use super::events::{Command, Report, WorkerKey};
use super::state::SchedulerState;
use super::timers::TIMER_SLACK;
use super::workers::PlacementRequest;
use crate::fair_queue::Ticket;
use crate::rollout::Preference;

/// Maximum sequences of one queue that are passed over at once because the targets for which they wait are
/// full.
const MAX_PASSED_OVER: usize = 64;

/// Key of a queue for targets.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueueKey {
    pub(super) model: String,
    pub(super) kind: WaitKind,
}

/// Why a sequence waits. The queues of a model are served in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum WaitKind {
    /// It lost its target and is replayed within the budget ([`crate::replay_budget`]). Its client may have
    /// received text.
    Replay,
    /// A replay that is a suspect. It needs a target without another suspect, so it waits in a separate queue
    /// and delays no other sequence while there is none.
    Suspect,
    /// It is new, was refused before its first token, or was preempted.
    Ordinary,
}

impl Scheduler {
    /// Assigns targets to waiting sequences while targets have capacity.
    pub(super) fn assign_targets(&mut self) {
        if !std::mem::take(&mut self.state.capacity_changed) {
            return;
        }
        self.state.serve_queues_at = None;
        let queues: Vec<QueueKey> = self.state.waiting.keys().cloned().collect();
        for queues in queues.chunk_by(|a, b| a.model == b.model) {
            let mut awaited = Vec::new();
            queues.iter().for_each(|key| self.serve_queue(key, &mut awaited));
        }
        self.state.waiting.retain(|_, queue| !queue.is_empty());
        if !self.state.waiting.is_empty() {
            let next_probe = self.state.workers.next_probe(self.state.now);
            self.state.serve_queues_at = self.state.serve_queues_at.into_iter().chain(next_probe).min();
        }
        self.state.report_waiting();
    }

    /// Serves a queue until it is empty or no target has capacity for what is left. `awaited` collects the
    /// targets for which sequences of the model wait.
    fn serve_queue(&mut self, key: &QueueKey, awaited: &mut Vec<WorkerKey>) {
        let mut passed_over = BTreeSet::new();
        while passed_over.len() <= MAX_PASSED_OVER {
            let now = self.state.now;
            let queue = self.state.waiting.get_mut(key);
            let Some(id) = queue.and_then(|queue| queue.peek_beyond(now, &passed_over)) else { return };
            let Some(active) = self.sequences.get_mut(&id) else { return };
            match self.state.try_assign_target_within_budget(active, awaited) {
                AssignOutcome::OverBudget => return,
                AssignOutcome::NoCapacity => self.state.await_targets(active, awaited),
                AssignOutcome::BesideSuspect => {}
                outcome => {
                    self.finish_turn(key, id, outcome);
                    continue;
                }
            }
            if !self.state.workers.has_capacity_beside(&key.model, awaited) {
                return;
            }
            passed_over.insert(id);
        }
    }

    /// Takes a sequence out of its queue after a turn that ends its wait.
    fn finish_turn(&mut self, key: &QueueKey, id: SequenceId, outcome: AssignOutcome) {
        let Some(queue) = self.state.waiting.get_mut(key) else { return };
        match outcome {
            AssignOutcome::Assigned => {
                queue.serve(id);
                self.drive(id, Event::Assigned(Role::Target));
            }
            AssignOutcome::Refused => {
                queue.remove(id);
                self.fail_unserved(id);
            }
            AssignOutcome::Unserved => {
                queue.remove(id);
                self.state.unserved.insert(id);
            }
            AssignOutcome::NoCapacity | AssignOutcome::BesideSuspect | AssignOutcome::OverBudget => {}
        }
    }

    /// Assigns a draft worker to a sequence that is about to begin a round: one if it has none, and another
    /// one if its own has been unresponsive for long.
    pub(super) fn assign_draft(&mut self, id: SequenceId) {
        let Some(active) = self.sequences.get_mut(&id) else { return };
        let event = match active.worker(Role::Draft) {
            None => self.state.try_assign_draft(active, None).then_some(Event::Assigned(Role::Draft)),
            Some(key) => self.state.has_better_draft(active, key).then_some(Event::Reassign(Role::Draft)),
        };
        if let Some(event) = event {
            self.drive(id, event);
        }
    }
}

/// Outcome of a sequence's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AssignOutcome {
    /// It got a target.
    Assigned,
    /// It stays in the queue: every eligible target is full, or a sequence that goes first waits for it.
    NoCapacity,
    /// It stays in the queue: it is a suspect, and every eligible target runs another one.
    BesideSuspect,
    /// It stays in the queue, as do all behind it: the replay budget is used up.
    OverBudget,
    /// It fails: every connected target refused it, or, before the client received anything, one did and no
    /// other can serve it.
    Refused,
    /// It leaves the queue: targets are connected, but none can serve it. One with a longer context window,
    /// or a healthy one, may join.
    Unserved,
}

impl SchedulerState {
    /// Starts a sequence's wait for a target.
    pub(super) fn wait_for_target(&mut self, active: &mut ActiveSequence) {
        active.waiting_since = self.now;
        active.no_target_deadline = self.now + self.config.target_wait;
        self.timers.arm(active);
        self.enqueue(active);
    }

    /// Adds a waiting sequence to its queue.
    pub(super) fn enqueue(&mut self, active: &ActiveSequence) {
        let ticket = Ticket {
            priority: active.sequence.spec().priority,
            weight: self.lanes.weight(active.lane.id),
            cost: 1.0,
            arrived: active.submitted_at,
            since: active.waiting_since,
        };
        let queue = self.waiting.entry(queue_key(active)).or_default();
        queue.push(active.api_key, active.lane.id, ticket, active.id);
        self.capacity_changed = true;
    }

    /// Removes a sequence that ends from where it waits for a target, if it does.
    pub(super) fn stop_waiting(&mut self, active: &ActiveSequence) {
        if active.target.is_none() {
            self.unserved.remove(&active.id);
            if let Some(queue) = self.waiting.get_mut(&queue_key(active)) {
                queue.remove(active.id);
            }
        }
    }

    /// Returns how long an expired sequence waited: its wait limit passed before it had a target, and the
    /// targets that could serve it are full.
    pub(super) fn expired(&self, active: &mut ActiveSequence) -> Option<Duration> {
        active.expires_at.filter(|at| *at <= self.now)?;
        if self.workers.could_serve(&self.placement_request(active, None)) {
            return Some(self.now.saturating_sub(active.submitted_at));
        }
        // It waits for a target to appear, which has a separate limit.
        active.expires_at = Some(self.now + TIMER_SLACK);
        None
    }

    /// Returns whether a sequence may keep waiting. A started sequence may wait for capacity without limit,
    /// and any sequence up to `target_wait` for a target that can serve it.
    pub(super) fn may_keep_waiting(&self, active: &mut ActiveSequence) -> bool {
        if self.workers.could_serve(&self.placement_request(active, None)) {
            active.no_target_deadline = self.now + self.config.target_wait.max(TIMER_SLACK);
        }
        self.now < active.no_target_deadline
    }

    /// Handles the loss of a sequence's worker of this role.
    pub(super) fn reassign(&mut self, active: &mut ActiveSequence, role: Role, follow_ups: &mut FollowUps) {
        if role == Role::Target {
            self.decode_answered(active);
            if active.target.is_some() {
                self.lanes.stopped_running(active.lane.id, active.speculation.disables_drafting());
            }
        }
        if role == Role::Draft {
            self.credit_serving_draft(active);
        }
        let lost = active.reservation_mut(role).take().map(|reservation| {
            let key = reservation.key;
            self.workers.release(reservation);
            key
        });
        match role {
            Role::Target if active.failures.is_final() => {
                self.fail_after_losses(active);
                follow_ups.push_back(Event::Cancel);
            }
            Role::Target => {
                active.failures.last_target = lost;
                // A request that was refused before its first token is as new as others.
                let is_refused = lost.is_some_and(|key| active.failures.refused_by.contains(&key));
                let is_new = is_refused && active.output_len() == 0;
                active.is_replay = !active.is_preempted && !is_new;
                self.wait_for_target(active);
            }
            Role::Draft => {
                active.pending_proposal = None;
                if self.try_assign_draft(active, lost) {
                    follow_ups.push_back(Event::Assigned(Role::Draft));
                }
            }
        }
    }

    fn try_assign_target_within_budget(
        &mut self,
        active: &mut ActiveSequence,
        awaited: &[WorkerKey],
    ) -> AssignOutcome {
        if !active.is_replay {
            return self.try_assign_target(active, awaited);
        }
        let model = active.lane.key.model.clone();
        let num_targets = self.workers.num_targets(&model).max(1);
        let rate = f64::from(self.config.replay_ids_per_second) * f64::from(num_targets);
        let next = self.replays.get(&model).map_or(self.now, |budget| budget.next_at(self.now, rate));
        if next > self.now {
            self.serve_queues_at = Some(self.serve_queues_at.map_or(next, |at| at.min(next)));
            return AssignOutcome::OverBudget;
        }
        let outcome = self.try_assign_target(active, awaited);
        if outcome == AssignOutcome::Assigned && rate > 0.0 {
            self.replays.entry(model).or_default().take(self.now, active.len(), rate);
        }
        outcome
    }

    fn try_assign_target(&mut self, active: &mut ActiveSequence, awaited: &[WorkerKey]) -> AssignOutcome {
        let request =
            PlacementRequest { awaited, ..self.placement_request(active, active.failures.last_target) };
        let workers = &mut self.workers;
        let Some(reservation) = workers.reserve_target(&request) else {
            return match workers.could_serve(&request) || !workers.is_served(request.model) {
                true if workers.all_run_suspects(&request) => AssignOutcome::BesideSuspect,
                true => AssignOutcome::NoCapacity,
                false if workers.all_refused(&request) => AssignOutcome::Refused,
                false if active.output_len() == 0 && !request.refused_by.is_empty() => AssignOutcome::Refused,
                false => AssignOutcome::Unserved,
            };
        };
        let numerics_id = workers.get(reservation.key).map(|worker| worker.info.numerics_id.clone());
        if let (Some(earlier), Some(numerics_id)) = (&active.numerics_id, &numerics_id)
            && earlier != numerics_id
        {
            let (earlier, numerics_id) = (earlier.clone(), numerics_id.clone());
            let (id, worker) = (active.id, reservation.key);
            let report = Report::NumericsChanged { id, earlier, worker, numerics_id };
            self.commands.push(Command::Report(report));
        }
        if active.numerics_id.is_none() {
            active.expires_at = None;
            self.commands.push(Command::Assigned(active.id));
        }
        active.numerics_id = numerics_id;
        if active.output_len() == 0 {
            active.cached.assigned(reservation.key);
        }
        active.target = Some(reservation);
        active.found_no_draft_at = None;
        self.lanes.began_running(active.lane.id, active.speculation.disables_drafting());
        active.sequence.set_target_deadline(self.target_deadline(active));
        let (priority, waited) =
            (active.sequence.spec().priority, self.now.saturating_sub(active.waiting_since));
        self.target_waits.observe(priority, waited);
        self.commands.push(Command::Report(Report::TargetAssigned { priority, waited }));
        AssignOutcome::Assigned
    }

    /// Adds the targets for which the sequence waits.
    fn await_targets(&self, active: &ActiveSequence, awaited: &mut Vec<WorkerKey>) {
        for key in self.workers.awaited_targets(&self.placement_request(active, None)) {
            if !awaited.contains(&key) {
                awaited.push(key);
            }
        }
    }

    fn try_assign_draft(&mut self, active: &mut ActiveSequence, avoid: Option<WorkerKey>) -> bool {
        let Some(target) = active.worker(Role::Target).filter(|_| active.can_use_draft()) else {
            return false;
        };
        let changes = self.workers.draft_changes;
        if active.found_no_draft_at == Some(changes) {
            return false;
        }
        let request = self.placement_request(active, avoid);
        active.draft = self.workers.reserve_draft(&request, target);
        active.found_no_draft_at = active.draft.is_none().then_some(changes);
        active.draft.is_some()
    }

    /// Returns whether the draft worker has been unresponsive for so long that a prefill at a responsive one
    /// pays off.
    fn has_better_draft(&self, active: &ActiveSequence, key: WorkerKey) -> bool {
        if !self.workers.get(key).is_some_and(|worker| worker.draft_health.should_reassign(self.now)) {
            return false;
        }
        let Some(target) = active.worker(Role::Target) else { return false };
        let request = self.placement_request(active, Some(key));
        self.workers.best_responsive_draft(&request, target).is_some()
    }

    /// Returns whether the draft that a rollout prefers for the sequence has a responsive worker with
    /// capacity.
    pub(super) fn has_preferred_draft(&self, active: &ActiveSequence) -> bool {
        let Some(target) = active.worker(Role::Target) else { return false };
        let best = self.workers.best_draft(&self.placement_request(active, None), target);
        best.is_some_and(|key| self.workers.preference_at(key, active.id) == Some(Preference::Primary))
    }

    pub(super) fn placement_request<'a>(
        &self,
        active: &'a ActiveSequence,
        avoid: Option<WorkerKey>,
    ) -> PlacementRequest<'a> {
        let (key, spec) = (&active.lane.key, active.sequence.spec());
        PlacementRequest {
            id: active.id,
            model: &key.model,
            task_type: &key.task_type,
            lane: active.lane.id,
            expected_len: self.lanes.expected_len(active.lane.id, active.lengths()),
            len: active.len(),
            marks: &active.marks,
            max_len: spec.max_len,
            numerics_id: active.numerics_id.as_deref(),
            avoid,
            refused_by: &active.failures.refused_by,
            awaited: &[],
            is_suspect: active.failures.is_suspect(),
            has_grammar: spec.grammar.is_some(),
            now: self.now,
        }
    }

    /// Grows the reservations of a sequence whose step was answered, if it has outgrown them.
    pub(super) fn grow_reservations(&mut self, active: &mut ActiveSequence) {
        let len = active.len();
        let shadow = active.trial.reservation_mut();
        for reservation in active.target.iter_mut().chain(&mut active.draft).chain(shadow) {
            self.capacity_changed |= self.workers.grow_reservation(reservation, len);
        }
    }
}

/// The queue in which a sequence waits; it stays the same during a wait.
fn queue_key(active: &ActiveSequence) -> QueueKey {
    let kind = match () {
        () if active.failures.is_suspect() => WaitKind::Suspect,
        () if active.is_replay => WaitKind::Replay,
        () => WaitKind::Ordinary,
    };
    QueueKey { model: active.lane.key.model.clone(), kind }
}
