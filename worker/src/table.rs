//! The sequences that a worker holds, by router and sequence id.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use speculation::SequenceId;
use speculation::cached_sequence::CachedSequence;

use crate::device::SentStep;
use crate::task::Slot;

/// Names one router process; a restarted router has another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouterId(pub u64);

/// Names a sequence at a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceKey {
    /// The router that owns it.
    pub router: RouterId,
    /// Its name there.
    pub sequence: SequenceId,
}

/// One sequence at this worker.
#[derive(Debug)]
pub struct Held {
    /// Its KV.
    pub slot: Slot,
    /// What is held; with the task while a step runs.
    pub cached: Option<CachedSequence>,
    /// Steps that wait for the one that runs.
    pub waiting: VecDeque<(SentStep, Instant)>,
    /// Higher was used later.
    pub last_used: u64,
}

/// Preempted sequences that are remembered. A step of one that was forgotten is answered `need_context` instead of
/// dropped, which its router drops.
const MOST_OVER: usize = 4_096;

/// All of them.
#[derive(Debug, Default)]
pub struct Table {
    held: HashMap<SequenceKey, Held>,
    uses: u64,
    /// Epochs that were preempted, of the last [`MOST_OVER`] sequences.
    over: HashMap<SequenceKey, u32>,
    /// In the order in which they are forgotten.
    over_order: VecDeque<SequenceKey>,
}

impl Table {
    /// The sequence, opened by `open` if it is new.
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

    /// The sequence, if it is held.
    pub fn get_mut(&mut self, key: &SequenceKey) -> Option<&mut Held> {
        self.held.get_mut(key)
    }

    /// Takes the sequence out.
    pub fn remove(&mut self, key: &SequenceKey) -> Option<Held> {
        self.held.remove(key)
    }

    /// Sequences of one router.
    pub fn keys_of(&self, router: RouterId) -> Vec<SequenceKey> {
        self.held.keys().filter(|key| key.router == router).copied().collect()
    }

    /// The KV of every sequence.
    pub fn slots(&self) -> impl Iterator<Item = (SequenceKey, Slot)> {
        self.held.iter().map(|(key, held)| (*key, held.slot))
    }

    /// The idle sequence with something held that was used longest ago, one of a router that `is_first` says before all
    /// others.
    pub fn least_recently_used_idle(&mut self, is_first: impl Fn(RouterId) -> bool) -> Option<&mut Held> {
        self.held
            .iter_mut()
            .filter(|(_, held)| held.cached.as_ref().is_some_and(|cached| !cached.is_empty()))
            .min_by_key(|(key, held)| (!is_first(key.router), held.last_used))
            .map(|(_, held)| held)
    }

    /// Remembers that a epoch was preempted.
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

    /// Whether a epoch was preempted, or came before one that was.
    pub fn is_over(&self, key: &SequenceKey, epoch: u32) -> bool {
        self.over.get(key).is_some_and(|over| epoch <= *over)
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}
