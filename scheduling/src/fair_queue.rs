//! A fair queue: priority classes, aging against starvation, and fair turns between API keys and between the
//! lanes of a key. Pure: time is passed in.
//!
//! A lower class goes first. Each second of waiting is worth one class, in seconds of the clock, so an item
//! reaches the first class `priority` seconds after its wait began. Items that will reach it in the same
//! second are of one class. Within a class, keys take turns by start-time fair queuing (Goyal, Vin, Cheng,
//! SIGCOMM 1996): the key with the least service is next, an idle key gains no credit, and an empty queue ends
//! every lead. Within a key, its lanes take turns in the same way, by weight. So neither many requests nor
//! many lanes, which clients choose by task type, give a key more turns. Within a lane and a class the order
//! is first come, first served.
//!
//! A turn takes time in proportion to the lanes of one key, and to the logarithm of the number of keys.

mod numbered;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub use self::numbered::NumberedQueue;

/// Scheduling data of a queued item.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ticket {
    /// Lower goes first.
    pub priority: u8,
    /// The lane's share of its key's turns, relative to the key's other lanes; above 0.
    pub weight: f64,
    /// Cost of one turn, in units of the resource; above 0.
    pub cost: f64,
    /// When it first arrived: its place among items of its class.
    pub arrived: Duration,
    /// When its wait began; later than its arrival if it was served in between.
    pub since: Duration,
}

impl Ticket {
    /// The second in which the item reaches the first class; see [`second_of`].
    fn first_class_at(&self) -> u64 {
        second_of(self.since).saturating_add(u64::from(self.priority))
    }
}

/// The second of a time, from 1 on: 0 stands for items in the first class.
fn second_of(time: Duration) -> u64 {
    time.as_secs().saturating_add(1)
}

/// A queue of items, identified by `I`, from several keys, each with several lanes.
#[derive(Debug, Clone)]
pub struct FairQueue<K, L, I> {
    items: BTreeMap<I, Item<K, L>>,
    keys: BTreeMap<K, KeyQueue<L, I>>,
    /// All keys in the order of their turns.
    turns: BTreeMap<Turn, K>,
    /// Virtual time: the service of the latest served key at its turn.
    served: f64,
    /// Latest known time; see [`second_of`].
    now: u64,
    /// Number given to the next item or key.
    next_number: u64,
    /// Lanes that were compared.
    #[cfg(test)]
    num_compared: usize,
}

#[derive(Debug, Clone)]
struct Item<K, L> {
    key: K,
    lane: L,
    ticket: Ticket,
    number: u64,
}

#[derive(Debug, Clone)]
struct KeyQueue<L, I> {
    /// Service received.
    served: f64,
    lanes: BTreeMap<L, LaneQueue<I>>,
    /// Virtual time of the key's lanes.
    lanes_served: f64,
    turn: Turn,
}

#[derive(Debug, Clone)]
struct LaneQueue<I> {
    /// Service received, divided by the weight.
    served: f64,
    items: BTreeMap<ItemOrder, I>,
}

/// Place of a key among all keys. The order of the fields is the order of the turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    /// The second in which its first item reaches the first class; 0 if it has, and [`IDLE`] without items.
    at: u64,
    /// Bits of its service: numbers that are not negative have the order of their bits.
    served: u64,
    /// When its first item arrived.
    arrived: Duration,
    /// Distinguishes keys.
    number: u64,
}

/// [`Turn::at`] of a key without items. It is remembered while it has more service than the virtual time.
const IDLE: u64 = u64::MAX;

impl Turn {
    /// The first possible turn of a class.
    fn first(at: u64) -> Self {
        Self { at, served: 0, arrived: Duration::ZERO, number: 0 }
    }
}

/// Place of an item in its lane. The order of the fields is the order of the items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ItemOrder {
    /// See [`Turn::at`].
    at: u64,
    arrived: Duration,
    number: u64,
}

