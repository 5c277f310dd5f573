//! Failing targets. Sequences move away from a silent target, refused sequences are tried at other targets,
//! and a sequence that loses several targets in a row is quarantined. [`crate::target_health`] judges each
//! target.

use std::time::Duration;

use speculation::sequence::{Event, TargetFault};
use speculation::{Refusal, RefusalCause, Role, SequenceId};

use super::Scheduler;
use super::active::{ActiveSequence, TargetFailures};
use super::events::{Command, Report, SequenceFailure, WorkerKey};
use super::state::SchedulerState;
use crate::target_health::UNKNOWN_WORK;

/// Consecutive targets lost before they committed anything after which a sequence is a suspect: it shares no
/// target with another suspect. A healthy sequence that ran beside the faulty one commits next time and is
/// cleared.
pub(super) const SUSPECT_AFTER: usize = 2;

/// Number of such losses, several at one target included, after which the sequence fails. If it lost a target
/// each time, it had the second half of these without another suspect.
pub(super) const MAX_LOSSES: usize = 2 * SUSPECT_AFTER;

/// A step is sent again after this multiple of its expected maximum time, and not before [`UNKNOWN_WORK`].
const DEADLINE_WORKLOADS: u32 = 20;

impl Scheduler {
    /// Finds targets that have become silent, and moves their sequences.
    pub(super) fn check_targets(&mut self) {
        let now = self.state.now;
        for worker in self.state.workers.newly_silent(now) {
            let moving = self.movable_sequences(worker);
            let health = self.state.workers.get(worker).map(|worker| &worker.target_health);
            let waited = health.and_then(|health| health.silent_for(now)).unwrap_or_default();
            let report = Report::TargetSilent { worker, waited, moved: moving.len() };
            self.state.commands.push(Command::Report(report));
            self.leave_target(moving);
            // Sequences that waited for it may get a target that was avoided.
            self.state.capacity_changed = true;
        }
    }

    /// Handles the arrival of a target's frame.
    pub(super) fn on_target_frame(&mut self, key: WorkerKey) {
        let now = self.state.now;
        if self.state.workers.frame_received(key, now) {
            self.state.commands.push(Command::Report(Report::TargetRecovered(key)));
            self.state.capacity_changed = true;
            self.move_from_silent_targets();
        }
    }

    /// Moves sequences of silent targets after a target joined or recovered.
    pub(super) fn move_from_silent_targets(&mut self) {
        let now = self.state.now;
        let is_silent = |worker: &&super::workers::Worker| worker.target_health.silent_for(now).is_some();
        let silent: Vec<WorkerKey> =
            self.state.workers.values().filter(is_silent).map(|worker| worker.key).collect();
        silent.into_iter().for_each(|key| self.move_sequences_from(key));
    }

    /// Moves the sequences that another target of the same numerics class could run.
    pub(super) fn move_sequences_from(&mut self, key: WorkerKey) {
        let moving = self.movable_sequences(key);
        if !moving.is_empty() {
            let report = Report::SequencesMoved { from: key, sequences: moving.len() };
            self.state.commands.push(Command::Report(report));
        }
        self.leave_target(moving);
    }

    /// Returns the sequences at a target that another target could run.
    fn movable_sequences(&self, key: WorkerKey) -> Vec<SequenceId> {
        self.select_sequences(|active| {
            active.worker(Role::Target) == Some(key)
                && self.state.workers.could_move(&self.state.placement_request(active, None), key)
        })
    }

    fn leave_target(&mut self, moving: Vec<SequenceId>) {
        for id in moving {
            self.drive(id, Event::Reassign(Role::Target));
        }
    }

    /// Queues unserved sequences again; a worker that joined may serve them.
    pub(super) fn requeue_unserved(&mut self) {
        for id in std::mem::take(&mut self.state.unserved) {
            if let Some(active) = self.sequences.get(&id).filter(|active| active.target.is_none()) {
                self.state.enqueue(active);
            }
        }
    }

