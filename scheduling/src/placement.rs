//! Which of several workers a sequence goes to: pure. Who may serve it at all (model, bits, tokenizer, room) is the caller's to say.
//!
//! A sequence goes where a good part of its prefix is held, for that saves a prefill: so the turns of a conversation stay at one target. Then a
//! lane's sequences stay together, so that batches are homogeneous where that is free; then the least loaded is chosen. Affinities only choose
//! among workers whose load is about the least ("bounded loads", Mirrokni, Thorup and Zadimoghaddam, SODA 2018), and a prefix is worth some
//! sequences more: no affinity makes one worker the slow one.

use std::collections::{HashSet, VecDeque};

use speculation::TokenId;
use speculation::prefix::Prefix;

/// A worker may carry so much more than the least loaded one, as a part of its load, and still be chosen.
const SLACK: f64 = 1.0 / 8.0;

/// One worker that may serve the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<K> {
    /// Names it.
    pub key: K,
    /// Hard preference, lowest first: a higher one is taken only where no lower one is there.
    pub rank: u8,
    /// Sequences there.
    pub load: u32,
    /// Of these, the lane's own.
    pub lane_load: u32,
    /// How many ids of the sequence's prefix it was sent before.
    pub shared_prefix: u32,
}

/// Ids whose prefill costs about as many rows as one more sequence brings: what a worker may carry more for a prefix that it
/// holds is counted in them, and marks stand so far apart, or by an eighth of the prefix where that is more: a conversation is
/// told from others that begin alike once an eighth of it is its own. Shorter prefixes only choose among equals.
const IDS_OF_A_SEQUENCE: u32 = 128;

/// Sequences more than others that a worker may carry for a prefix, however long.
const EXTRA_MAX: u32 = 8;

/// The place for one more sequence.
pub fn choose<K: Ord + Copy>(places: &[Place<K>]) -> Option<K> {
    let rank = places.iter().map(|place| place.rank).min()?;
    let best = || places.iter().filter(|place| place.rank == rank);
    let least = best().map(|place| place.load).min()?;
    let most = least + ((f64::from(least) * SLACK) as u32).max(1);
    let saved = |place: &Place<K>| place.shared_prefix / IDS_OF_A_SEQUENCE;
    let better = |place: &&Place<K>| {
        let least_loaded = (std::cmp::Reverse(place.load), std::cmp::Reverse(place.key));
        (saved(place), place.lane_load, place.shared_prefix, least_loaded)
    };
    let may_serve = |place: &&Place<K>| place.load <= most + saved(place).min(EXTRA_MAX);
    best().filter(may_serve).max_by_key(better).map(|place| place.key)
}

/// The shortest prefix that is remembered.
const FIRST_MARK: usize = 32;

/// Prefixes that are remembered of one worker: some 750 conversations of 4,096 ids.
const MARKS_KEPT: usize = 16_384;

/// Lengths of prefixes that are remembered, ascending.
fn mark_lengths() -> impl Iterator<Item = usize> {
    let next = |len: &usize| len.checked_add((len / 8).max((IDS_OF_A_SEQUENCE as usize).min(*len)));
    std::iter::successors(Some(FIRST_MARK), next)
}

/// Names the prefixes of one prompt: the hash at each mark, mixed with the isolation key, under which alone they are shared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrefixMarks(Vec<u64>);

impl PrefixMarks {
    /// Those of `prompt`.
    pub fn of(prompt: &[TokenId], isolation_key: u64) -> Self {
        let prefix = Prefix::new(prompt);
        let lengths = mark_lengths().take_while(|len| *len <= prompt.len());
        let hashes = lengths.map_while(|len| prefix.hash_at(len as u32));
        Self(hashes.map(|hash| hash ^ isolation_key.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect())
    }
}

/// The prefixes that one worker was sent lately. What it still holds is its own business: this only guesses.
#[derive(Debug, Clone, Default)]
pub struct PrefixMemory {
    seen: HashSet<u64>,
    oldest: VecDeque<u64>,
}

impl PrefixMemory {
    /// The worker is sent a prompt.
    pub fn remember(&mut self, marks: &PrefixMarks) {
        for mark in &marks.0 {
            if self.seen.insert(*mark) {
                self.oldest.push_back(*mark);
            }
        }
        while self.oldest.len() > MARKS_KEPT {
            if let Some(mark) = self.oldest.pop_front() {
                self.seen.remove(&mark);
            }
        }
    }