impl<I: Ord + Copy> LaneQueue<I> {
    /// Returns the first item that is not in `passed_over`, and its place, after items that reached the first
    /// class joined those there.
    fn first(&mut self, now: u64, passed_over: &BTreeSet<I>) -> Option<(ItemOrder, I)> {
        let next = ItemOrder { at: 1, arrived: Duration::ZERO, number: 0 };
        while let Some((&order, _)) = self.items.range(next..).next().filter(|(order, _)| order.at <= now) {
            let item = self.items.remove(&order).expect("the entry was just read");
            self.items.insert(ItemOrder { at: 0, ..order }, item);
        }
        let mut items = self.items.iter().map(|(order, item)| (*order, *item));
        items.find(|(_, item)| !passed_over.contains(item))
    }
}

impl<L, I> KeyQueue<L, I> {
    fn num_items(&self) -> usize {
        self.lanes.values().map(|lane| lane.items.len()).sum()
    }
}

impl<L, I: Ord + Copy> KeyQueue<L, I> {
    /// Returns the next item that is not in `passed_over`, and its place.
    fn first(&mut self, now: u64, passed_over: &BTreeSet<I>) -> Option<(ItemOrder, I)> {
        let lanes = self.lanes.values_mut().filter_map(|lane| {
            let (order, item) = lane.first(now, passed_over)?;
            Some(((order.at, lane.served.to_bits(), order), item))
        });
        let ((.., order), item) = lanes.min_by_key(|(rank, _)| *rank)?;
        Some((order, item))
    }
}

impl<K, L, I> Default for FairQueue<K, L, I> {
    fn default() -> Self {
        Self {
            items: BTreeMap::new(),
            keys: BTreeMap::new(),
            turns: BTreeMap::new(),
            served: 0.0,
            now: 0,
            next_number: 0,
            #[cfg(test)]
            num_compared: 0,
        }
    }
}

impl<K: Ord + Copy, L: Ord + Copy, I: Ord + Copy> FairQueue<K, L, I> {
    /// Number of queued items.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Number of queued items by priority, and when the first of them began to wait.
    pub fn waiting(&self) -> BTreeMap<u8, (usize, Duration)> {
        let mut waiting = BTreeMap::new();
        for Item { ticket, .. } in self.items.values() {
            let (count, since) = waiting.entry(ticket.priority).or_insert((0, ticket.since));
            *count += 1;
            *since = ticket.since.min(*since);
        }
        waiting
    }

    /// Adds an item, which must not be queued.
    pub fn push(&mut self, key: K, lane: L, ticket: Ticket, item: I) {
        self.now = self.now.max(second_of(ticket.since));
        let number = self.next_number;
        self.next_number += 1;
        let (served, turn) = (self.served, Turn { number, ..Turn::first(IDLE) });
        let key_queue = self.keys.entry(key).or_insert(KeyQueue {
            served,
            lanes: BTreeMap::new(),
            lanes_served: 0.0,
            turn,
        });
        if key_queue.turn.at == IDLE {
            key_queue.served = key_queue.served.max(served);
        }
        let lanes_served = key_queue.lanes_served;
        let lane_queue =
            key_queue.lanes.entry(lane).or_insert(LaneQueue { served: lanes_served, items: BTreeMap::new() });
        if lane_queue.items.is_empty() {
            lane_queue.served = lane_queue.served.max(lanes_served);
        }
        let order = ItemOrder { at: ticket.first_class_at(), arrived: ticket.arrived, number };
        lane_queue.items.insert(order, item);
        self.items.insert(item, Item { key, lane, ticket, number });
        self.update_turn(key);
    }

    /// Returns the next item.
    pub fn peek(&mut self, now: Duration) -> Option<I> {
        self.peek_beyond(now, &BTreeSet::new())
    }

    /// Returns the next item that is not in `passed_over`. These keep their places, and their keys and lanes
    /// keep their turns.
    pub fn peek_beyond(&mut self, now: Duration, passed_over: &BTreeSet<I>) -> Option<I> {
        self.advance(now);
        let mut next: Option<(Turn, I)> = None;
        for (turn, key) in &self.turns {
            // Passing over items makes no turn earlier, except among keys with the same service.
            if turn.at == IDLE || next.is_some_and(|(earliest, _)| earliest < *turn) {
                break;
            }
            let first = self.keys.get_mut(key).and_then(|key_queue| key_queue.first(self.now, passed_over));
            let Some((order, item)) = first else { continue };
            let turn = Turn { at: order.at, arrived: order.arrived, ..*turn };
            if next.is_none_or(|(earliest, _)| turn < earliest) {
                next = Some((turn, item));
            }
        }
        next.map(|(_, item)| item)
    }