    /// Starts the wait for a target of `model` to appear, for all sequences that waited for one with
    /// capacity, if the last target left.
    pub(super) fn restart_target_wait(&mut self, model: &str) {
        if self.state.workers.is_served(model) {
            return;
        }
        let deadline = self.state.now + self.state.config.target_wait;
        let is_waiting =
            |active: &&mut ActiveSequence| active.target.is_none() && active.lane.key.model == model;
        for active in self.sequences.values_mut().filter(is_waiting) {
            active.no_target_deadline = deadline;
        }
    }

    /// Fails a sequence that has no target and may not wait any longer.
    pub(super) fn fail_unserved(&mut self, id: SequenceId) {
        let Some(active) = self.sequences.get(&id) else { return };
        self.state.fail(active, self.state.unserved_failure(active));
        self.drive(id, Event::Cancel);
    }
}

impl SchedulerState {
    /// Records why a sequence leaves its target: [`TargetFault`].
    pub(super) fn on_target_fault(&mut self, active: &mut ActiveSequence, fault: TargetFault) {
        let Some(key) = active.worker(Role::Target) else { return };
        let failures = &mut active.failures;
        match &fault {
            TargetFault::Refused(_) => failures.refused_by.push(key),
            TargetFault::ProtocolViolation | TargetFault::Unanswered => failures.lost.push(key),
        }
        failures.reason = Some(fault.clone());
        let now = self.now;
        // Any client could open breakers with grammars and long sequences.
        let is_opened = fault.is_failure() && self.workers.failed(key, now);
        self.commands.push(Command::Report(Report::TargetFailed { worker: key, fault, is_opened }));
    }

    /// Records that the target committed tokens of the sequence.
    pub(super) fn on_target_success(&mut self, active: &mut ActiveSequence) {
        active.failures.lost.clear();
        if let Some(target) = &mut active.target {
            self.workers.succeeded(target);
        }
    }

    fn unserved_failure(&self, active: &ActiveSequence) -> SequenceFailure {
        let model = &active.lane.key.model;
        if !self.workers.is_served(model) {
            return SequenceFailure::Unavailable(format!("no target worker is ready for model `{model}`"));
        }
        match &active.failures.reason {
            Some(TargetFault::Refused(Refusal { cause: RefusalCause::Unsupported, reason })) => {
                SequenceFailure::Unsupported(reason.clone())
            }
            Some(TargetFault::Refused(Refusal { reason, .. })) => SequenceFailure::Refused(reason.clone()),
            _ if self.workers.all_targets_drain(model) => {
                SequenceFailure::Unavailable(format!("all target workers of model `{model}` are draining"))
            }
            _ => {
                let max_len = active.sequence.spec().max_len;
                SequenceFailure::Unavailable(format!(
                    "no target worker of model `{model}` has a context window of {max_len} tokens"
                ))
            }
        }
    }

    /// Fails a sequence after [`MAX_LOSSES`]. It is in quarantine if several targets failed while they ran
    /// it; one target that does not answer says nothing about it.
    pub(super) fn fail_after_losses(&mut self, active: &ActiveSequence) {
        let TargetFailures { lost, reason, .. } = &active.failures;
        let (losses, num_targets) = (lost.len(), active.failures.num_targets_lost());
        let last = reason.as_ref().map_or("the target worker was lost".to_owned(), ToString::to_string);
        let failure = match (num_targets, reason) {
            (1, Some(TargetFault::Unanswered)) => {
                let model = &active.lane.key.model;
                SequenceFailure::Unavailable(format!("no target worker of model `{model}` answers"))
            }
            _ => SequenceFailure::Quarantined(format!(
                "this request lost its target worker {losses} times in a row, {num_targets} different ones; \
                 last failure: {last}"
            )),
        };
        self.fail(active, failure);
    }

    /// Deadline of one step at the sequence's target.
    pub(super) fn target_deadline(&self, active: &ActiveSequence) -> Duration {
        let most = self.config.target_deadline;
        let Some(worker) = active.worker_in(&self.workers, Role::Target) else { return most };
        let workload = worker.expected_steps().workload.saturating_mul(DEADLINE_WORKLOADS);
        workload.max(UNKNOWN_WORK).min(most)
    }
}
