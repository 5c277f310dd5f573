//! The sequences that a worker holds, by router and sequence id.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use speculation::holding::Holding;
use speculation::{SequenceId, Step};

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
    pub holding: Option<Holding>,
    /// Steps that wait for the one that runs.
    pub waiting: VecDeque<(Step, Instant)>,
    /// The generation that was closed while its step ran: the sequence goes when the step is done.
    pub closing: Option<u32>,
    /// Higher was used later.
    pub last_used: u64,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Table {
    held: HashMap<SequenceKey, Held>,
    uses: u64,
}

impl Table {
    /// The sequence, opened by `open` if it is new.
    pub fn entry(&mut self, key: SequenceKey, open: impl FnOnce() -> Slot) -> &mut Held {
        self.uses += 1;
        let held = self.held.entry(key).or_insert_with(|| Held {
            slot: open(),
            holding: Some(Holding::default()),
            waiting: VecDeque::new(),
            closing: None,
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

    /// The idle sequence with something held that was used longest ago.
    pub fn least_recently_used_idle(&mut self) -> Option<&mut Held> {
        self.held
            .values_mut()
            .filter(|held| held.holding.as_ref().is_some_and(|holding| !holding.is_empty()))
            .min_by_key(|held| held.last_used)
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
