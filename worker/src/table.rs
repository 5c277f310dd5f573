//! The sequences cached at a worker, by router and sequence id.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use speculation::SequenceId;
use speculation::cached_sequence::CachedSequence;

use crate::device::SentStep;
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
pub struct Held {
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
const MOST_OVER: usize = 4_096;

/// All sequences at this worker.
#[derive(Debug, Default)]
pub struct Table {
    held: HashMap<SequenceKey, Held>,
    uses: u64,
    /// Preempted epochs of the last [`MOST_OVER`] sequences.
    over: HashMap<SequenceKey, u32>,
    /// Oldest first.
    over_order: VecDeque<SequenceKey>,
}

impl Table {
    /// Returns the sequence; opens it with `open` if it is new.
    pub fn entry(&mut self, key: SequenceKey, open: impl FnOnce() -> Slot) -> &mut Held {
        self.uses += 1;
        let held = self.held.entry(key).or_insert_with(|| Held {
            slot: open(),
            cached: Some(CachedSequence::default()),
            waiting: VecDeque::new(),
            last_used: 0,
        });
        held.last_used = self.uses;
        held
    }

    /// Returns the sequence, if it is cached.
    pub fn get_mut(&mut self, key: &SequenceKey) -> Option<&mut Held> {
        self.held.get_mut(key)
    }

    /// Removes and returns the sequence.
    pub fn remove(&mut self, key: &SequenceKey) -> Option<Held> {
        self.held.remove(key)
    }

    /// Keys of a router's sequences.
    pub fn keys_of(&self, router: RouterId) -> Vec<SequenceKey> {
        self.held.keys().filter(|key| key.router == router).copied().collect()
    }

    /// Slots of all sequences.
    pub fn slots(&self) -> impl Iterator<Item = (SequenceKey, Slot)> {
        self.held.iter().map(|(key, held)| (*key, held.slot))
    }

    /// Returns the least recently used idle sequence with cached ids. Sequences of routers for which
    /// `is_first` is true come before all others.
    pub fn least_recently_used_idle(&mut self, is_first: impl Fn(RouterId) -> bool) -> Option<&mut Held> {
        self.held
            .iter_mut()
            .filter(|(_, held)| held.cached.as_ref().is_some_and(|cached| !cached.is_empty()))
            .min_by_key(|(key, held)| (!is_first(key.router), held.last_used))
            .map(|(_, held)| held)
    }

    /// Records that an epoch was preempted.
    pub fn remember_over(&mut self, key: SequenceKey, epoch: u32) {
        if self.over.insert(key, epoch).is_none() {
            self.over_order.push_back(key);
        }
        if self.over_order.len() > MOST_OVER
            && let Some(oldest) = self.over_order.pop_front()
        {
            self.over.remove(&oldest);
        }
    }

    /// Whether this epoch or a later one was preempted.
    pub fn is_over(&self, key: &SequenceKey, epoch: u32) -> bool {
        self.over.get(key).is_some_and(|over| epoch <= *over)
    }

    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}
