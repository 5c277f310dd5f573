//! Whose turn it is among those that wait for the same thing: priority classes, aging so that nothing starves, and fair turns between lanes by
//! weight. Pure: time is passed in.
//!
//! A lower class goes first; who waited for [`AGING`] is taken for one class lower, so whatever its priority a sequence is in the first class
//! after 255 times that. Within a class lanes take turns by start-time fair queuing (Goyal, Vin, Cheng, SIGCOMM 1996): the lane that was served the
//! least for its weight is next, and one that had nothing waiting gains no credit by that. Within a lane and a class: first come, first served.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Waiting so long is worth one class of priority.
pub const AGING: Duration = Duration::from_secs(1);

/// What is waited with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ticket {
    /// Lower goes first.
    pub priority: u8,
    /// The lane's share of turns, relative to other lanes'; above 0.
    pub weight: f64,
    /// How much of what is waited for one turn takes; above 0.
    pub cost: f64,
    /// Since when it waits.
    pub since: Duration,
}

/// A queue of items of several lanes.
#[derive(Debug, Clone)]
pub struct FairQueue<L, T> {
    lanes: BTreeMap<L, Lane<T>>,
    /// What the lane served last had been served, for its weight.
    served: f64,
    len: usize,
}

#[derive(Debug, Clone)]
struct Lane<T> {
    /// What it was served, for its weight.
    served: f64,
    /// By priority, oldest first.
    classes: BTreeMap<u8, VecDeque<(Ticket, T)>>,
}

impl<L, T> Default for FairQueue<L, T> {
    fn default() -> Self {
        Self { lanes: BTreeMap::new(), served: 0.0, len: 0 }
    }
}

impl<L: Ord + Clone, T> FairQueue<L, T> {
    /// How many wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// For each priority, how many wait, and since when the first of them does.
    pub fn waiting(&self) -> BTreeMap<u8, (usize, Duration)> {
        let mut waiting: BTreeMap<u8, (usize, Duration)> = BTreeMap::new();
        for (priority, class) in self.lanes.values().flat_map(|lane| &lane.classes) {
            let Some((first, _)) = class.front() else { continue };
            let (count, since) = waiting.entry(*priority).or_insert((0, first.since));
            *count += class.len();
            *since = first.since.min(*since);
        }
        waiting
    }

    /// One more waits.
    pub fn push(&mut self, lane: L, ticket: Ticket, item: T) {
        let served = self.served;
        let is_owed = |lane: &Lane<T>| lane.served > served;
        self.lanes.retain(|_, lane| !lane.classes.is_empty() || is_owed(lane));
        let lane = self.lanes.entry(lane).or_insert_with(|| Lane { served, classes: BTreeMap::new() });
        if lane.classes.is_empty() {
            lane.served = lane.served.max(served);
        }
        let class = lane.classes.entry(ticket.priority).or_default();
        // Who comes back after a loss has waited before.
        let at = class.partition_point(|(waiting, _)| waiting.since <= ticket.since);
        class.insert(at, (ticket, item));
        self.len += 1;
    }

    /// Whose turn it is.
    pub fn peek(&self, now: Duration) -> Option<&T> {
        let (lane, priority) = self.next(now)?;
        self.lanes.get(&lane)?.classes.get(&priority)?.front().map(|(_, item)| item)
    }

    /// Takes who is next out of the queue. `is_served` is false where it had no use for its turn: its lane is not charged for it.
    pub fn pop(&mut self, now: Duration, is_served: bool) -> Option<T> {
        let (key, priority) = self.next(now)?;
        let lane = self.lanes.get_mut(&key)?;
        let class = lane.classes.get_mut(&priority)?;
        let (ticket, item) = class.pop_front()?;
        if class.is_empty() {
            lane.classes.remove(&priority);
        }
        if is_served {
            self.served = self.served.max(lane.served);
            lane.served += ticket.cost / ticket.weight;
        }
        self.len -= 1;
        Some(item)
    }

