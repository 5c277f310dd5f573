//! A fair queue: priority classes, aging against starvation, and fair turns between API keys and between the
//! lanes of a key. Pure: time is passed in.
//!
//! A lower class goes first. After each second of waiting an item counts as one class lower, so any item
//! reaches the first class after at most 255 seconds. Within a class, keys take turns by start-time fair
//! queuing (Goyal, Vin, Cheng, SIGCOMM 1996): the key with the least service is next, and an idle key gains
//! no credit. Within a key, its lanes take turns in the same way, by weight. So neither many requests nor
//! many lanes, which clients choose by task type, give a key more turns. Within a lane and a class the order
//! is first come, first served.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Scheduling data of a queued item.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ticket {
    /// Lower goes first.
    pub priority: u8,
    /// The lane's share of its key's turns, relative to the key's other lanes; above 0.
    pub weight: f64,
    /// Cost of one turn, in units of the resource; above 0.
    pub cost: f64,
    /// When its wait began.
    pub since: Duration,
}

/// A queue of items from several keys, each with several lanes.
#[derive(Debug, Clone)]
pub struct FairQueue<K, L, T> {
    keys: Shares<K, Shares<L, Lane<T>>>,
    len: usize,
}

/// Shares of a resource, and the virtual time: the service of the latest served share at its turn.
#[derive(Debug, Clone)]
struct Shares<N, Q> {
    shares: BTreeMap<N, Share<Q>>,
    served: f64,
}

#[derive(Debug, Clone)]
struct Share<Q> {
    /// Service received, divided by the weight.
    served: f64,
    queue: Q,
}

/// By priority, oldest first.
#[derive(Debug, Clone)]
struct Lane<T>(BTreeMap<u8, VecDeque<(Ticket, T)>>);

/// A queue that can be empty.
trait Queue {
    fn is_empty(&self) -> bool;
}

impl<T> Queue for Lane<T> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<N, Q: Queue> Queue for Shares<N, Q> {
    fn is_empty(&self) -> bool {
        self.shares.values().all(|share| share.queue.is_empty())
    }
}

impl<T> Default for Lane<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<N, Q> Default for Shares<N, Q> {
    fn default() -> Self {
        Self { shares: BTreeMap::new(), served: 0.0 }
    }
}

impl<N: Ord + Clone, Q: Queue + Default> Shares<N, Q> {
    /// Returns the queue of `name`, which is about to get an item.
    fn join(&mut self, name: N) -> &mut Q {
        let served = self.served;
        self.shares.retain(|_, share| !share.queue.is_empty() || share.served > served);
        let share = self.shares.entry(name).or_insert_with(|| Share { served, queue: Q::default() });
        if share.queue.is_empty() {
            share.served = share.served.max(served);
        }
        &mut share.queue
    }

    /// Charges `name` for a turn; `cost` is already divided by the weight, if there is one.
    fn charge(&mut self, name: &N, cost: f64) {
        if let Some(share) = self.shares.get_mut(name) {
            self.served = self.served.max(share.served);
            share.served += cost;
        }
    }
}

impl<K, L, T> Default for FairQueue<K, L, T> {
    fn default() -> Self {
        Self { keys: Shares::default(), len: 0 }
    }
}

impl<K: Ord + Clone, L: Ord + Clone, T> FairQueue<K, L, T> {
    /// Number of queued items.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of queued items by priority, and when the first of them began to wait.
    pub fn waiting(&self) -> BTreeMap<u8, (usize, Duration)> {
        let mut waiting: BTreeMap<u8, (usize, Duration)> = BTreeMap::new();
        let lanes = self.keys.shares.values().flat_map(|key| key.queue.shares.values());
        for (priority, class) in lanes.flat_map(|lane| &lane.queue.0) {
            let Some((first, _)) = class.front() else { continue };
            let (count, since) = waiting.entry(*priority).or_insert((0, first.since));
            *count += class.len();
            *since = first.since.min(*since);
        }
        waiting
    }

    /// Adds an item.
    pub fn push(&mut self, key: K, lane: L, ticket: Ticket, item: T) {
        let class = self.keys.join(key).join(lane).0.entry(ticket.priority).or_default();
        // An item that returns after a loss keeps its earlier start of waiting.
        let at = class.partition_point(|(waiting, _)| waiting.since <= ticket.since);
        class.insert(at, (ticket, item));
        self.len += 1;
    }

    /// Returns the next item.
    pub fn peek(&self, now: Duration) -> Option<&T> {
        let (key, lane, priority) = self.next(now)?;
        let lane = self.keys.shares.get(&key)?.queue.shares.get(&lane)?;
        lane.queue.0.get(&priority)?.front().map(|(_, item)| item)
    }

    /// Removes the next item. `is_served` is false if it could not use its turn; its key and lane are then
    /// not charged.
    pub fn pop(&mut self, now: Duration, is_served: bool) -> Option<T> {
        let (key, lane, priority) = self.next(now)?;
        let lanes = &mut self.keys.shares.get_mut(&key)?.queue;
        let classes = &mut lanes.shares.get_mut(&lane)?.queue.0;
        let class = classes.get_mut(&priority)?;
        let (ticket, item) = class.pop_front()?;
        if class.is_empty() {
            classes.remove(&priority);
        }
        if is_served {
            lanes.charge(&lane, ticket.cost / ticket.weight);
            self.keys.charge(&key, ticket.cost);
        }
        self.len -= 1;
        Some(item)
    }

    /// Removes the newest item of `key` in the least urgent class, without a turn.
    pub fn pop_newest(&mut self, key: &K) -> Option<T> {
        let lanes = &mut self.keys.shares.get_mut(key)?.queue.shares;
        let last = |share: &Share<Lane<T>>| {
            let (priority, class) = share.queue.0.last_key_value()?;
            Some((*priority, class.back()?.0.since))
        };
        let lane = lanes.values_mut().max_by_key(|share| last(share))?;
        let (&priority, class) = lane.queue.0.iter_mut().next_back()?;
        let (_, item) = class.pop_back()?;
        if class.is_empty() {
            lane.queue.0.remove(&priority);
        }
        self.len -= 1;
        Some(item)
    }

    fn next(&self, now: Duration) -> Option<(K, L, u8)> {
        /// Class after aging, the key's service so far, the lane's, and when its wait began.
        type Rank = (u64, f64, f64, Duration);
        let mut best: Option<(Rank, (&K, &L, u8))> = None;
        for (key, lanes) in &self.keys.shares {
            for (lane, share) in &lanes.queue.shares {
                for (priority, class) in &share.queue.0 {
                    let Some((ticket, _)) = class.front() else { continue };
                    let aged = now.saturating_sub(ticket.since).as_secs();
                    let class = u64::from(*priority).saturating_sub(aged);
                    let rank = (class, lanes.served, share.served, ticket.since);
                    if best.as_ref().is_none_or(|(least, _)| rank < *least) {
                        best = Some((rank, (key, lane, *priority)));
                    }
                }
            }
        }
        best.map(|(_, (key, lane, priority))| (key.clone(), lane.clone(), priority))
    }
}

#[cfg(test)]
mod tests;
