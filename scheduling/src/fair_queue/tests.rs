//! Tests of turns by class, key and lane.

use proptest::prelude::*;

use super::*;

type Turns = FairQueue<u64, &'static str, u32>;

fn ticket(priority: u8, weight: f64, since_ms: u64) -> Ticket {
    let since = Duration::from_millis(since_ms);
    Ticket { priority, weight, cost: 1.0, arrived: since, since }
}

fn pop(turns: &mut Turns, now_ms: u64) -> Option<u32> {
    let item = turns.peek(Duration::from_millis(now_ms))?;
    turns.serve(item);
    Some(item)
}

fn drain(turns: &mut Turns, now_ms: u64) -> Vec<u32> {
    std::iter::from_fn(|| pop(turns, now_ms)).collect()
}

/// Numbers of turns that items with 0, 1 and 2 as their hundreds of thousands get among the next `count`.
fn shares(turns: &mut Turns, now_ms: u64, count: usize) -> [usize; 3] {
    let mut shares = [0; 3];
    for _ in 0..count {
        let item = pop(turns, now_ms).unwrap();
        shares[(item / GROUP) as usize] += 1;
    }
    shares
}

/// Items of a group: see [`shares`].
const GROUP: u32 = 100_000;

#[test]
fn lower_classes_go_first_and_each_in_order_of_arrival() {
    let mut turns = Turns::default();
    for (item, priority, since) in [(1, 5, 0), (2, 0, 3), (3, 5, 1), (4, 0, 2)] {
        turns.push(0, "a", ticket(priority, 1.0, since), item);
    }
    assert_eq!(turns.peek(Duration::ZERO), Some(4));
    assert_eq!(turns.len(), 4);
    let since = |ms| Duration::from_millis(ms);
    assert_eq!(turns.waiting(), BTreeMap::from([(0, (2, since(2))), (5, (2, since(0)))]));
    assert_eq!(drain(&mut turns, 10), [4, 2, 1, 3]);
    assert!(turns.is_empty());
}

#[test]
fn who_waited_long_enough_overtakes_a_lower_class() {
    let mut turns = Turns::default();
    turns.push(0, "a", ticket(3, 1.0, 0), 1);
    turns.push(0, "a", ticket(1, 1.0, 1_500), 2);
    assert_eq!(turns.peek(Duration::from_millis(1_999)), Some(2), "class 2 waits behind class 1");
    assert_eq!(turns.peek(Duration::from_millis(3_000)), Some(1));
}

#[test]
fn lanes_of_a_key_share_turns_by_weight_and_idling_earns_nothing() {
    let mut turns = Turns::default();
    for i in 0..300 {
        turns.push(0, "heavy", ticket(0, 2.0, i), i as u32);
        turns.push(0, "light", ticket(0, 1.0, i), GROUP + i as u32);
    }
    let [_, light, _] = shares(&mut turns, 300, 90);
    assert!((29..=31).contains(&light), "{light} of 90");
    // A lane that returns shares from now on and does not catch up.
    for i in 0..300 {
        turns.push(0, "late", ticket(0, 1.0, 300 + i), 2 * GROUP + i as u32);
    }
    let [_, _, late] = shares(&mut turns, 700, 80);
    assert!((19..=21).contains(&late), "{late} of 80");
}

#[test]
fn a_key_with_many_requests_many_lanes_or_a_heavy_lane_gets_no_more_turns() {
    let lanes = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let mut turns = Turns::default();
    for i in 0..400 {
        // Many requests, long before the others arrive; many lanes; a lane with a high weight.
        turns.push(7, "a", ticket(0, 1.0, 0), i);
        turns.push(8, lanes[i as usize % lanes.len()], ticket(0, 1.0, 500), GROUP + i);
        turns.push(9, "heavy", ticket(0, 50.0, 500), 2 * GROUP + i);
    }
    let shares_of = shares(&mut turns, 600, 300);
    assert!(shares_of.iter().all(|count| (99..=101).contains(count)), "{shares_of:?}");
    // A key that returns gets one of the next turns, regardless of the queue's length, and does not catch up.
    turns.push(10, "a", ticket(0, 1.0, 600), 3 * GROUP);
    let next: Vec<u32> = (0..4).filter_map(|_| pop(&mut turns, 600)).collect();
    assert!(next.contains(&(3 * GROUP)), "{next:?}");
}

#[test]
fn a_turn_without_use_costs_its_lane_nothing() {
    let mut turns = Turns::default();
    for item in [1, 2, 3] {
        turns.push(0, "a", ticket(0, 1.0, 0), item);
    }
    turns.push(0, "b", ticket(0, 1.0, 0), 10);
    assert_eq!(turns.peek(Duration::ZERO), Some(1));
    assert!(turns.remove(1) && !turns.remove(1));
    assert_eq!(drain(&mut turns, 0), [2, 10, 3]);
}

#[test]
fn who_is_passed_over_keeps_its_place_and_costs_nobody_a_turn() {
    let mut turns = Turns::default();
    for (key, lane, item) in [(1, "a", 10), (1, "a", 11), (1, "b", 12), (2, "a", 20), (2, "a", 21)] {
        turns.push(key, lane, ticket(0, 1.0, 0), item);
    }
    let now = Duration::ZERO;
    assert_eq!(turns.peek_beyond(now, &BTreeSet::from([10])), Some(11));
    assert_eq!(turns.peek_beyond(now, &BTreeSet::from([10, 11])), Some(12));
    assert_eq!(turns.peek_beyond(now, &BTreeSet::from([10, 11, 12])), Some(20));
    assert_eq!(turns.peek_beyond(now, &BTreeSet::from([10, 11, 12, 20, 21])), None);
    turns.serve(20);
    assert_eq!(drain(&mut turns, 0), [10, 12, 21, 11]);
}