    fn next(&self, now: Duration) -> Option<(L, u8)> {
        /// Class after aging, the lane's share so far, and how long ago it came.
        type Rank = (u64, f64, Duration);
        let mut best: Option<(Rank, (&L, u8))> = None;
        for (key, lane) in &self.lanes {
            for (priority, class) in &lane.classes {
                let Some((ticket, _)) = class.front() else { continue };
                let aged = (now.saturating_sub(ticket.since).as_millis() / AGING.as_millis()) as u64;
                let rank = (u64::from(*priority).saturating_sub(aged), lane.served, ticket.since);
                if best.as_ref().is_none_or(|(least, _)| rank < *least) {
                    best = Some((rank, (key, *priority)));
                }
            }
        }
        best.map(|(_, (lane, priority))| (lane.clone(), priority))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ticket(priority: u8, weight: f64, since_ms: u64) -> Ticket {
        Ticket { priority, weight, cost: 1.0, since: Duration::from_millis(since_ms) }
    }

    fn drain(turns: &mut FairQueue<&'static str, u32>, now_ms: u64) -> Vec<u32> {
        std::iter::from_fn(|| turns.pop(Duration::from_millis(now_ms), true)).collect()
    }

    #[test]
    fn lower_classes_go_first_and_each_in_order_of_arrival() {
        let mut turns = FairQueue::default();
        for (item, priority, since) in [(1, 5, 0), (2, 0, 3), (3, 5, 1), (4, 0, 2)] {
            turns.push("a", ticket(priority, 1.0, since), item);
        }
        assert_eq!(turns.peek(Duration::ZERO), Some(&4));
        assert_eq!(turns.len(), 4);
        let since = |ms| Duration::from_millis(ms);
        assert_eq!(turns.waiting(), BTreeMap::from([(0, (2, since(2))), (5, (2, since(0)))]));
        assert_eq!(drain(&mut turns, 10), [4, 2, 1, 3]);
        assert!(turns.is_empty());
    }

    #[test]
    fn who_waited_long_enough_overtakes_a_lower_class() {
        let mut turns = FairQueue::default();
        turns.push("a", ticket(3, 1.0, 0), 1);
        turns.push("a", ticket(1, 1.0, 2_500), 2);
        assert_eq!(turns.peek(Duration::from_millis(1_999)), Some(&2), "class 2 waits behind class 1");
        assert_eq!(turns.peek(Duration::from_millis(3_000)), Some(&1));
    }

    #[test]
    fn lanes_share_turns_by_weight_and_idling_earns_nothing() {
        let mut turns = FairQueue::default();
        for i in 0..300 {
            turns.push("heavy", ticket(0, 2.0, i), 0);
            turns.push("light", ticket(0, 1.0, i), 1);
        }
        let first: Vec<u32> = (0..90).filter_map(|_| turns.pop(Duration::from_millis(300), true)).collect();
        let light = first.iter().filter(|lane| **lane == 1).count();
        assert!((29..=31).contains(&light), "{light} of 90");
        // A lane that comes back shares from now on: it does not catch up.
        for i in 0..300 {
            turns.push("late", ticket(0, 1.0, 300 + i), 2);
        }
        let next: Vec<u32> = (0..80).filter_map(|_| turns.pop(Duration::from_millis(700), true)).collect();
        let late = next.iter().filter(|lane| **lane == 2).count();
        assert!((19..=21).contains(&late), "{late} of 80");
    }

    #[test]
    fn a_turn_without_use_costs_its_lane_nothing() {
        let mut turns = FairQueue::default();
        for item in [1, 2, 3] {
            turns.push("a", ticket(0, 1.0, 0), item);
        }
        turns.push("b", ticket(0, 1.0, 0), 10);
        let now = Duration::ZERO;
        assert_eq!(turns.pop(now, false), Some(1));
        assert_eq!(turns.pop(now, true), Some(2));
        assert_eq!(turns.pop(now, true), Some(10));
    }

    proptest! {
        /// Against whatever keeps arriving in lower classes, everybody has a turn in bounded time.
        #[test]
        fn nobody_starves(priority in 0u8..=255, rivals in 1u64..4, weight in 0.1f64..10.0) {
            let mut turns = FairQueue::default();
            turns.push("patient", ticket(priority, 1.0, 0), 0_u32);
            let mut waited = None;
            for second in 0..400_u64 {
                for rival in 0..rivals {
                    turns.push("rival", ticket(0, weight, second * 1_000 + rival), 1);
                }
                if turns.pop(Duration::from_millis(second * 1_000 + 500), true) == Some(0) {
                    waited = Some(second);
                    break;
                }
            }
            // The class is 0 after `priority` seconds; from then on its lane has its share.
            prop_assert!(waited.is_some_and(|waited| waited <= u64::from(priority) + 12), "{waited:?}");
        }
    }
}
