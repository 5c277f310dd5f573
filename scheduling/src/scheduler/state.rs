//! State of the scheduler except for the sequences, so that a sequence and this state can be borrowed mutably
//! together.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use speculation::sequence::{Action, Anomaly, Event};
use speculation::{FinishReason, Role, SequenceId, Step, Work};

use super::SchedulerConfig;
use super::active::{ActiveSequence, FollowUps};
use super::assign::QueueKey;
use super::delayed::DelayedDecodes;
use super::events::{ClientEvent, Command, Report, SequenceFailure, WorkerKey};
use super::lanes::{LaneId, Lanes};
use super::shadows::Shadows;
use super::timers::Timers;
use super::workers::Workers;
use crate::fair_queue::FairQueue;
use crate::replay_budget::ReplayBudget;
use crate::wait_stats::WaitStats;

#[derive(Debug)]
pub(super) struct SchedulerState {
    pub(super) config: SchedulerConfig,
    /// Time of the current event.
    pub(super) now: Duration,
    pub(super) workers: Workers,
    pub(super) lanes: Lanes,
    pub(super) timers: Timers,
    /// Sequences that may begin a round.
    pub(super) ready: VecDeque<SequenceId>,
    /// Decode steps that wait to share a forward pass.
    pub(super) delayed: DelayedDecodes,
    /// Sequences that wait for a target.
    pub(super) waiting: BTreeMap<QueueKey, FairQueue<u64, LaneId, SequenceId>>,
    /// Recent replays, by model.
    pub(super) replays: BTreeMap<String, ReplayBudget>,
    /// When the queues must be served again although no capacity was freed: the budget allows the next
    /// replay, or a target may be probed by a sequence that waits.
    pub(super) serve_queues_at: Option<Duration>,
    /// Sequences that no target of their model can serve. They wait outside the queues for another target to
    /// join.
    pub(super) unserved: BTreeSet<SequenceId>,
    /// Waiting times for targets.
    pub(super) target_waits: WaitStats,
    pub(super) shadows: Shadows,
    /// Whether a sequence joined a queue or capacity was freed since the queues were last served.
    pub(super) capacity_changed: bool,
    /// Commands for the driver.
    pub(super) commands: Vec<Command>,
    /// Reused buffer for the actions of a sequence; empty between events.
    actions: Vec<Action>,
}

impl SchedulerState {
    pub(super) fn new(config: SchedulerConfig) -> Self {
        Self {
            lanes: Lanes::new(config.policy.clone(), config.rules),
            config,
            now: Duration::ZERO,
            workers: Workers::default(),
            timers: Timers::default(),
            ready: VecDeque::new(),
            delayed: DelayedDecodes::default(),
            waiting: BTreeMap::new(),
            replays: BTreeMap::new(),
            serve_queues_at: None,
            unserved: BTreeSet::new(),
            target_waits: WaitStats::default(),
            shadows: Shadows::default(),
            capacity_changed: false,
            commands: Vec::new(),
            actions: Vec::new(),
        }
    }

    /// Passes one event to a sequence and executes the resulting actions.
    pub(super) fn drive(&mut self, active: &mut ActiveSequence, event: Event) {
        let mut follow_ups = FollowUps::new();
        self.step_sequence(active, event, &mut follow_ups);
        while let Some(event) = follow_ups.pop_front() {
            self.step_sequence(active, event, &mut follow_ups);
        }
        if active.draft.is_some() && active.sequence.draft_refusal().is_some() {
            self.release_draft(active);
        }
        if !active.sequence.is_done() {
            self.timers.arm(active);
        }
    }

    fn step_sequence(&mut self, active: &mut ActiveSequence, event: Event, follow_ups: &mut FollowUps) {
        let mut actions = std::mem::take(&mut self.actions);
        active.sequence.step_into(self.now, event, &mut actions);
        for action in actions.drain(..) {
            self.apply_action(active, action, follow_ups);
        }
        self.actions = actions;
    }