    /// How many leading ids of the prompt it was sent before, as far as marks tell.
    pub fn shared(&self, marks: &PrefixMarks) -> u32 {
        // Of a prefix whose beginning was forgotten the rest may still be held.
        let last = marks.0.iter().rposition(|mark| self.seen.contains(mark));
        last.and_then(|last| mark_lengths().nth(last)).map_or(0, |len| len as u32)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place(key: u32, load: u32, lane_load: u32, shared_prefix: u32) -> Place<u32> {
        Place { key, rank: 0, load, lane_load, shared_prefix }
    }

    #[test]
    fn long_prefixes_win_then_lanes_then_short_prefixes_then_the_least_loaded() {
        for (places, expected, why) in [
            (vec![place(0, 8, 0, 0), place(1, 9, 2, 0)], 1, "its lane is there"),
            (vec![place(0, 8, 3, 64), place(1, 9, 3, 96)], 1, "its prefix is there"),
            (vec![place(0, 8, 5, 0), place(1, 9, 3, 96)], 0, "a short prefix is worth less than the lane"),
            (vec![place(0, 8, 5, 0), place(1, 9, 3, 256)], 1, "a long one is worth more"),
            (vec![place(0, 1, 1, 0), place(1, 4, 0, 256)], 1, "and two sequences more"),
            (vec![place(0, 1, 1, 0), place(1, 5, 0, 256)], 0, "but not three"),
            (vec![place(0, 0, 0, 0), place(1, 10, 9, 1 << 20)], 0, "nor any number"),
            (vec![place(0, 9, 3, 0), place(1, 8, 3, 0)], 1, "less loaded"),
            (vec![place(0, 8, 0, 0), place(1, 10, 9, 99)], 0, "an affinity must not overload"),
            (vec![place(0, 80, 0, 0), place(1, 90, 9, 0)], 1, "an eighth more is about the same"),
            (vec![place(0, 3, 0, 0), place(1, 3, 0, 0)], 0, "the first of equals"),
        ] {
            assert_eq!(choose(&places), Some(expected), "{why}");
        }
        let outranked = [Place { rank: 1, ..place(0, 0, 9, 0) }, place(1, 50, 0, 0)];
        assert_eq!(choose(&outranked), Some(1));
        assert_eq!(choose::<u32>(&[]), None);
    }

    #[test]
    fn two_lanes_part_two_workers_between_them() {
        let mut lanes = [[0_u32; 2]; 2];
        for i in 0..64 {
            let lane = i % 2;
            let places = [0, 1].map(|w| place(w as u32, lanes[0][w] + lanes[1][w], lanes[lane][w], 0));
            lanes[lane][choose(&places).unwrap() as usize] += 1;
        }
        assert_eq!(lanes, [[32, 0], [0, 32]]);
    }

    #[test]
    fn prefixes_are_told_by_ids_and_by_who_asks() {
        let prompt: Vec<TokenId> = (0..300).collect();
        let mut other = prompt.clone();
        other[100] = 7;
        let mut memory = PrefixMemory::default();
        memory.remember(&PrefixMarks::of(&prompt, 1));
        assert_eq!(memory.shared(&PrefixMarks::of(&prompt, 1)), 256);
        assert_eq!(memory.shared(&PrefixMarks::of(&other, 1)), 64);
        let longer: Vec<TokenId> = (0..2_000).map(|id| id % 1_000 + 300 * (id / 1_800)).collect();
        memory.remember(&PrefixMarks::of(&longer[..1_500], 1));
        assert_eq!(memory.shared(&PrefixMarks::of(&longer, 1)), 1_458, "to an eighth");
        assert_eq!(memory.shared(&PrefixMarks::of(&prompt[..31], 1)), 0);
        assert_eq!(memory.shared(&PrefixMarks::of(&prompt, 2)), 0, "another isolation key");
        for i in 0..MARKS_KEPT as u32 {
            memory.remember(&PrefixMarks::of(&[i + 10_000; FIRST_MARK], 1));
        }
        assert_eq!((memory.shared(&PrefixMarks::of(&prompt, 1)), memory.seen.len()), (0, MARKS_KEPT));
    }

    /// The turns of eight conversations that begin alike, on two workers; one ends wherever the dice say, and its next turn begins later.
    #[test]
    fn turns_of_a_conversation_stay_where_it_is() {
        const TURNS: usize = 400;
        let mut dice = 1_u64;
        let mut roll = |sides: u64| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) % sides
        };
        let mut memories = [PrefixMemory::default(), PrefixMemory::default()];
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
            let marks = PrefixMarks::of(&prompt, 1);
            let load = |worker| running.iter().filter(|at| **at == Some(worker)).count() as u32;
            let places = [0, 1].map(|worker| Place {
                shared_prefix: memories[worker].shared(&marks),
                ..place(worker as u32, load(worker), load(worker), 0)
            });
            let chosen = choose(&places).unwrap() as usize;
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

    proptest! {
        #[test]
        fn no_choice_overloads(loads in proptest::collection::vec((0u32..200, 0u32..200, 0u32..4_096), 1..20)) {
            let places: Vec<_> =
                loads.iter().enumerate().map(|(i, (load, lane, shared))| place(i as u32, *load, *lane, *shared)).collect();
            let chosen = choose(&places).unwrap() as usize;
            let least = loads.iter().map(|(load, ..)| *load).min().unwrap();
            prop_assert!(loads[chosen].0 <= least + (least / 8).max(1) + EXTRA_MAX.min(loads[chosen].2 / IDS_OF_A_SEQUENCE));
        }
    }
}
