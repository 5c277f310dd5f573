//! Choice among several workers for a sequence. Pure. The caller filters out workers that may not serve it
//! (model, numerics class, tokenizer, capacity).
//!
//! A sequence goes where a large part of its prefix is cached, because that saves a prefill; so the turns of
//! a conversation stay at one target. Next, a lane's sequences stay together, which makes batches homogeneous
//! at no cost. Then the least loaded worker is chosen. Affinities only choose among workers with nearly the
//! least load ("bounded loads", Mirrokni, Thorup and Zadimoghaddam, SODA 2018), and a prefix is worth a few
//! more sequences: no affinity overloads a worker.

use std::collections::{HashSet, VecDeque};

use speculation::prefix::Prefix;

/// Fraction by which a worker's load may exceed the least load and the worker still be chosen.
const LOAD_SLACK: f64 = 1.0 / 8.0;

/// One worker that may serve the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankedWorker<K> {
    /// Identifies the worker.
    pub(crate) key: K,
    /// Strict preference, lowest first: a higher rank is chosen only if no lower one exists.
    pub(crate) rank: u8,
    /// Number of sequences there.
    pub(crate) load: u32,
    /// Sequences of these in the lane.
    pub(crate) lane_load: u32,
    /// Number of ids of the sequence's prefix that it received before.
    pub(crate) shared_prefix: u32,
}

/// Ids whose prefill costs about as many rows as one more sequence adds. Unit of the extra load that a worker
/// may carry for a cached prefix, and the minimum distance of prefix marks; longer prefixes have a mark at
/// each further eighth of their length. So a conversation is distinguished from others with the same
/// beginning once it differs in an eighth of its length. Shorter prefixes only break ties.
const IDS_PER_SEQUENCE: u32 = 128;

/// Maximum number of extra sequences that a worker may carry for a prefix of any length.
const MAX_EXTRA_LOAD: u32 = 8;

/// Chooses the worker for one more sequence.
pub(crate) fn choose<K: Ord + Copy>(workers: &[RankedWorker<K>]) -> Option<K> {
    let rank = workers.iter().map(|worker| worker.rank).min()?;
    let best = || workers.iter().filter(|worker| worker.rank == rank);
    let least = best().map(|worker| worker.load).min()?;
    let most = least.saturating_add(((f64::from(least) * LOAD_SLACK) as u32).max(1));
    let saved = |worker: &RankedWorker<K>| worker.shared_prefix / IDS_PER_SEQUENCE;
    let better = |worker: &&RankedWorker<K>| {
        let least_loaded = (std::cmp::Reverse(worker.load), std::cmp::Reverse(worker.key));
        (saved(worker), worker.lane_load, worker.shared_prefix, least_loaded)
    };
    let may_serve =
        |worker: &&RankedWorker<K>| worker.load <= most.saturating_add(saved(worker).min(MAX_EXTRA_LOAD));
    best().filter(may_serve).max_by_key(better).map(|worker| worker.key)
}

/// Length of the shortest prefix that is remembered.
const FIRST_MARK: usize = 32;

/// Prefixes remembered per worker: about 750 conversations of 4,096 ids.
const MAX_MARKS: usize = 16_384;

/// Lengths of remembered prefixes, ascending.
fn mark_lengths() -> impl Iterator<Item = usize> {
    let next = |len: &usize| len.checked_add((len / 8).max((IDS_PER_SEQUENCE as usize).min(*len)));
    std::iter::successors(Some(FIRST_MARK), next)
}

/// Identifies the prefixes of a prompt: the hash at each mark, mixed with the isolation key. Prefixes are
/// shared only under the same isolation key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PrefixMarks(Vec<u64>);

