//! The router's scheduler. It decides which worker serves which sequence, how many tokens each round drafts
//! and when steps are sent, and it learns from the replies. The interface is `on_event(now, event) ->
//! commands`, with no clock, socket, task or randomness inside. The router and the simulator run the same
//! code.
//!
//! A driver passes in everything that has arrived, then [`Event::Dispatch`], and executes the commands in
//! order. It wakes up again at [`Scheduler::next_wakeup`] and passes in [`Event::Timer`].
//!
//! A sequence waits for a target in a fair queue (`assign.rs`) until a target has capacity (`workers.rs`).
//! Then it runs rounds. For each round the scheduler chooses a draft worker and a draft length, or a lookup
//! draft (`lookup.rs`), and begins the round (`rounds.rs`, `lanes.rs`). The sequence's state machine,
//! `speculation::sequence`, decides which steps to send. Replies are measured (`feedback.rs`) and passed to
//! that state machine. Sequences leave targets that fail (`targets.rs`) and draft workers that drain
//! (`drain.rs`). Draft workers on trial are scored in parallel (`shadows.rs`) and are promoted by an operator
//! or by the evidence (`rollouts.rs`).
//!
//! A decision about one sequence is a method of `SchedulerState` (`state.rs`), which holds everything but the
//! sequences; what may concern any sequence is a method of [`Scheduler`].

mod active;
mod assign;
mod cached_prompt;
mod delayed;
pub mod demand;
mod disabled_reason;
mod drain;
pub mod events;
mod feedback;
pub mod lanes;
mod lookup;
pub mod pairing;
mod placement;
pub mod policy;
mod report;
mod rollouts;
mod rounds;
pub mod shadows;
mod state;
mod targets;
#[cfg(test)]
mod tests;
mod timers;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use speculation::sequence::{Event as SequenceEvent, Shadow};
use speculation::{ProposalAhead, Reply, Role, SequenceId};

use self::active::ActiveSequence;
pub use self::disabled_reason::DisabledReason;
pub use self::events::{Command, Event, WorkerKey};
use self::events::{Frame, NewSequence, Report, SequenceFailure, StepTiming};
use self::policy::PolicyConfig;
pub use self::report::{SchedulerReport, WorkerReport};
use self::state::SchedulerState;
use self::timers::TIMER_SLACK;
use crate::draft_length::Rules;

/// Settings of the operator.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Draft lengths and the policies of lanes.
    pub policy: PolicyConfig,
    /// Deadline for one step of a target, after which the step is sent again.
    pub target_deadline: Duration,
    /// Longest wait of a sequence for a target of its model to appear.
    pub target_wait: Duration,
    /// Longest wait of a new sequence for its first target while all targets are full.
    pub queue_wait: Duration,
    /// Ids per second that may be replayed for sequences that lost their target, per target of the model; 0:
    /// not limited.
    pub replay_ids_per_second: u32,
    /// Longest time per output token that the number of targets should keep; without it the number follows KV
    /// use alone. Only reported ([`demand`]).
    pub tpot_objective: Option<Duration>,
    /// Share of sequences on which shadow drafts are scored, 0 to 1.
    pub shadow_share: f64,
    /// Constants for choosing the draft length.
    pub rules: Rules,
}

/// The scheduler; see the module documentation.
#[derive(Debug)]
pub struct Scheduler {
    /// Read several times per token. The driver chooses the ids, so clients cannot cause hash collisions.
    sequences: FxHashMap<SequenceId, ActiveSequence>,
    state: SchedulerState,
}

impl Scheduler {
    /// Creates a scheduler without workers or sequences.
    pub fn new(config: SchedulerConfig) -> Self {
        Self { sequences: FxHashMap::default(), state: SchedulerState::new(config) }
    }

