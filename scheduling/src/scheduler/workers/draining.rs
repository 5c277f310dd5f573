//! Draining by order of an operator: by address, or by removal from the list of workers.

use super::super::events::{Drain, WorkerKey};
use super::{MAX_ENTRIES, Workers};

/// Reasons for which a worker gets no new sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::scheduler) struct Draining {
    /// It is about to stop.
    pub(in crate::scheduler) by_worker: bool,
    /// An operator drains it.
    pub(in crate::scheduler) by_operator: bool,
    /// An operator removed it from the list of workers.
    pub(in crate::scheduler) is_unlisted: bool,
}

impl Draining {
    pub(in crate::scheduler) fn is_active(self) -> bool {
        self.reason().is_some()
    }

    /// Returns the reason in one word.
    pub(in crate::scheduler) fn reason(self) -> Option<&'static str> {
        match () {
            () if self.by_worker => Some("stopping"),
            () if self.is_unlisted => Some("unlisted"),
            () if self.by_operator => Some("operator"),
            () => None,
        }
    }
}

impl Workers {
    /// Executes an operator's drain order for an address. Returns the workers there whose state changed.
    pub(in crate::scheduler) fn drain(&mut self, drain: &Drain) -> Vec<WorkerKey> {
        let Drain { address, is_draining, .. } = drain;
        if !is_draining {
            self.drained.remove(address);
        } else if self.drained.len() < MAX_ENTRIES {
            self.drained.insert(address.clone());
        }
        let there = self.workers.values_mut().filter(|worker| worker.info.address == *address);
        let changed = there.filter(|worker| worker.draining.by_operator != *is_draining);
        changed
            .map(|worker| {
                worker.draining.by_operator = *is_draining;
                worker.key
            })
            .collect()
    }

    /// Records whether the operator lists the worker. Returns whether that changed.
    pub(in crate::scheduler) fn set_listed(&mut self, key: WorkerKey, is_listed: bool) -> bool {
        let Some(worker) = self.workers.get_mut(&key) else { return false };
        match is_listed {
            true => self.unlisted.remove(&key),
            false => self.unlisted.insert(key),
        };
        std::mem::replace(&mut worker.draining.is_unlisted, !is_listed) == is_listed
    }

    /// Returns workers that are no longer listed and have no sequences, each once.
    pub(in crate::scheduler) fn take_idle_unlisted(&mut self) -> Vec<WorkerKey> {
        if self.unlisted.is_empty() {
            return Vec::new();
        }
        let is_idle = |key: &WorkerKey| self.workers.get(key).is_none_or(|worker| worker.load == 0);
        let idle: Vec<WorkerKey> = self.unlisted.iter().copied().filter(is_idle).collect();
        idle.iter().for_each(|key| {
            self.unlisted.remove(key);
        });
        idle
    }
}
