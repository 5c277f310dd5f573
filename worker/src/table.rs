//! The sequences cached at a worker, by router and sequence id.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use speculation::SequenceId;
use speculation::cached_sequence::CachedSequence;

use crate::step_loop::SentStep;
use crate::task::Slot;

/// Identifies a router process; a restarted router has a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouterId(pub u64);

/// Identifies a sequence at a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceKey {
    /// The router that owns the sequence.
    pub router: RouterId,
    /// The sequence's id at that router.
    pub sequence: SequenceId,
}

/// One sequence at this worker.
#[derive(Debug)]
pub struct TableEntry {
    /// Its KV.
    pub slot: Slot,
    /// The cached sequence; `None` while a step runs, because the task owns it.
    pub cached: Option<CachedSequence>,
    /// Steps queued behind the running one, with their arrival times.
    pub waiting: VecDeque<(SentStep, Instant)>,
    /// Counter of the last use; higher is more recent.
    pub last_used: u64,
}

/// Maximum number of preempted sequences to remember. A late step of a forgotten one is answered with
/// `need_context` instead of being dropped; its router ignores that reply.
const MAX_PREEMPTED: usize = 4_096;

/// All sequences at this worker.
#[derive(Debug, Default)]
pub struct SequenceTable {
    entries: HashMap<SequenceKey, TableEntry>,
    uses: u64,
    /// Preempted epochs of the last [`MAX_PREEMPTED`] sequences.
    preempted: HashMap<SequenceKey, u32>,
    /// Oldest first.
    preempted_order: VecDeque<SequenceKey>,
}

impl SequenceTable {
    /// Returns the sequence; opens it with `open` if it is new.
    pub fn entry(&mut self, key: SequenceKey, open: impl FnOnce() -> Slot) -> &mut TableEntry {
        self.uses += 1;
        let entry = self.entries.entry(key).or_insert_with(|| TableEntry {
            slot: open(),
            cached: Some(CachedSequence::default()),
            waiting: VecDeque::new(),
            last_used: 0,
        });
        entry.last_used = self.uses;
        entry
    }

    /// Returns the sequence, if it is cached.
    pub fn get_mut(&mut self, key: &SequenceKey) -> Option<&mut TableEntry> {
        self.entries.get_mut(key)
    }

    /// Removes and returns the sequence.
    pub fn remove(&mut self, key: &SequenceKey) -> Option<TableEntry> {
        self.entries.remove(key)
    }

    /// Keys of a router's sequences.
    pub fn keys_of(&self, router: RouterId) -> Vec<SequenceKey> {
        self.entries.keys().filter(|key| key.router == router).copied().collect()
    }

    /// Slots of all sequences.
    pub fn slots(&self) -> impl Iterator<Item = (SequenceKey, Slot)> {
        self.entries.iter().map(|(key, entry)| (*key, entry.slot))
    }

    /// Returns the least recently used idle sequence with cached ids. Sequences of routers for which
    /// `is_first` is true come before all others.
    pub fn least_recently_used_idle(
        &mut self,
        is_first: impl Fn(RouterId) -> bool,
    ) -> Option<&mut TableEntry> {
        self.entries
            .iter_mut()
            .filter(|(_, entry)| entry.cached.as_ref().is_some_and(|cached| !cached.is_empty()))
            .min_by_key(|(key, entry)| (!is_first(key.router), entry.last_used))
            .map(|(_, entry)| entry)
    }

    /// Records that an epoch was preempted.
    pub fn record_preempted(&mut self, key: SequenceKey, epoch: u32) {
        if self.preempted.insert(key, epoch).is_none() {
            self.preempted_order.push_back(key);
        }
        if self.preempted_order.len() > MAX_PREEMPTED
            && let Some(oldest) = self.preempted_order.pop_front()
        {
            self.preempted.remove(&oldest);
        }
    }

    /// Whether this epoch or a later one was preempted.
    pub fn is_preempted(&self, key: &SequenceKey, epoch: u32) -> bool {
        self.preempted.get(key).is_some_and(|preempted| epoch <= *preempted)
    }

    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}