#[test]
fn beyond_an_urgent_item_comes_the_most_urgent_one_of_any_key() {
    let mut turns = Turns::default();
    turns.push(1, "a", ticket(0, 1.0, 0), 10);
    turns.push(1, "a", ticket(9, 1.0, 0), 11);
    turns.push(2, "a", ticket(5, 1.0, 0), 20);
    assert_eq!(turns.peek_beyond(Duration::ZERO, &BTreeSet::from([10])), Some(20));
    assert_eq!(turns.peek_beyond(Duration::ZERO, &BTreeSet::from([10, 20])), Some(11));
}

proptest! {
    /// Every item gets a turn in bounded time, whatever arrives in lower classes of its own key or of others.
    #[test]
    fn nobody_starves(priority in 0u8..=255, rivals in 1u64..4, keys in 1u64..4, weight in 0.1f64..10.0) {
        let mut turns = Turns::default();
        turns.push(0, "patient", ticket(priority, 1.0, 0), 0);
        let mut waited = None;
        for second in 0..400_u64 {
            for rival in 0..rivals {
                let item = 1 + second * rivals + rival;
                turns.push(rival % keys, "rival", ticket(0, weight, second * 1_000 + rival), item as u32);
            }
            if pop(&mut turns, second * 1_000 + 500) == Some(0) {
                waited = Some(second);
                break;
            }
        }
        // The class is 0 after `priority` seconds; from then on its key and its lane get their shares.
        prop_assert!(waited.is_some_and(|waited| waited <= u64::from(priority) + 40), "{waited:?}");
    }
}

#[test]
fn the_newest_in_the_least_urgent_class_of_the_busiest_key_gives_way() {
    let mut turns = Turns::default();
    for (key, lane, priority, since, item) in
        [(1, "a", 0, 5, 1), (1, "a", 2, 1, 2), (1, "b", 2, 3, 3), (2, "a", 9, 9, 4)]
    {
        turns.push(key, lane, ticket(priority, 1.0, since), item);
    }
    assert_eq!([1, 2, 3].map(|key| turns.newest_of_busiest(key)), [None, Some(3), Some(3)]);
    turns.remove(3);
    assert_eq!([1, 2, 3].map(|key| turns.newest_of_busiest(key)), [None, None, Some(2)]);
    turns.remove(2);
    assert_eq!((turns.len(), turns.newest_of_busiest(3)), (2, None));
}

#[test]
fn an_item_that_returns_keeps_its_place_in_its_class_and_ages_anew() {
    let mut turns = Turns::default();
    let returned = |priority, since_ms| Ticket { arrived: Duration::ZERO, ..ticket(priority, 1.0, since_ms) };
    // It ran for 300 s.
    turns.push(0, "a", returned(255, 300_600), 1);
    turns.push(0, "a", ticket(0, 1.0, 300_500), 2);
    turns.push(0, "a", ticket(255, 1.0, 300_700), 3);
    assert_eq!(drain(&mut turns, 301_000), [2, 1, 3], "urgent ones first, then in order of arrival");
    turns.push(0, "a", ticket(0, 1.0, 299_000), 4);
    turns.push(0, "a", returned(0, 300_600), 5);
    assert_eq!(drain(&mut turns, 301_000), [5, 4]);
}

/// Every key waits with one item, and then every key sends another one.
#[test]
fn a_turn_among_many_keys_compares_the_lanes_of_one() {
    const KEYS: u32 = 10_000;
    let mut turns = Turns::default();
    for round in 0..2 {
        for key in 0..KEYS {
            turns.push(key.into(), "a", ticket(3, 1.0, 0), round * KEYS + key);
        }
        assert_eq!(drain(&mut turns, 500).len(), KEYS as usize);
    }
    turns.push(0, "a", ticket(0, 1.0, 500), 0);
    assert!(turns.num_compared <= 6 * KEYS as usize, "{} lanes compared", turns.num_compared);
    assert!(turns.keys.len() <= KEYS as usize + 1 && turns.keys.len() == turns.turns.len());
}

#[test]
fn a_key_is_forgotten_once_it_has_no_more_service_than_a_new_one() {
    let mut turns = Turns::default();
    for item in 0..=100 {
        turns.push(item.into(), "a", ticket(0, 1.0, 0), item);
    }
    for item in 0..100 {
        turns.serve(item);
    }
    assert_eq!(turns.keys.len(), 101, "each had a turn more than a new key, and an item waits");
    for item in 101..103 {
        turns.push(100, "a", ticket(0, 1.0, 0), item);
    }
    turns.serve(100);
    turns.serve(101);
    assert_eq!(turns.keys.len(), 1);
}

#[test]
fn an_empty_queue_remembers_no_key() {
    let mut turns = Turns::default();
    for item in 0..10_000 {
        turns.push(item.into(), "a", ticket(0, 1.0, 0), item);
        turns.serve(item);
        assert_eq!((turns.keys.len(), turns.turns.len()), (0, 0));
    }
}
