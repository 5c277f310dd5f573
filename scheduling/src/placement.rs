//! Which of several workers a sequence goes to: pure. Who may serve it at all (model, bits, tokenizer, room) is the caller's to say.
//!
//! A lane's sequences stay together, so that batches are homogeneous where that is free; then a sequence goes where its prefix is held, for that saves a
//! prefill; then to the least loaded. Both affinities only choose among workers whose load is about the least ("bounded loads", Mirrokni, Thorup
//! and Zadimoghaddam, SODA 2018): no affinity makes one worker the slow one.

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

/// The place for one more sequence.
pub fn choose<K: Ord + Copy>(places: &[Place<K>]) -> Option<K> {
    let rank = places.iter().map(|place| place.rank).min()?;
    let best = || places.iter().filter(|place| place.rank == rank);
    let least = best().map(|place| place.load).min()?;
    let most = least + ((f64::from(least) * SLACK) as u32).max(1);
    let better = |place: &&Place<K>| {
        (place.lane_load, place.shared_prefix, std::cmp::Reverse(place.load), std::cmp::Reverse(place.key))
    };
    best().filter(|place| place.load <= most).max_by_key(better).map(|place| place.key)
}

/// The shortest prefix that is remembered; each mark after it stands at twice the length.
const FIRST_MARK: usize = 32;

/// Prefixes that are remembered of one worker.
const MARKS_KEPT: usize = 8_192;

/// Names the prefixes of one prompt: the hash of its first 32, 64, 128 ... ids, mixed with the isolation key, under which alone they are shared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrefixMarks(Vec<u64>);

impl PrefixMarks {
    /// Those of `prompt`.
    pub fn of(prompt: &[TokenId], isolation_key: u64) -> Self {
        let prefix = Prefix::new(prompt);
        let lengths = std::iter::successors(Some(FIRST_MARK), |len| len.checked_mul(2));
        let hashes =
            lengths.take_while(|len| *len <= prompt.len()).map_while(|len| prefix.hash_at(len as u32));
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
        match marks.0.iter().take_while(|mark| self.seen.contains(mark)).count() {
            0 => 0,
            count => (FIRST_MARK << (count - 1)) as u32,
        }
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
    fn lanes_stay_together_then_prefixes_then_the_least_loaded_wins() {
        for (places, expected, why) in [
            (vec![place(0, 8, 0, 0), place(1, 9, 2, 0)], 1, "its lane is there"),
            (vec![place(0, 8, 3, 64), place(1, 9, 3, 512)], 1, "its prefix is there"),
            (vec![place(0, 9, 3, 0), place(1, 8, 3, 0)], 1, "less loaded"),
            (vec![place(0, 8, 0, 0), place(1, 10, 9, 999)], 0, "an affinity must not overload"),
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
        assert_eq!(memory.shared(&PrefixMarks::of(&prompt[..31], 1)), 0);
        assert_eq!(memory.shared(&PrefixMarks::of(&prompt, 2)), 0, "another isolation key");
        for i in 0..MARKS_KEPT as u32 {
            memory.remember(&PrefixMarks::of(&[i + 1_000; FIRST_MARK], 1));
        }
        assert_eq!((memory.shared(&PrefixMarks::of(&prompt, 1)), memory.seen.len()), (0, MARKS_KEPT));
    }

    proptest! {
        #[test]
        fn no_choice_overloads(loads in proptest::collection::vec((0u32..200, 0u32..200, 0u32..4_096), 1..20)) {
            let places: Vec<_> =
                loads.iter().enumerate().map(|(i, (load, lane, shared))| place(i as u32, *load, *lane, *shared)).collect();
            let chosen = choose(&places).unwrap() as usize;
            let least = loads.iter().map(|(load, ..)| *load).min().unwrap();
            prop_assert!(loads[chosen].0 <= least + (least / 8).max(1));
        }
    }
}
