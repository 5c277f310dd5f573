//! [`NumberedQueue`]: a fair queue of values. Each has a number, by which it can be taken out of turn.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{FairQueue, Ticket};

/// A fair queue of values from several keys, each key with one lane.
#[derive(Debug)]
pub struct NumberedQueue<T> {
    /// The values by number, and their order.
    items: BTreeMap<u64, T>,
    order: FairQueue<u64, (), u64>,
    /// Number of the next value.
    next_number: u64,
}

impl<T> Default for NumberedQueue<T> {
    fn default() -> Self {
        Self { items: BTreeMap::new(), order: FairQueue::default(), next_number: 0 }
    }
}

impl<T> NumberedQueue<T> {
    /// Number of queued values.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Number of queued values by priority, and when the first of them began to wait.
    pub fn waiting(&self) -> BTreeMap<u8, (usize, Duration)> {
        self.order.waiting()
    }

    /// Adds a value of a key. Returns its number.
    pub fn push(&mut self, key: u64, ticket: Ticket, item: T) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.order.push(key, (), ticket, number);
        self.items.insert(number, item);
        number
    }

    /// Returns the next value and its number.
    pub fn peek(&mut self, now: Duration) -> Option<(u64, &T)> {
        let number = self.order.peek(now)?;
        self.items.get(&number).map(|item| (number, item))
    }

    /// Removes a value that got its turn, and charges its key.
    pub fn serve(&mut self, number: u64) -> Option<T> {
        self.order.serve(number);
        self.items.remove(&number)
    }

    /// Removes a value without a turn, if it is still queued.
    pub fn remove(&mut self, number: u64) -> Option<T> {
        self.order.remove(number);
        self.items.remove(&number)
    }

    /// Removes the value that gives way to one more of `key` in a full queue
    /// ([`FairQueue::newest_of_busiest`]). So no key can keep others out of the queue.
    pub fn evict_for(&mut self, key: u64) -> Option<T> {
        let number = self.order.newest_of_busiest(key)?;
        self.remove(number)
    }
}