impl PrefixMarks {
    /// Computes the marks of `prompt`.
    pub(crate) fn of(prompt: &Prefix, isolation_key: u64) -> Self {
        let hashes = mark_lengths().map_while(|len| prompt.hash_at(u32::try_from(len).ok()?));
        Self(hashes.map(|hash| hash ^ isolation_key.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect())
    }
}

/// Prefixes that one worker received recently. An estimate: the worker decides what it keeps cached.
#[derive(Debug, Clone, Default)]
pub(crate) struct RecentPrefixes {
    seen: HashSet<u64>,
    oldest: VecDeque<u64>,
}

impl RecentPrefixes {
    /// Records that the worker receives a prompt.
    pub(crate) fn remember(&mut self, marks: &PrefixMarks) {
        for mark in &marks.0 {
            if self.seen.insert(*mark) {
                self.oldest.push_back(*mark);
            }
        }
        while self.oldest.len() > MAX_MARKS {
            if let Some(mark) = self.oldest.pop_front() {
                self.seen.remove(&mark);
            }
        }
    }

    /// Number of leading ids of the prompt that the worker received before, rounded down to a mark.
    pub(crate) fn shared(&self, marks: &PrefixMarks) -> u32 {
        // A longer prefix may still be cached after the mark of its beginning was evicted.
        let last = marks.0.iter().rposition(|mark| self.seen.contains(mark));
        last.and_then(|last| mark_lengths().nth(last)).map_or(0, |len| len as u32)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use speculation::TokenId;

    use super::*;

    fn marks_of(prompt: &[TokenId], isolation_key: u64) -> PrefixMarks {
        PrefixMarks::of(&Prefix::new(prompt), isolation_key)
    }

    fn ranked(key: u32, load: u32, lane_load: u32, shared_prefix: u32) -> RankedWorker<u32> {
        RankedWorker { key, rank: 0, load, lane_load, shared_prefix }
    }

    #[test]
    fn long_prefixes_win_then_lanes_then_short_prefixes_then_the_least_loaded() {
        for (workers, expected, why) in [
            (vec![ranked(0, 8, 0, 0), ranked(1, 9, 2, 0)], 1, "more sequences of its lane run there"),
            (vec![ranked(0, 8, 3, 64), ranked(1, 9, 3, 96)], 1, "its prefix is cached there"),
            (vec![ranked(0, 8, 5, 0), ranked(1, 9, 3, 96)], 0, "a short prefix counts less than the lane"),
            (vec![ranked(0, 8, 5, 0), ranked(1, 9, 3, 256)], 1, "a long prefix counts more"),
            (vec![ranked(0, 1, 1, 0), ranked(1, 4, 0, 256)], 1, "a long prefix allows two extra sequences"),
            (vec![ranked(0, 1, 1, 0), ranked(1, 5, 0, 256)], 0, "but not three extra sequences"),
            (
                vec![ranked(0, 0, 0, 0), ranked(1, 10, 9, 1 << 20)],
                0,
                "no prefix allows an unlimited extra load",
            ),
            (vec![ranked(0, 9, 3, 0), ranked(1, 8, 3, 0)], 1, "less loaded"),
            (vec![ranked(0, 8, 0, 0), ranked(1, 10, 9, 99)], 0, "affinity must not overload a worker"),
            (vec![ranked(0, 80, 0, 0), ranked(1, 90, 9, 0)], 1, "an eighth more load counts as equal"),
            (vec![ranked(0, 3, 0, 0), ranked(1, 3, 0, 0)], 0, "the first of equal workers"),
        ] {
            assert_eq!(choose(&workers), Some(expected), "{why}");
        }
        let outranked = [RankedWorker { rank: 1, ..ranked(0, 0, 9, 0) }, ranked(1, 50, 0, 0)];
        assert_eq!(choose(&outranked), Some(1));
        assert_eq!(choose::<u32>(&[]), None);
    }

    #[test]
    fn two_lanes_part_two_workers_between_them() {
        let mut lanes = [[0_u32; 2]; 2];
        for i in 0..64 {
            let lane = i % 2;
            let workers = [0, 1].map(|w| ranked(w as u32, lanes[0][w] + lanes[1][w], lanes[lane][w], 0));
            lanes[lane][choose(&workers).unwrap() as usize] += 1;
        }
        assert_eq!(lanes, [[32, 0], [0, 32]]);
    }

    #[test]
    fn prefixes_are_told_by_ids_and_by_who_asks() {
        let prompt: Vec<TokenId> = (0..300).collect();
        let mut other = prompt.clone();
        other[100] = 7;
        let mut memory = RecentPrefixes::default();
        memory.remember(&marks_of(&prompt, 1));
        assert_eq!(memory.shared(&marks_of(&prompt, 1)), 256);
        assert_eq!(memory.shared(&marks_of(&other, 1)), 64);
        let longer: Vec<TokenId> = (0..2_000).map(|id| id % 1_000 + 300 * (id / 1_800)).collect();
        memory.remember(&marks_of(&longer[..1_500], 1));
        assert_eq!(
            memory.shared(&marks_of(&longer, 1)),
            1_458,
            "rounded down to a mark, at most an eighth less"
        );
        assert_eq!(memory.shared(&marks_of(&prompt[..31], 1)), 0);
        assert_eq!(memory.shared(&marks_of(&prompt, 2)), 0, "another isolation key");
        for i in 0..MAX_MARKS as u32 {
            memory.remember(&marks_of(&[i + 10_000; FIRST_MARK], 1));
        }
        assert_eq!((memory.shared(&marks_of(&prompt, 1)), memory.seen.len()), (0, MAX_MARKS));
    }

    /// Turns of eight conversations with the same beginning, on two workers. Turns end in random order, and
    /// the next turn of a conversation begins later.
    #[test]
    fn turns_of_a_conversation_stay_where_it_is() {
        const TURNS: usize = 400;
        let mut dice = 1_u64;
        let mut roll = |sides: u64| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) % sides
        };
        let mut memories = [RecentPrefixes::default(), RecentPrefixes::default()];
        let mut running: [Option<usize>; 8] = [None; 8];
        let mut homes: [Option<usize>; 8] = [None; 8];
        let mut lengths = [320_usize; 8];
        let (mut turns, mut stayed) = (0, 0);
        while turns < TURNS {
            let conversation = roll(8) as usize;
            if running[conversation].take().is_some() {
                continue;
            }
            let ids = |i: usize| if i < 96 { i as TokenId } else { (i * 8 + conversation) as TokenId };
            let prompt: Vec<TokenId> = (0..lengths[conversation]).map(ids).collect();
            lengths[conversation] = (lengths[conversation] + 64) % 4_000 + 64;
            let marks = marks_of(&prompt, 1);
            let load = |worker| running.iter().filter(|at| **at == Some(worker)).count() as u32;
            let workers = [0, 1].map(|worker| RankedWorker {
                shared_prefix: memories[worker].shared(&marks),
                ..ranked(worker as u32, load(worker), load(worker), 0)
            });
            let chosen = choose(&workers).unwrap() as usize;
            memories[chosen].remember(&marks);
            running[conversation] = Some(chosen);
            stayed += usize::from(homes[conversation].replace(chosen).is_none_or(|home| home == chosen));
            turns += 1;
        }
        assert!(stayed * 100 >= TURNS * 98, "only {stayed} of {TURNS} turns stayed");
        assert!(
            [0, 1].iter().all(|worker| homes.iter().filter(|home| **home == Some(*worker)).count() >= 2),
            "{homes:?}"
        );
    }

    /// The load of a target that claims to be very slow is the largest number.
    #[test]
    fn loads_may_be_any_number() {
        assert_eq!(choose(&[ranked(0, u32::MAX, 0, 0)]), Some(0));
        assert_eq!(choose(&[ranked(0, u32::MAX, 9, 4_096), ranked(1, u32::MAX - 1, 0, 0)]), Some(0));
    }

    proptest! {
        #[test]
        fn no_choice_overloads(loads in proptest::collection::vec((0u32..200, 0u32..200, 0u32..4_096), 1..20)) {
            let workers: Vec<_> =
                loads.iter().enumerate().map(|(i, (load, lane, shared))| ranked(i as u32, *load, *lane, *shared)).collect();
            let chosen = choose(&workers).unwrap() as usize;
            let least = loads.iter().map(|(load, ..)| *load).min().unwrap();
            prop_assert!(loads[chosen].0 <= least + (least / 8).max(1) + MAX_EXTRA_LOAD.min(loads[chosen].2 / IDS_PER_SEQUENCE));
        }
    }
}
