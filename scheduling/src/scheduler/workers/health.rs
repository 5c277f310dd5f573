//! Bookkeeping for the health of targets: outstanding answers, silent targets, and alternatives for a
//! sequence. [`crate::target_health`] judges each target; `targets.rs` acts on the verdicts.

use std::time::Duration;

use super::super::events::WorkerKey;
use super::{PlacementRequest, Reservation, Worker, Workers};
use crate::cost::{ForwardShape, duration_of_micros};
use crate::target_health::{ExpectedSteps, MIN_SILENCE};

/// Assumed maximum rows per sequence in a step, used to bound a target's work.
const MAX_ROWS_OF_A_SEQUENCE: f64 = 8.0;

/// Assumed time of a target for a grammar that it may have to compile. Its first one takes some tenths of a
/// second with a large vocabulary, and nothing that depends on it is answered before.
const GRAMMAR_WORK: Duration = Duration::from_millis(500);

impl Workers {
    /// Records that a step is sent to the sequence's target.
    pub(in crate::scheduler) fn request_sent(&mut self, reservation: &mut Reservation, now: Duration) {
        let Some(worker) = self.workers.get_mut(&reservation.key) else { return };
        if !std::mem::replace(&mut reservation.awaits_reply, true) {
            worker.target_health.request_sent(now);
        }
        if worker.check_at.is_none() {
            self.check_at(reservation.key, now + MIN_SILENCE);
        }
    }

    /// Records that the sequence's target answered.
    pub(in crate::scheduler) fn answered(&mut self, reservation: &mut Reservation) {
        if std::mem::take(&mut reservation.awaits_reply)
            && let Some(worker) = self.workers.get_mut(&reservation.key)
        {
            worker.target_health.request_done();
        }
    }

    /// Records that the target committed tokens of the sequence.
    pub(in crate::scheduler) fn succeeded(&mut self, reservation: &mut Reservation) {
        let Some(worker) = self.workers.get_mut(&reservation.key) else { return };
        if worker.target_health.is_avoided() {
            self.changed.insert(reservation.key);
        }
        worker.target_health.succeeded();
        if !self.crashes.is_empty() {
            self.crashes.remove(&worker.info.address);
        }
        worker.suspects -= u32::from(std::mem::take(&mut reservation.is_suspect));
    }

    /// Records that a sequence failed at its target. Returns whether that opens the target's breaker.
    pub(in crate::scheduler) fn failed(&mut self, key: WorkerKey, now: Duration) -> bool {
        let Some(worker) = self.workers.get_mut(&key) else { return false };
        self.changed.insert(key);
        worker.target_health.failed(now)
    }

    /// When the first of the targets that get no sequences now may be probed.
    pub(in crate::scheduler) fn next_probe(&self, now: Duration) -> Option<Duration> {
        self.workers.values().filter_map(|worker| worker.target_health.next_probe(now)).min()
    }

    /// Returns the targets that became silent since the last call.
    pub(in crate::scheduler) fn newly_silent(&mut self, now: Duration) -> Vec<WorkerKey> {
        if self.next_check.is_none_or(|next| now < next) {
            return Vec::new();
        }
        let mut silent = Vec::new();
        for worker in self.workers.values_mut() {
            if worker.check_at.is_none_or(|at| now < at) {
                continue;
            }
            let expected = worker.expected_steps();
            if worker.target_health.check_silence(now, expected) {
                silent.push(worker.key);
            }
            worker.check_at = worker.target_health.silent_at(expected);
        }
        self.next_check = self.workers.values().filter_map(|worker| worker.check_at).min();
        self.changed.extend(&silent);
        silent
    }

    /// Whether any target could serve the sequence, regardless of capacity.
    pub(in crate::scheduler) fn could_serve(&self, request: &PlacementRequest<'_>) -> bool {
        self.candidates(request).next().is_some()
    }

    /// Number of targets that share the sequences of a model: those that have any, and those that may get
    /// some because they neither drain nor are silent.
    pub(in crate::scheduler) fn num_targets(&self, model: &str) -> u32 {
        let takes_part = |target: &&Worker| {
            target.load > 0 || !(target.draining.is_active() || target.target_health.is_silent())
        };
        self.targets_of(model).filter(takes_part).count() as u32
    }

    /// Whether every connected target of the model refused the sequence.
    pub(in crate::scheduler) fn all_refused(&self, request: &PlacementRequest<'_>) -> bool {
        let targets = self.targets.get(request.model);
        targets.is_some_and(|targets| targets.iter().all(|key| request.refused_by.contains(key)))
    }

    /// Whether a healthy target of the same numerics class as `from` could serve the sequence: now or later
    /// if `from` is unhealthy itself, and otherwise now.
    pub(in crate::scheduler) fn could_move(&self, request: &PlacementRequest<'_>, from: WorkerKey) -> bool {
        let Some(from) = self.get(from) else { return false };
        let may_wait = from.target_health.is_unhealthy(request.now);
        self.candidates(request).any(|candidate| {
            candidate.key != from.key
                && candidate.info.numerics_id == from.info.numerics_id
                && !candidate.is_unhealthy
                && (may_wait || !candidate.is_unavailable)
        })
    }

    /// Records a frame of a target. Returns whether it ends a silence.
    pub(in crate::scheduler) fn frame_received(&mut self, key: WorkerKey, now: Duration) -> bool {
        let Some(worker) = self.workers.get_mut(&key) else { return false };
        let ends_silence = worker.target_health.frame_received(now);
        if ends_silence {
            self.changed.insert(key);
        }
        // Answers may be outstanding that this frame does not bring.
        if worker.check_at.is_none() && worker.target_health.has_outstanding() {
            self.check_at(key, now + MIN_SILENCE);
        }
        ends_silence
    }

    fn check_at(&mut self, key: WorkerKey, at: Duration) {
        if let Some(worker) = self.workers.get_mut(&key) {
            worker.check_at = Some(at);
            self.next_check = Some(self.next_check.map_or(at, |next| next.min(at)));
        }
    }
}

impl Worker {
    /// Expected step times of the target, which bound how long it may be silent.
    pub(in crate::scheduler) fn expected_steps(&self) -> ExpectedSteps {
        let rows = f64::from(self.load) * MAX_ROWS_OF_A_SEQUENCE + f64::from(self.prefilling);
        let workload = ForwardShape { rows, sequences: f64::from(self.load.max(1)), context: 0.0 };
        let grammars = if self.compiling > 0 { GRAMMAR_WORK } else { Duration::ZERO };
        ExpectedSteps {
            one_row: duration_of_micros(self.cost.step_us(1.0, 0.0)),
            workload: duration_of_micros(self.cost.forward_us(workload)).saturating_add(grammars),
        }
    }
}
