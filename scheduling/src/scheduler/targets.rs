//! Targets that fail: sequences move away from one that is silent, refusals are tried elsewhere, and a sequence that one
//! target after the other is lost with is quarantined. [`crate::target_health`] judges each target.

use std::time::Duration;

use speculation::sequence::{Event, TargetFault};
use speculation::{Role, SequenceId};

use super::Scheduler;
use super::active::ActiveSequence;
use super::assign::wanted;
use super::events::{Command, Failure, Report, WorkerKey};
use super::state::SchedulerState;
use crate::target_health::UNKNOWN_WORK;

/// A sequence that so many targets in a row were lost with, before they committed anything, is a suspect: it shares no
/// target with another suspect. A neighbour of the one that kills its targets commits something next, and is cleared.
pub(super) const SUSPECT_AFTER: u32 = 2;

/// After so many it is failed. The last of them it ran on without another suspect.
pub(super) const MAX_TARGETS_LOST: u32 = 4;

/// A step is sent again after so many times what it should take at most, or [`UNKNOWN_WORK`].
const DEADLINE_WORKLOADS: u32 = 20;

impl Scheduler {
    /// Looks for targets that have fallen silent, and moves their sequences.
    pub(super) fn check_targets(&mut self) {
        let now = self.state.now;
        for worker in self.state.workers.fallen_silent(now) {
            let moving = self.movable(worker);
            let health = self.state.workers.get(worker).map(|worker| &worker.target_health);
            let waited = health.and_then(|health| health.silent_for(now)).unwrap_or_default();
            let report = Report::TargetSilent { worker, waited, moved: moving.len() };
            self.state.commands.push(Command::Report(report));
            self.leave_target(moving);
        }
    }

    /// A frame of a target came.
    pub(super) fn heard_from(&mut self, key: WorkerKey) {
        let now = self.state.now;
        if self.state.workers.get_mut(key).is_some_and(|worker| worker.target_health.heard(now)) {
            self.state.commands.push(Command::Report(Report::TargetAnswers(key)));
            self.state.capacity_changed = true;
            self.move_from_silent_targets();
        }
    }

    /// A target joined, or answers again: sequences of silent ones may have somewhere to go.
    pub(super) fn move_from_silent_targets(&mut self) {
        let now = self.state.now;
        let is_silent = |worker: &&super::workers::Worker| worker.target_health.silent_for(now).is_some();
        let silent: Vec<WorkerKey> =
            self.state.workers.values().filter(is_silent).map(|worker| worker.key).collect();
        silent.into_iter().for_each(|key| self.move_from(key));
    }

    /// Moves what another target of the same numerics class could run.
    pub(super) fn move_from(&mut self, key: WorkerKey) {
        let moving = self.movable(key);
        if !moving.is_empty() {
            let report = Report::Moved { from: key, sequences: moving.len() };
            self.state.commands.push(Command::Report(report));
        }
        self.leave_target(moving);
    }

    /// The sequences at a target that another one could run, in the order in which they came, not in that of the table.
    fn movable(&self, key: WorkerKey) -> Vec<SequenceId> {
        let may_move = |active: &&ActiveSequence| {
            active.worker(Role::Target) == Some(key)
                && self
                    .state
                    .workers
                    .could_move(&wanted(self.state.now, &self.state.lanes, active, None), key)
        };
        let mut moving: Vec<SequenceId> =
            self.sequences.values().filter(may_move).map(|active| active.id).collect();
        moving.sort_unstable();
        moving
    }

    fn leave_target(&mut self, moving: Vec<SequenceId>) {
        for id in moving {
            self.drive(id, Event::GiveUp(Role::Target));
        }
    }

    /// A worker joined: it may serve what no target did.
    pub(super) fn requeue_unserved(&mut self) {
        for id in std::mem::take(&mut self.state.unserved) {
            if let Some(active) = self.sequences.get(&id).filter(|active| active.target.is_none()) {
                self.state.enqueue(active);
            }
        }
    }

    /// The sequence has no target, and waits for none any more.
    pub(super) fn fail_unserved(&mut self, id: SequenceId) {
        let Some(active) = self.sequences.get(&id) else { return };
        self.state.fail(active, self.state.unserved_failure(active));
        self.drive(id, Event::Cancel);
    }
}

impl SchedulerState {
    /// The sequence leaves its target: [`TargetFault`] says why.
    pub(super) fn on_target_fault(&mut self, active: &mut ActiveSequence, fault: TargetFault) {
        let Some(key) = active.worker(Role::Target) else { return };
        let failures = &mut active.failures;
        match &fault {
            TargetFault::Refused(_) => failures.refused_by.push(key),
            TargetFault::BrokeContract | TargetFault::Unanswered => failures.in_a_row += 1,
        }
        failures.reason = Some(fault.clone());
        let now = self.now;
        let is_opened = self.workers.get_mut(key).is_some_and(|worker| worker.target_health.failed(now));
        self.commands.push(Command::Report(Report::TargetFailed { worker: key, fault, is_opened }));
    }

    /// The target committed tokens of the sequence.
    pub(super) fn on_target_success(&mut self, active: &mut ActiveSequence) {
        active.failures.in_a_row = 0;
        if let Some(target) = &mut active.target {
            self.workers.succeeded(target);
        }
    }

    fn unserved_failure(&self, active: &ActiveSequence) -> Failure {
        let model = &active.lane.key.model;
        if !self.workers.is_served(model) {
            return Failure::Unavailable(format!("no target worker is ready for model `{model}`"));
        }
        match &active.failures.reason {
            Some(TargetFault::Refused(reason)) => Failure::Refused(reason.clone()),
            _ => {
                let max_len = active.sequence.spec().max_len;
                Failure::Unavailable(format!(
                    "no target worker of model `{model}` has a window of {max_len} tokens"
                ))
            }
        }
    }

    /// Too many targets in a row were lost with the sequence.
    pub(super) fn quarantine(&mut self, active: &ActiveSequence) {
        let last = active
            .failures
            .reason
            .as_ref()
            .map_or("the target worker was lost".to_owned(), ToString::to_string);
        let reason = format!(
            "this request was lost with {MAX_TARGETS_LOST} target workers in a row: the last time {last}"
        );
        self.fail(active, Failure::Quarantined(reason));
    }

    /// How long the sequence's target may take for one step.
    pub(super) fn target_deadline(&self, active: &ActiveSequence) -> Duration {
        let most = self.config.target_deadline;
        let Some(worker) = active.worker(Role::Target).and_then(|key| self.workers.get(key)) else {
            return most;
        };
        let workload = worker.expected_steps().workload.saturating_mul(DEADLINE_WORKLOADS);
        workload.max(UNKNOWN_WORK).min(most)
    }
}
