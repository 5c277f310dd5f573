//! Draining workers: ones that are about to stop, that an operator drains, or that were removed from the list
//! of workers. They get no new sequences. Sequences at a target may finish there; a draft worker is left at
//! once.

use speculation::Role;
use speculation::sequence::Event as SequenceEvent;

use super::Scheduler;
use super::events::{Command, Drain, Report, WorkerKey};

impl Scheduler {
    /// A worker announced that it is about to stop.
    pub(super) fn on_worker_draining(&mut self, key: WorkerKey) {
        let Some(worker) = self.state.workers.get_mut(key) else { return };
        if !std::mem::replace(&mut worker.draining.by_worker, true) {
            self.start_draining(key);
        }
    }

    /// Drains the workers at an address, or undoes that, by order of an operator.
    pub(super) fn drain_address(&mut self, drain: &Drain) {
        let changed = self.state.workers.drain(drain);
        for &key in &changed {
            match drain.is_draining {
                true => self.start_draining(key),
                false => self.resume_assignments(key),
            }
        }
        if drain.is_draining && drain.moves_sequences {
            let there = |worker: &&super::workers::Worker| worker.info.address == drain.address;
            let keys: Vec<WorkerKey> =
                self.state.workers.values().filter(there).map(|worker| worker.key).collect();
            keys.into_iter().for_each(|key| self.move_sequences_from(key));
        }
    }

    /// Records that an operator removed the worker from the list of workers, or put it back.
    pub(super) fn set_listed(&mut self, key: WorkerKey, is_listed: bool) {
        if self.state.workers.set_listed(key, is_listed) {
            match is_listed {
                true => self.resume_assignments(key),
                false => self.start_draining(key),
            }
        }
    }

    fn start_draining(&mut self, key: WorkerKey) {
        let Some(worker) = self.state.workers.get(key) else { return };
        let report = Report::WorkerDraining { worker: key, sequences: worker.load };
        self.state.commands.push(Command::Report(report));
        // Sequences that waited for it may get a target that was avoided.
        self.state.capacity_changed = true;
        for id in self.select_sequences(|active| active.worker(Role::Draft) == Some(key)) {
            self.drive(id, SequenceEvent::Reassign(Role::Draft));
        }
        self.drop_shadows_at(key);
    }

    fn resume_assignments(&mut self, key: WorkerKey) {
        if self.state.workers.get(key).is_some_and(|worker| !worker.draining.is_active()) {
            self.state.commands.push(Command::Report(Report::WorkerUndrained(key)));
            self.state.workers.draft_changes += 1;
            self.state.capacity_changed = true;
            self.requeue_unserved();
        }
    }
}
