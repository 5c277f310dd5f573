//! Reports workers whose KV blocks or usability may have changed, for metrics. Decides nothing.

use speculation::Role;

use super::super::events::{Report, WorkerInfo, WorkerKey};
use super::super::pairing;
use super::{Worker, Workers};

impl Workers {
    /// Records that a worker's health changed.
    pub(in crate::scheduler) fn health_changed(&mut self, key: WorkerKey) {
        self.changed.insert(key);
    }

    /// Returns the workers that changed since the last call.
    pub(in crate::scheduler) fn take_changed(&mut self) -> impl Iterator<Item = Report> {
        let changed = std::mem::take(&mut self.changed).into_iter();
        changed.filter_map(|key| {
            let worker = self.workers.get(&key)?;
            let (credit, reserved) = (worker.credit, worker.reserved);
            Some(Report::WorkerChanged { worker: key, credit, reserved, is_usable: self.is_usable(worker) })
        })
    }

    /// See [`Report::WorkerChanged`].
    fn is_usable(&self, worker: &Worker) -> bool {
        match worker.info.role {
            Role::Target => !worker.target_health.is_avoided(),
            Role::Draft => !worker.draft_health.is_silent() && self.fits_a_target(&worker.info),
        }
    }

    /// Whether a draft worker can be paired with one of the targets. Without any target nothing is known.
    fn fits_a_target(&self, draft: &WorkerInfo) -> bool {
        let keys = self.targets.values().flatten();
        let mut targets = keys.filter_map(|key| self.workers.get(key)).peekable();
        targets.peek().is_none() || targets.any(|target| pairing::check(draft, &target.info).is_ok())
    }
}