    fn apply_action(&mut self, active: &mut ActiveSequence, action: Action, follow_ups: &mut FollowUps) {
        match action {
            Action::Send(role, step) => self.send(active, role, step),
            Action::Close(role, assignment) => {
                if let Some(key) = self.connected(active, role) {
                    self.commands.push(Command::Close(key, active.id, assignment));
                }
            }
            Action::Assign(role) => self.reassign(active, role, follow_ups),
            Action::Ready => self.ready.push_back(active.id),
            Action::Commit(commit) => {
                self.decode_answered(active);
                self.on_target_success(active);
                self.grow_reservations(active);
                self.on_round(active, &commit);
                self.follow_lookups(active);
                self.follow_shadow(active, &commit);
                self.commands.push(Command::Client(ClientEvent::Commit(active.committed(commit))));
            }
            Action::PromptLogprobs(scores) => {
                self.commands.push(Command::Client(ClientEvent::PromptLogprobs(active.id, scores)));
            }
            Action::Finished(reason) => self.finished(active, reason),
            Action::TargetFault(fault) => self.on_target_fault(active, fault),
            Action::UsedProposalAhead => self.commands.push(Command::Report(Report::UsedProposalAhead)),
            Action::Anomaly(why) => {
                self.commands.push(Command::Report(Report::Anomaly(why)));
                if why == Anomaly::LateDraft {
                    active.round.is_late = true;
                    self.on_late_draft(active);
                }
            }
        }
    }

    fn send(&mut self, active: &mut ActiveSequence, role: Role, step: Step) {
        match &step.work {
            Work::Propose { num_draft_tokens, .. } => {
                self.on_proposal_requested(active, &step, *num_draft_tokens);
            }
            Work::Verify { draft } => self.on_verify_requested(active, draft.depth()),
            Work::Feed => {}
        }
        if let Some(key) = self.connected(active, role) {
            if let Some(target) = active.target.as_mut().filter(|_| role == Role::Target) {
                self.workers.request_sent(target, self.now);
            }
            self.commands.push(Command::Send(key, step));
        }
    }

    /// The sequence's worker of this role, if it is connected.
    fn connected(&self, active: &ActiveSequence, role: Role) -> Option<WorkerKey> {
        active.worker(role).filter(|key| self.workers.get(*key).is_some())
    }

    fn finished(&mut self, active: &ActiveSequence, reason: FinishReason) {
        self.on_output(active);
        self.commands.push(Command::Client(ClientEvent::Finish(active.id, reason, active.usage())));
    }

    /// Learns from the length of a complete output. Requests that only score their prompt have none.
    pub(super) fn on_output(&mut self, active: &ActiveSequence) {
        let spec = active.sequence.spec();
        if spec.max_len > spec.prompt_len {
            self.lanes.on_output(active.lane.id, active.output_len());
        }
    }

    pub(super) fn fail(&mut self, active: &ActiveSequence, failure: SequenceFailure) {
        self.commands.push(Command::Client(ClientEvent::Fail(active.id, failure)));
    }

    /// Frees the capacity of a sequence at a draft worker that refused it. It is not assigned another one.
    fn release_draft(&mut self, active: &mut ActiveSequence) {
        self.credit_serving_draft(active);
        active.pending_proposal = None;
        if let Some(reservation) = active.draft.take() {
            self.workers.release(reservation);
            self.capacity_changed = true;
        }
    }

    /// Frees the capacity of a sequence that ended, or ends its wait for that.
    pub(super) fn release(&mut self, mut active: ActiveSequence) {
        self.stop_waiting(&active);
        self.decode_answered(&mut active);
        self.end_trial(&mut active);
        if active.target.is_some() {
            self.lanes.stopped_running(active.lane.id, active.speculation.disables_drafting());
        }
        self.lanes.leave(active.lane.id);
        self.timers.disarm(&mut active);
        for reservation in active.target.take().into_iter().chain(active.draft.take()) {
            self.workers.release(reservation);
        }
        self.capacity_changed = true;
    }

    pub(super) fn report_waiting(&mut self) {
        let waiting = self.waiting.values().map(FairQueue::len).sum();
        self.commands.push(Command::Report(Report::WaitingForTarget(waiting)));
    }
}