    /// Handles one event at `now`, the time since an origin that the driver chooses. The driver must execute
    /// the commands in order.
    pub fn on_event(&mut self, now: Duration, event: Event) -> std::vec::Drain<'_, Command> {
        self.state.now = now;
        match event {
            Event::Submit(new) => self.submit(*new),
            Event::Cancel(id) => {
                self.drive(id, SequenceEvent::Cancel);
                self.forget(id);
            }
            Event::Stop(id) => {
                if let Some(active) = self.sequences.get(&id) {
                    self.state.on_output(active);
                }
                self.drive(id, SequenceEvent::Cancel);
                self.forget(id);
            }
            Event::WorkerUp(key, info) => {
                self.state.workers.join(self.state.now, key, *info);
                self.state.capacity_changed = true;
                self.requeue_unserved();
                self.move_from_silent_targets();
                self.draft_worker_joined();
            }
            Event::WorkerDown(key) => self.worker_down(key),
            Event::Frame(key, frame) => self.frame(key, frame),
            Event::Drain(drain) => self.drain_address(&drain),
            Event::Listed(key, is_listed) => self.set_listed(key, is_listed),
            Event::Rollout(order) => self.on_rollout_order(order),
            Event::Timer => {
                self.state.capacity_changed |= self.state.serve_queues_at.is_some_and(|at| at <= now);
                self.check_targets();
                self.fire_timers();
            }
            Event::Dispatch => self.dispatch(),
        }
        self.state.commands.drain(..)
    }

    /// Returns the latest time for [`Event::Timer`] if nothing else happens before.
    pub fn next_wakeup(&mut self) -> Option<Duration> {
        self.postpone_timers();
        let timer = self.state.timers.first().map(|(at, _)| at);
        let SchedulerState { delayed, workers, serve_queues_at, .. } = &self.state;
        let others = [delayed.until, workers.next_check, *serve_queues_at];
        timer.into_iter().chain(others.into_iter().flatten()).min()
    }

    /// Returns whether a worker of this role is connected.
    pub fn has_worker(&self, role: Role) -> bool {
        self.state.workers.values().any(|worker| worker.info.role == role)
    }

    /// Returns whether a worker of this role is connected that takes new sequences: it does not drain.
    pub fn has_open_worker(&self, role: Role) -> bool {
        let mut workers = self.state.workers.values();
        workers.any(|worker| worker.info.role == role && !worker.draining.is_active())
    }

    /// Number of active sequences, including waiting ones.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Reports the state of lanes and workers and the reasons for their choices.
    pub fn report(&self) -> SchedulerReport {
        self.state.report()
    }

    fn dispatch(&mut self) {
        self.evaluate_rollout();
        self.assign_targets();
        self.begin_rounds();
        let SchedulerState { workers, lanes, commands, .. } = &mut self.state;
        commands.extend(workers.headrooms(lanes).into_iter().map(Command::Report));
        commands.extend(workers.take_changed().map(Command::Report));
        commands.extend(workers.take_idle_unlisted().into_iter().map(Command::Disconnect));
    }

    fn submit(&mut self, new: NewSequence) {
        let (lane, is_new_lane) = self.state.lanes.join(new.lane.clone());
        if is_new_lane {
            let opened = Report::LaneOpened(lane.id, Arc::clone(&lane.key));
            self.state.commands.push(Command::Report(opened));
        }
        let mut active = ActiveSequence::new(new, lane, self.state.now, &self.state.config);
        self.state.wait_for_target(&mut active);
        self.sequences.insert(active.id, active);
    }

    fn worker_down(&mut self, key: WorkerKey) {
        let Some(info) = self.state.workers.leave(key) else { return };
        let role = info.role;
        self.drop_shadows_at(key);
        if role == Role::Target {
            self.restart_target_wait(&info.model_id);
        }
        let orphans = self.select_sequences(|active| active.worker(role) == Some(key));
        if !orphans.is_empty() {
            let report = Report::SequencesReplayed { role, address: info.address, sequences: orphans.len() };
            self.state.commands.push(Command::Report(report));
        }
        for id in orphans {
            // The sequence may have caused the target's failure.
            if let Some(active) = self.sequences.get_mut(&id)
                && active.target.as_ref().is_some_and(|target| target.key == key && target.awaits_reply)
            {
                active.failures.lost.push(key);
            }
            self.drive(id, SequenceEvent::Lost(role));
        }
    }

    fn frame(&mut self, key: WorkerKey, frame: Frame) {
        let Some(role) = self.state.workers.get(key).map(|worker| worker.info.role) else { return };
        let Frame { timing, credit_blocks, replies, ahead, preempted, is_draining } = frame;
        let timing = timing.clamped();
        if let Some(blocks) = credit_blocks {
            self.state.workers.set_credit(key, blocks);
            self.state.capacity_changed = true;
        }
        self.state.on_timing(key, &timing);
        self.state.delayed.target_changed(key);
        match role {
            Role::Target => self.on_target_frame(key),
            Role::Draft if !replies.is_empty() => self.state.on_draft_answer(key),
            Role::Draft => {}
        }
        for reply in replies {
            match Shadow::sequence_of(reply.sequence_id) {
                Some(id) => self.shadow_replied(key, id, reply),
                None => self.on_reply(key, role, reply, &timing),
            }
        }
        for ahead in ahead {
            self.on_proposal_ahead(key, ahead);
        }
        for (id, assignment) in preempted {
            match Shadow::sequence_of(id) {
                Some(id) => self.shadow_preempted(key, id),
                None => self.on_preempted(key, role, id, assignment),
            }
        }
        if is_draining {
            self.on_worker_draining(key);
        }
    }

    fn on_reply(&mut self, key: WorkerKey, role: Role, reply: Reply, timing: &StepTiming) {
        let id = reply.sequence_id;
        let there = self.sequences.get_mut(&id).filter(|active| active.worker(role) == Some(key));
        let Some(active) = there else { return };
        if role == Role::Target {
            active.on_cached(&reply);
        }
        if active.sequence.awaits(role, &reply)
            && let Some(target) = active.target.as_mut().filter(|_| role == Role::Target)
        {
            self.state.workers.answered(target);
        }
        self.state.on_reply_time(active, key, &reply, timing);
        self.state.on_agreement(active, role, &reply);
        self.state.drive(active, SequenceEvent::Reply(role, reply));
        if active.sequence.is_done() {
            self.forget(id);
        }
    }

    /// Shadow drafts have other sequence ids, so what they draft ahead is ignored.
    fn on_proposal_ahead(&mut self, key: WorkerKey, ahead: ProposalAhead) {
        let there = self.sequences.get_mut(&ahead.sequence_id);
        if let Some(active) = there.filter(|active| active.worker(Role::Draft) == Some(key)) {
            self.state.drive(active, SequenceEvent::ProposalAhead(ahead));
        }
    }

    fn on_preempted(&mut self, key: WorkerKey, role: Role, id: SequenceId, assignment: u32) {
        let there = self.sequences.get_mut(&id).filter(|active| active.worker(role) == Some(key));
        let Some(active) = there else { return };
        active.is_preempted = true;
        self.state.drive(active, SequenceEvent::Preempted(role, assignment));
        active.is_preempted = false;
        if active.sequence.is_done() {
            self.forget(id);
        }
    }

    /// Moves timers whose sequences now have a later deadline, so that a met deadline causes no wakeup.
    fn postpone_timers(&mut self) {
        let soon = self.state.now + TIMER_SLACK;
        while let Some((at, id)) = self.state.timers.first().filter(|(at, _)| *at < soon) {
            let Some(active) = self.sequences.get_mut(&id) else { return };
            if active.deadline().is_some_and(|deadline| deadline <= at) {
                return;
            }
            self.state.timers.rearm(active);
        }
    }

    fn fire_timers(&mut self) {
        while let Some(id) = self.state.timers.pop_due(self.state.now) {
            let Some(active) = self.sequences.get_mut(&id) else { continue };
            active.timer = None;
            if active.target.is_some() {
                self.drive(id, SequenceEvent::Tick);
            } else if let Some(waited) = self.state.expired(active) {
                self.state.fail(active, SequenceFailure::Expired(waited));
                self.drive(id, SequenceEvent::Cancel);
            } else if self.state.may_keep_waiting(active) {
                self.state.timers.arm(active);
            } else {
                self.fail_unserved(id);
            }
        }
    }

    /// Passes one event to a sequence, executes the resulting actions, and drops the sequence if it is done.
    fn drive(&mut self, id: SequenceId, event: SequenceEvent) {
        let Some(active) = self.sequences.get_mut(&id) else { return };
        self.state.drive(active, event);
        if active.sequence.is_done() {
            self.forget(id);
        }
    }

    /// Ids of the sequences that meet the condition, in order of arrival, not in hash map order.
    fn select_sequences(&self, condition: impl Fn(&ActiveSequence) -> bool) -> Vec<SequenceId> {
        let selected = self.sequences.values().filter(|active| condition(active));
        let mut ids: Vec<SequenceId> = selected.map(|active| active.id).collect();
        ids.sort_unstable();
        ids
    }

    fn forget(&mut self, id: SequenceId) {
        if let Some(active) = self.sequences.remove(&id) {
            self.state.release(active);
        }
    }
}
