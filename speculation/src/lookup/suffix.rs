//! Copies what followed an earlier occurrence of the last ids of a sequence.
//!
//! Places are chained by a hash of the two ids before them, newest first. A place is followed as long as the
//! sequence continues as it does there; no other match can become longer meanwhile, because a match grows by
//! at most one id per new id. The chain is searched only when the sequence diverges, within fixed limits. So
//! an id costs amortised O(1) time and 8 bytes.

use super::{CheckedPrediction, LookupMatch, MAX_SEARCHED_POSITIONS, Match, common_suffix};
use crate::TokenId;

/// Maximum number of places kept; the newest ones are.
const WINDOW: usize = 1 << 15;

/// Number of places in the tables of a short sequence.
const SMALLEST_TABLE: usize = 64;

/// Maximum links followed by a search: bigrams with the same hash share a chain.
const MAX_CHAIN_LINKS: usize = 4 * MAX_SEARCHED_POSITIONS;

/// An index of a sequence's bigrams; see the module documentation. Every call takes the whole sequence as
/// `ids`.
#[derive(Debug, Clone)]
pub struct SuffixIndex {
    window: usize,
    /// Number of ids read so far.
    len: usize,
    /// By hash: the newest place after a bigram with that hash. 0: none, since the first bigram ends at place
    /// 2.
    heads: Vec<u32>,
    /// By place, modulo the table size: the previous place on its chain. Same length as `heads`, a power of
    /// two.
    earlier: Vec<u32>,
    current: Option<Match>,
}

impl SuffixIndex {
    /// Creates an index over a prompt.
    pub fn new(ids: &[TokenId]) -> Self {
        Self::with_window(ids, WINDOW)
    }

    fn with_window(ids: &[TokenId], window: usize) -> Self {
        let mut index = Self { window, len: 0, heads: Vec::new(), earlier: Vec::new(), current: None };
        let but_last = &ids[..ids.len().saturating_sub(1)];
        index.rebuild(but_last, ids.len().next_power_of_two().clamp(SMALLEST_TABLE, window));
        if !ids.is_empty() {
            index.read(ids);
        }
        index
    }

    /// Reads the ids added since the last call and calls `on_prediction` with the prediction for each.
    pub fn read_committed(&mut self, ids: &[TokenId], mut on_prediction: impl FnMut(CheckedPrediction)) {
        while self.len < ids.len() {
            if let Some(Match { next, match_len }) = self.current {
                on_prediction(CheckedPrediction { match_len, is_correct: ids[next] == ids[self.len] });
            }
            self.read(ids);
        }
    }

    /// At most `max_tokens` ids that followed the longest match of the last ids, which has at least two. A
    /// copy that reaches the end of the sequence repeats itself.
    pub fn find(&self, ids: &[TokenId], max_tokens: usize) -> Option<LookupMatch> {
        let Match { next, match_len } = self.current.filter(|_| max_tokens > 0)?;
        let token_ids = ids[next..self.len].iter().copied().cycle().take(max_tokens).collect();
        Some(LookupMatch { token_ids, match_len })
    }

    /// Reads the next id.
    fn read(&mut self, ids: &[TokenId]) {
        let at = self.len;
        self.current = match self.current {
            Some(Match { next, match_len }) if ids[next] == ids[at] => {
                Some(Match { next: next + 1, match_len: match_len.saturating_add(1) })
            }
            _ => self.search(&ids[..=at]),
        };
        self.insert(&ids[..=at]);
    }

    /// Finds the place after the longest match of the last ids, the newest among equally long ones.
    fn search(&self, ids: &[TokenId]) -> Option<Match> {
        let [.., a, b] = ids else { return None };
        let mut found: Option<Match> = None;
        let (mut at, mut num_places) = (self.heads[self.slot(*a, *b)] as usize, 0);
        for _ in 0..MAX_CHAIN_LINKS {
            if at == 0 || at + self.heads.len() <= ids.len() || num_places == MAX_SEARCHED_POSITIONS {
                break;
            }
            if ids[at - 2] == *a && ids[at - 1] == *b {
                num_places += 1;
                let match_len = common_suffix(&ids[..at], ids) as u32;
                if found.is_none_or(|longest| match_len > longest.match_len) {
                    found = Some(Match { next: at, match_len });
                }
            }
            at = self.earlier[at % self.earlier.len()] as usize;
        }
        found
    }