    /// Moves the time on: keys whose first item reached the first class take their turns there.
    fn advance(&mut self, now: Duration) {
        self.now = self.now.max(second_of(now));
        while let Some((_, &key)) =
            self.turns.range(Turn::first(1)..).next().filter(|(turn, _)| turn.at <= self.now)
        {
            self.update_turn(key);
        }
    }

    /// Removes an item that got its turn, and charges its key and its lane.
    pub fn serve(&mut self, item: I) {
        self.take(item, true);
    }

    /// Removes an item without a turn. Returns whether it was queued.
    pub fn remove(&mut self, item: I) -> bool {
        self.take(item, false)
    }

    /// The item that gives way to one more of `key` in a full queue: the newest, in its least urgent class, of
    /// the key with the most items. `None` if `key` would then have more items than that one.
    pub fn newest_of_busiest(&self, key: K) -> Option<I> {
        let own_count = self.keys.get(&key).map_or(0, KeyQueue::num_items);
        let (&busiest, key_queue) = self.keys.iter().max_by_key(|(_, key_queue)| key_queue.num_items())?;
        if key_queue.num_items() <= own_count + 1 {
            return None;
        }
        let items = self.items.iter().filter(|(_, item)| item.key == busiest);
        let newest = items.max_by_key(|(_, item)| (item.ticket.priority, item.ticket.since, item.number));
        newest.map(|(item, _)| *item)
    }

    fn take(&mut self, item: I, is_served: bool) -> bool {
        let Some(Item { key, lane, ticket, number }) = self.items.remove(&item) else { return false };
        let Some(key_queue) = self.keys.get_mut(&key) else { return false };
        let Some(lane_queue) = key_queue.lanes.get_mut(&lane) else { return false };
        let order = ItemOrder { at: 0, arrived: ticket.arrived, number };
        if lane_queue.items.remove(&order).is_none() {
            lane_queue.items.remove(&ItemOrder { at: ticket.first_class_at(), ..order });
        }
        if is_served {
            key_queue.lanes_served = key_queue.lanes_served.max(lane_queue.served);
            lane_queue.served += ticket.cost / ticket.weight;
            self.served = self.served.max(key_queue.served);
            key_queue.served += ticket.cost;
        }
        let lanes_served = key_queue.lanes_served;
        key_queue.lanes.retain(|_, lane| !lane.items.is_empty() || lane.served > lanes_served);
        if self.items.is_empty() {
            // A busy period ends, and with it every lead.
            self.keys.clear();
            self.turns.clear();
        } else {
            self.update_turn(key);
            self.forget_idle();
        }
        true
    }

    /// Moves a key to its present place among the keys.
    fn update_turn(&mut self, key: K) {
        let Some(key_queue) = self.keys.get_mut(&key) else { return };
        self.turns.remove(&key_queue.turn);
        let first = key_queue.first(self.now, &BTreeSet::new());
        let (at, arrived) = first.map_or((IDLE, Duration::ZERO), |(order, _)| (order.at, order.arrived));
        key_queue.turn = Turn { at, served: key_queue.served.to_bits(), arrived, ..key_queue.turn };
        self.turns.insert(key_queue.turn, key);
        #[cfg(test)]
        (self.num_compared += key_queue.lanes.len());
    }

    /// Forgets keys without items that have no more service than a new key would start with.
    fn forget_idle(&mut self) {
        let served = self.served.to_bits();
        while let Some((&turn, _)) =
            self.turns.range(Turn::first(IDLE)..).next().filter(|(turn, _)| turn.served <= served)
        {
            if let Some(key) = self.turns.remove(&turn) {
                self.keys.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests;
