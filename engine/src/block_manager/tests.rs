//! The block manager against a naive twin that records every sequence's ids and what was written where.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const TOTAL: u32 = 20;

#[derive(Debug, Clone)]
enum Action {
    Open,
    /// Forks the i-th sequence at this many tokens.
    Fork(usize, u32),
    Close(usize),
    Truncate(usize, u32),
    /// Appends this many tokens to the i-th sequence, after a call of `share_prefix` if the flag is set.
    Append(usize, u32, bool),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        2 => Just(Action::Open),
        1 => (0..8usize, 0..100u32).prop_map(|(i, len)| Action::Fork(i, len)),
        1 => (0..8usize).prop_map(Action::Close),
        2 => (0..8usize, 0..100u32).prop_map(|(i, len)| Action::Truncate(i, len)),
        6 => (0..8usize, 1..60u32, any::<bool>()).prop_map(|(i, n, share)| Action::Append(i, n, share)),
    ]
}

/// Expected state of one sequence.
#[derive(Debug)]
struct Twin {
    slot: SlotId,
    key: u64,
    ids: Vec<TokenId>,
}

/// What a token writes to its slot: all ids that its KV depends on.
type Written = Vec<TokenId>;

/// A manager, its twin, and a fake KV memory in which every token writes its prefix.
struct Harness {
    manager: BlockManager,
    sequences: Vec<Twin>,
    memory: HashMap<(u32, usize), Written>,
    opened: u64,
    has_forks: bool,
}

/// Generates texts from few words, so that prefixes are often equal; `salt` makes them diverge.
fn next_id(ids: &[TokenId], salt: u64) -> TokenId {
    match ids.len() {
        len if len < 40 => (len / 16) as TokenId,
        len => (len as u64 / 16 + salt % 3) as TokenId,
    }
}

impl Harness {
    fn new() -> Self {
        Self {
            manager: BlockManager::new(TOTAL),
            sequences: Vec::new(),
            memory: HashMap::new(),
            opened: 0,
            has_forks: false,
        }
    }

    fn run(&mut self, action: &Action) {
        match *action {
            Action::Open => {
                let slot = self.manager.open();
                self.sequences.push(Twin { slot, key: self.opened % 2, ids: Vec::new() });
                self.opened += 1;
            }
            Action::Fork(i, len) if i < self.sequences.len() => {
                let Twin { slot, key, ids } = &self.sequences[i];
                let forked = self.manager.fork(*slot, len);
                assert_eq!(forked.is_some(), len as usize <= ids.len());
                if let Some(slot) = forked {
                    let ids = ids[..len as usize].to_vec();
                    self.sequences.push(Twin { slot, key: *key, ids });
                    self.has_forks = true;
                }
            }
            Action::Close(i) if i < self.sequences.len() => {
                let twin = self.sequences.remove(i);
                self.manager.close(twin.slot);
                assert_eq!(self.manager.len(twin.slot), None);
            }
            Action::Truncate(i, len) if i < self.sequences.len() => {
                let twin = &mut self.sequences[i];
                twin.ids.truncate(len as usize);
                self.manager.truncate(twin.slot, len);
            }
            Action::Append(i, n, share) if i < self.sequences.len() => self.append(i, n, share),
            _ => {}
        }
        self.check();
    }

    fn append(&mut self, i: usize, n: u32, share: bool) {
        let Twin { slot, key, ids: held } = &mut self.sequences[i];
        let (slot, before) = (*slot, held.len());
        let mut text = held.clone();
        (0..n).for_each(|_| text.push(next_id(&text, slot.0)));
        if share {
            let found = self.manager.share_prefix(slot, *key, &text);
            assert!((found.len as usize) < text.len() && found.len as usize >= before);
            // Waiting must be for another open sequence, or it would never end: nothing is computed between
            // these actions, so the claimant is open.
            assert!(!found.wait || self.sequences.len() > 1);
            if found.wait {
                self.sequences[i].ids = text[..found.len as usize].to_vec();
                return;
            }
        }
        let held = self.manager.len(slot).unwrap() as usize;
        let new = &text[held..];
        let needed = self.manager.blocks_needed(slot, new.len() as u32);
        let Ok(mark) = self.manager.high_water_mark_after(needed) else {
            assert!(needed > self.manager.free_blocks());
            self.sequences[i].ids = text[..held].to_vec();
            return;
        };
        if let Some(BlockCopy { from, to }) = self.manager.append(slot, new) {
            for offset in 0..BLOCK_SIZE {
                if let Some(written) = self.memory.get(&(from, offset)).cloned() {
                    self.memory.insert((to, offset), written);
                }
            }
        }
        let table = self.manager.block_table(slot).to_vec();
        for position in held..text.len() {
            let block = table[position / BLOCK_SIZE];
            let (references, published) = self.manager.pool.state(block);
            assert!(references == 1 && !published, "block {block} is written while shared or published");
            assert!(block < mark, "block {block} is beyond the memory that was asked for");
            let mut written = vec![self.sequences[i].key as TokenId];
            written.extend(&text[..=position]);
            self.memory.insert((block, position % BLOCK_SIZE), written);
        }
        self.manager.publish(slot);
        self.sequences[i].ids = text;
    }