    /// Chains the place after the last id.
    fn insert(&mut self, ids: &[TokenId]) {
        self.len = ids.len();
        if self.heads.len() < self.window && self.len >= self.heads.len() {
            return self.rebuild(ids, 2 * self.heads.len());
        }
        self.chain(ids);
    }

    fn chain(&mut self, ids: &[TokenId]) {
        if let [.., a, b] = ids {
            let (slot, size) = (self.slot(*a, *b), self.earlier.len());
            self.earlier[ids.len() % size] = self.heads[slot];
            self.heads[slot] = ids.len() as u32;
        }
    }

    /// Chains all places again, in tables of the given size.
    fn rebuild(&mut self, ids: &[TokenId], size: usize) {
        self.heads = vec![0; size];
        self.earlier = vec![0; size];
        for len in (ids.len() + 1).saturating_sub(size)..=ids.len() {
            self.chain(&ids[..len]);
        }
        self.len = ids.len();
    }

    fn slot(&self, a: TokenId, b: TokenId) -> usize {
        let key = (u64::from(a) << 32 | u64::from(b)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (key >> 32) as usize % self.heads.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lookup::MAX_MATCH_LEN;

    /// The naive twin: the same rule, comparing every earlier place, newest first.
    struct Naive {
        window: usize,
        current: Option<Match>,
    }

    impl Naive {
        fn read(&mut self, ids: &[TokenId]) {
            let (last, before) = ids.split_last().unwrap();
            self.current = match self.current {
                Some(Match { next, match_len }) if before[next] == *last => {
                    Some(Match { next: next + 1, match_len: match_len + 1 })
                }
                _ => self.longest(ids),
            };
        }

        fn longest(&self, ids: &[TokenId]) -> Option<Match> {
            let len_at = |place: usize| {
                (0..place.min(MAX_MATCH_LEN))
                    .take_while(|i| ids[place - 1 - i] == ids[ids.len() - 1 - i])
                    .count()
            };
            let newest_first = (2..ids.len()).rev().filter(|place| place + self.window > ids.len());
            let matches = newest_first.map(|place| (place, len_at(place))).filter(|(_, len)| *len >= 2);
            let considered: Vec<_> = matches.take(MAX_SEARCHED_POSITIONS).collect();
            let longest = considered.iter().map(|(_, len)| *len).max()?;
            let (next, match_len) = considered.into_iter().find(|(_, len)| *len == longest)?;
            Some(Match { next, match_len: match_len as u32 })
        }

        fn find(&self, ids: &[TokenId], max_tokens: usize) -> Option<LookupMatch> {
            let Match { next, match_len } = self.current?;
            let mut copied = ids.to_vec();
            for i in 0..max_tokens {
                copied.push(copied[next + i]);
            }
            Some(LookupMatch { token_ids: copied.split_off(ids.len()), match_len })
        }
    }

    fn check((ids, prompt_len): (&[TokenId], usize), window: usize) {
        let mut index = SuffixIndex::with_window(&ids[..prompt_len], window);
        let mut naive = Naive { window, current: None };
        // No place is followed within a prompt.
        naive.current = naive.longest(&ids[..prompt_len]);
        for len in prompt_len..=ids.len() {
            let so_far = &ids[..len];
            if len > prompt_len {
                let expected = naive.find(&so_far[..len - 1], 1).map(|found| CheckedPrediction {
                    match_len: found.match_len,
                    is_correct: found.token_ids[0] == so_far[len - 1],
                });
                let mut told = None;
                index.read_committed(so_far, |expected| told = Some(expected));
                assert_eq!(told, expected, "{so_far:?}");
                naive.read(so_far);
            }
            assert_eq!(index.find(so_far, 9), naive.find(so_far, 9), "{so_far:?}");
        }
    }

    #[test]
    fn what_followed_the_longest_match_is_copied() {
        let found = |ids: &[TokenId], max_tokens| {
            SuffixIndex::new(ids).find(ids, max_tokens).map(|found| (found.token_ids, found.match_len))
        };
        assert_eq!(found(&[], 4), None);
        assert_eq!(found(&[7], 4), None);
        assert_eq!(found(&[7, 8, 9, 8], 4), None, "one id is no match");
        assert_eq!(found(&[7, 8, 9, 7, 8], 1), Some((vec![9], 2)));
        assert_eq!(found(&[7, 8, 9, 7, 8], 0), None);
        assert_eq!(found(&[1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1), Some((vec![4], 3)), "the longest");
        assert_eq!(found(&[1, 2, 4, 1, 2, 5, 1, 2], 1), Some((vec![5], 2)), "the newest of equals");
        assert_eq!(found(&[6, 6, 6], 4), Some((vec![6, 6, 6, 6], 2)), "a copy goes on with itself");
        assert_eq!(found(&[1, 2, 3, 1, 2, 3, 1, 2], 7), Some((vec![3, 1, 2, 3, 1, 2, 3], 5)));
    }

    #[test]
    fn a_place_is_followed_from_id_to_id_and_its_match_grows() {
        let file: Vec<TokenId> = (0..500).collect();
        let mut ids = file.clone();
        ids.extend([1_000, 1_001]);
        let mut index = SuffixIndex::new(&ids);
        let mut told = Vec::new();
        for &id in &file[100..250] {
            ids.push(id);
            index.read_committed(&ids, |expected| told.push(expected));
        }
        let right: Vec<_> =
            (2..150).map(|match_len| CheckedPrediction { match_len, is_correct: true }).collect();
        assert_eq!(told, right);
        assert_eq!(index.find(&ids, 3).unwrap().token_ids, [250, 251, 252]);
    }

    #[test]
    fn tables_grow_with_the_sequence_up_to_the_window() {
        let ids: Vec<TokenId> = (0..3 * WINDOW as TokenId).collect();
        let mut index = SuffixIndex::new(&ids[..10]);
        index.read_committed(&ids, |expected| panic!("nothing repeats: {expected:?}"));
        assert_eq!((index.heads.len(), index.earlier.len()), (WINDOW, WINDOW));
        let back_to = |place: usize| [&ids[..], &ids[place - 2..place]].concat();
        for (place, is_kept) in [(2 * WINDOW + 10, true), (2 * WINDOW - 10, false)] {
            let ids = back_to(place);
            let (mut index, mut whole) = (index.clone(), SuffixIndex::new(&ids));
            index.read_committed(&ids, |_| {});
            assert_eq!(index.find(&ids, 1).is_some(), is_kept, "{place}");
            assert_eq!(whole.find(&ids, 1), index.find(&ids, 1));
            whole.read_committed(&ids, |_| panic!("everything was read"));
        }
    }

    proptest! {
        #[test]
        fn the_index_finds_what_a_search_through_all_places_finds(
            (ids, prompt_len) in (2u32..40).prop_flat_map(|vocab| {
                (proptest::collection::vec(0..vocab, 1..300), 1usize..300)
            }),
            copies in proptest::collection::vec((0usize..300, 1usize..80), 0..6),
            window in prop_oneof![Just(64usize), Just(WINDOW)],
        ) {
            let mut ids = ids;
            for (from, len) in copies {
                let from = from % ids.len();
                let copied = ids[from..ids.len().min(from + len)].to_vec();
                ids.extend(copied);
            }
            check((&ids, prompt_len.min(ids.len())), window);
        }
    }
}
