//! The earliest deadline of each sequence, as data: the driver asks when to wake up and says when it did.
//!
//! Most deadlines are met and replaced by later ones, so an entry that is earlier than its sequence's deadline is left
//! alone until it is about to fire; only then it is moved.

use std::collections::BTreeSet;
use std::time::Duration;

use speculation::SequenceId;

use super::active::ActiveSequence;

/// What is due later than this from now is not looked at yet: an entry is not moved, and a sequence whose time is over while no
/// target could serve it is looked at again then.
pub(super) const LATER: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Timers {
    entries: BTreeSet<(Duration, SequenceId)>,
}

impl Timers {
    /// The first entry.
    pub(super) fn first(&self) -> Option<(Duration, SequenceId)> {
        self.entries.first().copied()
    }

    /// Removes the first entry if it is due.
    pub(super) fn pop_due(&mut self, now: Duration) -> Option<SequenceId> {
        let first = self.first().filter(|(at, _)| *at <= now)?;
        self.entries.remove(&first);
        Some(first.1)
    }

    /// Has the sequence looked at by its deadline. An earlier entry stays.
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

    /// Replaces the sequence's entry by its deadline.
    pub(super) fn rearm(&mut self, active: &mut ActiveSequence) {
        self.disarm(active);
        self.arm(active);
    }
}