    fn check(&self) {
        self.manager.pool.check();
        let mut holders: HashMap<u32, u32> = HashMap::new();
        for Twin { slot, key, ids } in &self.sequences {
            let table = self.manager.block_table(*slot);
            assert_eq!(self.manager.len(*slot), Some(ids.len() as u32));
            assert_eq!(table.len(), blocks_for(ids.len() as u32));
            table.iter().for_each(|block| *holders.entry(*block).or_default() += 1);
            for position in 0..ids.len() {
                let written = &self.memory[&(table[position / BLOCK_SIZE], position % BLOCK_SIZE)];
                assert_eq!(written[0], *key as TokenId, "a block of another isolation key");
                assert_eq!(written[1..], ids[..=position], "position {position} holds another text");
            }
        }
        for (&block, &count) in &holders {
            let (references, published) = self.manager.pool.state(block);
            assert_eq!(references, count, "references of block {block}");
            // Forks share unpublished blocks too.
            assert!(count == 1 || published || self.has_forks, "block {block} is shared and not published");
        }
        assert_eq!(holders.len() as u64, self.manager.referenced_blocks());
        assert!(self.manager.claims.values().all(|slot| self.manager.sequences.contains_key(slot)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn every_sequence_reads_its_own_text_and_no_block_leaks(
        actions in prop::collection::vec(action(), 1..100)
    ) {
        let mut harness = Harness::new();
        for action in &actions {
            harness.run(action);
        }
        while !harness.sequences.is_empty() {
            harness.run(&Action::Close(0));
        }
        prop_assert_eq!(harness.manager.free_blocks(), u64::from(TOTAL));
        prop_assert!(harness.manager.claims.is_empty());
    }
}

fn filled(manager: &mut BlockManager, key: u64, ids: &[TokenId]) -> SlotId {
    let slot = manager.open();
    let found = manager.share_prefix(slot, key, ids);
    assert!(!found.wait);
    manager.append(slot, &ids[found.len as usize..]);
    manager.publish(slot);
    slot
}

#[test]
fn closed_slots_are_not_open_and_never_reused() {
    let mut manager = BlockManager::new(4);
    let first = manager.open();
    manager.append(first, &[1; 17]);
    assert_eq!(manager.free_blocks(), 2);
    manager.close(first);
    manager.close(first);
    assert_eq!(manager.free_blocks(), 4);
    assert_ne!(manager.open(), first);
    assert_eq!(manager.len(first), None);
}

#[test]
fn equal_prefixes_share_blocks_within_an_isolation_key() {
    let mut manager = BlockManager::new(100);
    let ids: Vec<TokenId> = (0..50).collect();
    filled(&mut manager, 1, &ids);
    let other = manager.open();
    let found = manager.share_prefix(other, 1, &ids);
    assert_eq!(found, PrefixMatch { len: 48, wait: false });
    assert_eq!(manager.referenced_blocks(), 4, "the second sequence has no private block yet");
    let other_key = manager.open();
    assert_eq!(manager.share_prefix(other_key, 2, &ids), PrefixMatch { len: 0, wait: false });
    let exact = manager.open();
    assert_eq!(manager.share_prefix(exact, 1, &ids[..48]).len, 32, "one id is left to compute");
}

#[test]
fn appending_inside_a_shared_block_copies_it_and_inside_a_private_one_unpublishes_it() {
    let mut manager = BlockManager::new(100);
    let ids: Vec<TokenId> = (0..40).collect();
    let (a, b) = (filled(&mut manager, 1, &ids), filled(&mut manager, 1, &ids));
    assert_eq!(manager.block_table(a)[..2], manager.block_table(b)[..2]);
    manager.truncate(a, 20);
    let shared = manager.block_table(a)[1];
    assert_eq!(manager.blocks_needed(a, 1), 1, "the copy");
    let copy = manager.append(a, &[7]).unwrap();
    assert_eq!((copy.from, copy.to), (shared, manager.block_table(a)[1]));
    assert_ne!(copy.to, shared);
    manager.truncate(b, 20);
    assert_eq!((manager.blocks_needed(b, 1), manager.append(b, &[8])), (0, None));
    assert_eq!(manager.block_table(b)[1], shared, "no other sequence references it any more");
    let late = manager.open();
    assert_eq!(manager.share_prefix(late, 1, &ids).len, 16, "an unpublished block is not found");
}

#[test]
fn a_copy_that_failed_is_undone() {
    let mut manager = BlockManager::new(100);
    let ids: Vec<TokenId> = (0..20).collect();
    let first = filled(&mut manager, 1, &ids);
    let second = manager.fork(first, 18).unwrap();
    let (tables, free) = (manager.block_table(first).to_vec(), manager.free_blocks());
    let copy = manager.append(second, &[7; 40]).unwrap();
    manager.undo_copy(second, copy);
    manager.truncate(second, 18);
    assert_eq!((manager.block_table(first), manager.block_table(second)), (&tables[..], &tables[..]));
    assert_eq!(manager.free_blocks(), free);
    manager.pool.check();
    assert!(manager.append(first, &[7]).is_some(), "the block is shared again");
}

#[test]
fn the_second_of_two_equal_prompts_waits_for_the_first() {
    let mut manager = BlockManager::new(100);
    let ids: Vec<TokenId> = (0..70).collect();
    let (first, second, third) = (manager.open(), manager.open(), manager.open());
    assert_eq!(manager.share_prefix(first, 1, &ids), PrefixMatch { len: 0, wait: false });
    assert_eq!(manager.share_prefix(second, 1, &ids), PrefixMatch { len: 0, wait: true });
    manager.append(first, &ids[..40]);
    manager.publish(first);
    assert_eq!(
        manager.share_prefix(second, 1, &ids),
        PrefixMatch { len: 32, wait: true },
        "and uses what is published"
    );
    assert_eq!(
        manager.share_prefix(third, 1, &ids[..40]),
        PrefixMatch { len: 32, wait: false },
        "all usable blocks are published"
    );
    manager.close(first);
    assert_eq!(
        manager.share_prefix(second, 1, &ids),
        PrefixMatch { len: 32, wait: false },
        "the first is closed"
    );
}

#[test]
fn cached_blocks_are_evicted_by_age_and_tails_first() {
    let mut manager = BlockManager::new(4);
    let ids: Vec<TokenId> = (0..64).collect();
    let slot = filled(&mut manager, 1, &ids[..64]);
    manager.close(slot);
    assert_eq!((manager.free_blocks(), manager.cached_blocks()), (4, 4));
    let other = manager.open();
    manager.append(other, &[9; 20]);
    assert_eq!((manager.cached_blocks(), manager.evicted_blocks()), (2, 2));
    let again = manager.open();
    assert_eq!(manager.share_prefix(again, 1, &ids).len, 32, "the head is still cached");
}

#[test]
fn a_sequence_with_inconsistent_ids_is_not_shared() {
    let mut manager = BlockManager::new(100);
    let ids: Vec<TokenId> = (0..40).collect();
    let inconsistent = filled(&mut manager, 1, &ids[..16]);
    let claimed: Vec<TokenId> = (100..140).collect();
    assert_eq!(manager.share_prefix(inconsistent, 1, &claimed), PrefixMatch { len: 16, wait: false });
    manager.append(inconsistent, &claimed[16..]);
    manager.publish(inconsistent);
    let other = manager.open();
    assert_eq!(manager.share_prefix(other, 1, &claimed).len, 0);
}

#[test]
fn nobody_waits_for_a_sequence_that_is_not_shared_any_more() {
    let mut manager = BlockManager::new(100);
    let ids: Vec<TokenId> = (0..40).collect();
    let (first, second) = (filled(&mut manager, 1, &ids[..16]), manager.open());
    assert_eq!(manager.share_prefix(first, 1, &ids), PrefixMatch { len: 16, wait: false });
    assert_eq!(manager.share_prefix(second, 1, &ids), PrefixMatch { len: 16, wait: true });
    manager.share_prefix(first, 2, &ids);
    assert_eq!(manager.share_prefix(second, 1, &ids), PrefixMatch { len: 16, wait: false });
}

#[test]
fn ids_after_unjudged_tree_rows_are_never_shared() {
    let mut manager = BlockManager::new(100);
    let ids: Vec<TokenId> = (0..60).collect();
    let slot = filled(&mut manager, 1, &ids[..20]);
    manager.append_rows(slot, 12);
    // The positions of the tree are those of other ids.
    assert_eq!(manager.share_prefix(slot, 1, &ids[..21]), PrefixMatch { len: 32, wait: false });
    manager.append(slot, &ids[20..60]);
    manager.publish(slot);
    let other = manager.open();
    assert_eq!(manager.share_prefix(other, 1, &ids), PrefixMatch { len: 16, wait: false });
}

#[test]
fn kv_that_nobody_wrote_is_never_shared() {
    let mut manager = BlockManager::new(100);
    let ids: Vec<TokenId> = (0..60).collect();
    let slot = manager.open_unwritten(40);
    assert_eq!((manager.len(slot), manager.referenced_blocks()), (Some(40), 3));
    assert_eq!(manager.share_prefix(slot, 1, &ids), PrefixMatch { len: 40, wait: false });
    assert_eq!(manager.append(slot, &ids[40..]), None);
    manager.publish(slot);
    let other = manager.open();
    assert_eq!(manager.share_prefix(other, 1, &ids), PrefixMatch { len: 0, wait: false });
    manager.close(slot);
    assert_eq!((manager.free_blocks(), manager.cached_blocks()), (100, 0));
    manager.pool.check();
}
