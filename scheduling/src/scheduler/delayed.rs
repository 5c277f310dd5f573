//! Decode steps that wait to share a forward pass of their target ([`crate::decode_delay`]). A target is
//! considered again only when something changed there, or the longest delay has passed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use speculation::{Role, SequenceId};

use super::Scheduler;
use super::active::{ActiveSequence, RoundPhase};
use super::events::WorkerKey;
use crate::decode_delay::{delay_pays, max_delay};

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct DelayedDecodes {
    by_target: BTreeMap<WorkerKey, Delay>,
    /// Targets to consider again.
    changed: BTreeSet<WorkerKey>,
    /// The earliest end of a delay.
    pub(super) until: Option<Duration>,
    /// Number of targets that were considered.
    #[cfg(test)]
    pub(super) num_considered: usize,
}

/// The delayed steps of one target, and until when they wait.
#[derive(Debug, Default)]
struct Delay {
    steps: Vec<DelayedStep>,
    until: Duration,
}

/// One delayed step. Holds what the decision needs of its sequence, so that this is not looked up again.
#[derive(Debug, Clone, Copy)]
struct DelayedStep {
    id: SequenceId,
    /// Length of the sequence.
    context_len: u32,
    begun_at: Duration,
}

impl DelayedDecodes {
    /// Delays the decode step of a sequence that has no step in flight.
    pub(super) fn push(&mut self, active: &ActiveSequence) {
        // A sequence that is ready has a target.
        let Some(target) = active.worker(Role::Target) else { return };
        let step = DelayedStep { id: active.id, context_len: active.len(), begun_at: active.round.begun_at };
        self.by_target.entry(target).or_default().steps.push(step);
        self.changed.insert(target);
    }

    /// Removes the delayed step of a sequence that ends or loses its target.
    pub(super) fn leave(&mut self, id: SequenceId, target: Option<WorkerKey>) {
        if let Some((key, delay)) = target.and_then(|key| Some((key, self.by_target.get_mut(&key)?))) {
            delay.steps.retain(|step| step.id != id);
            self.changed.insert(key);
        }
    }

    /// Records that a target's forward times, its decode steps in flight or its delayed steps changed.
    pub(super) fn target_changed(&mut self, key: WorkerKey) {
        if self.by_target.contains_key(&key) {
            self.changed.insert(key);
        }
    }

    /// Removes and returns the targets to consider at `now`, and their steps.
    fn take_changed(&mut self, now: Duration) -> Vec<(WorkerKey, Vec<DelayedStep>)> {
        if self.until.is_some_and(|until| until <= now) {
            let due = self.by_target.iter().filter(|(_, delay)| delay.until <= now);
            self.changed.extend(due.map(|(key, _)| *key));
        }
        let changed = std::mem::take(&mut self.changed).into_iter();
        changed.filter_map(|key| Some((key, self.by_target.remove(&key)?.steps))).collect()
    }
}

impl Scheduler {
    /// Begins delayed decode steps, for each target all of them or none.
    pub(super) fn begin_decode_rounds(&mut self) {
        let changed = self.state.delayed.take_changed(self.state.now);
        if changed.is_empty() {
            return;
        }
        for (target, steps) in changed {
            #[cfg(test)]
            (self.state.delayed.num_considered += 1);
            match self.delay_until(target, &steps) {
                Some(until) if self.state.now < until => {
                    self.state.delayed.by_target.insert(target, Delay { steps, until });
                }
                _ => steps.into_iter().for_each(|step| self.begin_decode_round(step.id)),
            }
        }
        let delayed = &mut self.state.delayed;
        delayed.until = delayed.by_target.values().map(|delay| delay.until).min();
    }

    /// Returns until when these decode steps wait for those that run at their target, if the delay pays.
    fn delay_until(&self, target: WorkerKey, steps: &[DelayedStep]) -> Option<Duration> {
        let worker = self.state.workers.get(target)?;
        let context_len =
            steps.iter().map(|step| f64::from(step.context_len)).sum::<f64>() / steps.len() as f64;
        let in_flight = worker.decodes_in_flight;
        if !delay_pays(steps.len() as u32, in_flight, context_len, &worker.cost) {
            return None;
        }
        let since = steps.iter().map(|step| step.begun_at).min()?;
        Some(since + max_delay(in_flight, context_len, &worker.cost))
    }

    fn begin_decode_round(&mut self, id: SequenceId) {
        let Some(active) = self.sequences.get_mut(&id) else { return };
        active.round.phase = RoundPhase::Begun;
        // Without a target nothing is in flight; the sequence becomes ready again once it has one.
        if let Some(worker) = active.worker(Role::Target).and_then(|key| self.state.workers.get_mut(key)) {
            worker.decodes_in_flight += 1;
            active.round.phase = RoundPhase::DecodeInFlight;
        }
        self.begin_round(id);
    }
}
