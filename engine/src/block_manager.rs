//! Which sequence holds which KV blocks: pure bookkeeping, no memory is touched here. A batch reserves all
//! that it needs or nothing, so that a forward that does not fit leaves no trace.

use std::collections::HashMap;

use crate::{EngineError, SlotId};

/// Tokens in a KV block. Attention merges key blocks of exactly this size in position order (docs/contract.md
/// C3), so this number is part of the numerics, not a tuning knob.
pub(crate) const BLOCK_SIZE: usize = 16;

/// The blocks of one sequence, in position order, and how many tokens they hold.
#[derive(Debug, Default)]
struct Sequence {
    block_table: Vec<u32>,
    len: u32,
}

/// Hands out blocks 0..total. Freed blocks are reused before fresh ones are touched.
#[derive(Debug)]
pub(crate) struct BlockManager {
    total: u32,
    high_water_mark: u32,
    freed: Vec<u32>,
    sequences: HashMap<SlotId, Sequence>,
    next_slot: u64,
}

impl BlockManager {
    pub(crate) fn new(total: u32) -> Self {
        Self { total, high_water_mark: 0, freed: Vec::new(), sequences: HashMap::new(), next_slot: 0 }
    }

    pub(crate) fn open(&mut self) -> SlotId {
        let slot = SlotId(self.next_slot);
        self.next_slot += 1;
        self.sequences.insert(slot, Sequence::default());
        slot
    }

    pub(crate) fn close(&mut self, slot: SlotId) {
        if let Some(sequence) = self.sequences.remove(&slot) {
            self.freed.extend(sequence.block_table);
        }
    }

    /// Forgets the tokens at and past `len` and frees the blocks that only they were in.
    pub(crate) fn truncate(&mut self, slot: SlotId, len: u32) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        if len < sequence.len {
            sequence.len = len;
            self.freed.extend(sequence.block_table.drain(blocks_for(len)..));
        }
    }

    /// Tokens held, or `None` where the slot is not open.
    pub(crate) fn len(&self, slot: SlotId) -> Option<u32> {
        self.sequences.get(&slot).map(|sequence| sequence.len)
    }

    /// Blocks of the sequence in position order; empty where the slot is not open.
    pub(crate) fn block_table(&self, slot: SlotId) -> &[u32] {
        self.sequences.get(&slot).map_or(&[], |sequence| &sequence.block_table)
    }

    /// Blocks that `new_tokens` more tokens would take.
    pub(crate) fn blocks_needed(&self, slot: SlotId, new_tokens: u32) -> u64 {
        let Some(sequence) = self.sequences.get(&slot) else { return 0 };
        let tokens = u64::from(sequence.len) + u64::from(new_tokens);
        tokens.div_ceil(BLOCK_SIZE as u64).saturating_sub(sequence.block_table.len() as u64)
    }

    pub(crate) fn free_blocks(&self) -> u64 {
        self.freed.len() as u64 + u64::from(self.total - self.high_water_mark)
    }

    pub(crate) fn total_blocks(&self) -> u64 {
        u64::from(self.total)
    }

    pub(crate) fn referenced_blocks(&self) -> u64 {
        self.total_blocks() - self.free_blocks()
    }

    /// How many blocks the KV memory must reach once `needed` more are taken; an error where there are not so
    /// many.
    pub(crate) fn high_water_mark_after(&self, needed: u64) -> Result<u32, EngineError> {
        let free = self.free_blocks();
        if needed > free {
            return Err(EngineError::OutOfKv { needed, free });
        }
        let fresh = needed.saturating_sub(self.freed.len() as u64);
        Ok(self.high_water_mark
            + u32::try_from(fresh).expect("fresh blocks are at most the free ones of a u32 total"))
    }

    /// Lengthens a sequence. The caller has made sure that there are blocks enough.
    pub(crate) fn append(&mut self, slot: SlotId, new_tokens: u32) {
        let needed = self.blocks_needed(slot, new_tokens);
        for _ in 0..needed {
            let block = self.take();
            if let Some(sequence) = self.sequences.get_mut(&slot) {
                sequence.block_table.push(block);
            }
        }
        if let Some(sequence) = self.sequences.get_mut(&slot) {
            sequence.len += new_tokens;
        }
    }

    fn take(&mut self) -> u32 {
        self.freed.pop().unwrap_or_else(|| {
            assert!(self.high_water_mark < self.total, "append was called without checking for free blocks");
            self.high_water_mark += 1;
            self.high_water_mark - 1
        })
    }
}

/// Blocks that hold `len` tokens.
pub(crate) fn blocks_for(len: u32) -> usize {
    (len as usize).div_ceil(BLOCK_SIZE)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Action {
        Open,
        Close(usize),
        Truncate(usize, u32),
        Append(usize, u32),
    }

    fn action() -> impl Strategy<Value = Action> {
        prop_oneof![
            Just(Action::Open),
            (0..8usize).prop_map(Action::Close),
            (0..8usize, 0..100u32).prop_map(|(i, len)| Action::Truncate(i, len)),
            (0..8usize, 1..60u32).prop_map(|(i, n)| Action::Append(i, n)),
        ]
    }

    /// No block is held twice, none is lost, and tables are exactly as long as lengths ask.
    fn check(manager: &BlockManager, slots: &[SlotId]) {
        let mut seen = HashSet::new();
        for &slot in slots {
            let table = manager.block_table(slot);
            assert_eq!(table.len(), blocks_for(manager.len(slot).unwrap()));
            for &block in table {
                assert!(block < manager.total && seen.insert(block), "block {block} is held twice");
            }
        }
        assert_eq!(seen.len() as u64, manager.referenced_blocks());
    }

    proptest! {
        #[test]
        fn blocks_are_neither_shared_nor_lost(actions in prop::collection::vec(action(), 1..80)) {
            let mut manager = BlockManager::new(20);
            let mut slots: Vec<SlotId> = Vec::new();
            for action in actions {
                match action {
                    Action::Open => slots.push(manager.open()),
                    Action::Close(i) if i < slots.len() => manager.close(slots.remove(i)),
                    Action::Truncate(i, len) if i < slots.len() => manager.truncate(slots[i], len),
                    Action::Append(i, n) if i < slots.len() => {
                        let needed = manager.blocks_needed(slots[i], n);
                        match manager.high_water_mark_after(needed) {
                            Ok(mark) => {
                                manager.append(slots[i], n);
                                prop_assert_eq!(mark, manager.high_water_mark);
                            }
                            Err(_) => prop_assert!(needed > manager.free_blocks()),
                        }
                    }
                    _ => {}
                }
                check(&manager, &slots);
            }
        }
    }

    #[test]
    fn closed_slots_are_unknown_and_never_reused() {
        let mut manager = BlockManager::new(4);
        let first = manager.open();
        manager.append(first, 17);
        assert_eq!(manager.free_blocks(), 2);
        manager.close(first);
        manager.close(first);
        assert_eq!(manager.free_blocks(), 4);
        assert_ne!(manager.open(), first);
        assert_eq!(manager.len(first), None);
    }
}
