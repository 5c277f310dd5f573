//! Timer entries: at most one deadline per sequence, as data. The driver asks when to wake up and reports
//! each wakeup.
//!
//! Most deadlines are met and replaced by later ones. An entry that is earlier than its sequence's deadline
//! is therefore moved only when it is about to fire.

use std::collections::BTreeSet;
use std::time::Duration;

use speculation::SequenceId;

use super::active::ActiveSequence;

/// Timer entries due later than this are not moved yet. Also the interval at which an expired sequence is
/// checked again while no target can serve it.
pub(super) const TIMER_SLACK: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Timers {
    entries: BTreeSet<(Duration, SequenceId)>,
}

impl Timers {
    /// Returns the earliest entry.
    pub(super) fn first(&self) -> Option<(Duration, SequenceId)> {
        self.entries.first().copied()
    }

    /// Removes the first entry if it is due.
    pub(super) fn pop_due(&mut self, now: Duration) -> Option<SequenceId> {
        let first = self.first().filter(|(at, _)| *at <= now)?;
        self.entries.remove(&first);
        Some(first.1)
    }

    /// Sets an entry no later than the sequence's deadline; keeps an earlier entry.
    pub(super) fn arm(&mut self, active: &mut ActiveSequence) {
        let Some(at) = active.deadline() else { return };
        if active.timer.is_some_and(|set| set <= at) {
            return;
        }
        if let Some(later) = active.timer.replace(at) {
            self.entries.remove(&(later, active.id));
        }
        self.entries.insert((at, active.id));
    }

    /// Removes the sequence's entry.
    pub(super) fn disarm(&mut self, active: &mut ActiveSequence) {
        if let Some(at) = active.timer.take() {
            self.entries.remove(&(at, active.id));
        }
    }

    /// Sets the sequence's entry to its deadline.
    pub(super) fn rearm(&mut self, active: &mut ActiveSequence) {
        self.disarm(active);
        self.arm(active);
    }
}
