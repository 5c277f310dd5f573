//! The pool of KV blocks. A block is referenced by sequences, free, or cached: published and not referenced.
//! Allocation takes freed blocks first, then blocks that were never used, then evicts cached blocks, the
//! least recently released first.

use std::collections::{BTreeMap, HashMap};

use super::block_hash::BlockHash;

/// A block that was used at least once.
#[derive(Debug, Default)]
struct Block {
    /// Number of sequences that reference it.
    references: u32,
    published: Option<BlockHash>,
    /// Release time; key in `cached` if the block is cached.
    released_at: u64,
}

#[derive(Debug)]
pub(super) struct BlockPool {
    total: u32,
    /// Blocks that were used at least once; the KV memory must hold this many.
    blocks: Vec<Block>,
    freed: Vec<u32>,
    /// Published blocks that no sequence references, by release time.
    cached: BTreeMap<u64, u32>,
    index: HashMap<BlockHash, u32>,
    clock: u64,
    num_evicted: u64,
}

impl BlockPool {
    pub(super) fn new(total: u32) -> Self {
        Self {
            total,
            blocks: Vec::new(),
            freed: Vec::new(),
            cached: BTreeMap::new(),
            index: HashMap::new(),
            clock: 0,
            num_evicted: 0,
        }
    }

    pub(super) fn total(&self) -> u64 {
        u64::from(self.total)
    }

    /// Number of blocks that can be allocated.
    pub(super) fn available(&self) -> u64 {
        self.freed.len() as u64 + self.num_unused() + self.num_cached()
    }

    pub(super) fn num_cached(&self) -> u64 {
        self.cached.len() as u64
    }

    pub(super) fn num_evicted(&self) -> u64 {
        self.num_evicted
    }

    /// Number of blocks that will have been used once `needed` more are allocated; `needed` must be
    /// available.
    pub(super) fn high_water_mark_after(&self, needed: u64) -> u32 {
        let newly_used = needed.saturating_sub(self.freed.len() as u64).min(self.num_unused());
        let mark = self.blocks.len() as u64 + newly_used;
        u32::try_from(mark).expect("unused blocks are part of a u32 total")
    }

    /// Allocates a block for the caller to write; its reference count is 1.
    pub(super) fn allocate(&mut self) -> u32 {
        let block = match self.freed.pop() {
            Some(block) => block,
            None if self.num_unused() > 0 => {
                self.blocks.push(Block::default());
                self.blocks.len() as u32 - 1
            }
            None => self.evict(),
        };
        self.blocks[block as usize].references = 1;
        block
    }

    /// Evicts the cached block that was released first.
    fn evict(&mut self) -> u32 {
        let (_, block) = self.cached.pop_first().expect("append was called without checking for free blocks");
        self.num_evicted += 1;
        self.unpublish(block);
        block
    }

    /// Removes one reference.
    pub(super) fn release(&mut self, block: u32) {
        let state = &mut self.blocks[block as usize];
        state.references -= 1;
        if state.references > 0 {
            return;
        }
        if state.published.is_some() {
            self.clock += 1;
            state.released_at = self.clock;
            self.cached.insert(self.clock, block);
        } else {
            self.freed.push(block);
        }
    }

    /// Adds a reference to a block that is referenced.
    pub(super) fn add_reference(&mut self, block: u32) {
        self.blocks[block as usize].references += 1;
    }

    /// Finds a published block and adds a reference to it.
    pub(super) fn reference_published(&mut self, hash: &BlockHash) -> Option<u32> {
        let block = *self.index.get(hash)?;
        let state = &mut self.blocks[block as usize];
        if state.references == 0 {
            self.cached.remove(&state.released_at);
        }
        state.references += 1;
        Some(block)
    }

    /// Publishes a block that its only owner has filled. No block may be published under this hash yet.
    pub(super) fn publish(&mut self, block: u32, hash: BlockHash) {
        self.blocks[block as usize].published = Some(hash);
        self.index.insert(hash, block);
    }

    /// Whether several sequences reference the block, so that none may write it.
    pub(super) fn is_shared(&self, block: u32) -> bool {
        self.blocks[block as usize].references > 1
    }

    /// Unpublishes a block, so that its only owner may write it.
    pub(super) fn unpublish(&mut self, block: u32) {
        if let Some(hash) = self.blocks[block as usize].published.take() {
            self.index.remove(&hash);
        }
    }

    fn num_unused(&self) -> u64 {
        u64::from(self.total) - self.blocks.len() as u64
    }

    /// Reference count of a block, and whether it is published.
    #[cfg(test)]
    pub(super) fn state(&self, block: u32) -> (u32, bool) {
        let state = &self.blocks[block as usize];
        (state.references, state.published.is_some())
    }

    /// Checks that every block is in exactly one state.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut places = vec![0; self.blocks.len()];
        for &block in self.freed.iter().chain(self.cached.values()) {
            places[block as usize] += 1;
            assert_eq!(self.blocks[block as usize].references, 0, "block {block} is free and referenced");
        }
        for (block, state) in self.blocks.iter().enumerate() {
            let expected = if state.references == 0 { 1 } else { 0 };
            assert_eq!(places[block], expected, "block {block} is leaked or in two states: {state:?}");
            if let Some(hash) = &state.published {
                assert_eq!(self.index.get(hash), Some(&(block as u32)), "a published block is in the index");
            }
        }
        let published = self.blocks.iter().filter(|state| state.published.is_some()).count();
        assert_eq!(self.index.len(), published, "the index names published blocks only");
        assert!(self.freed.iter().all(|&block| self.blocks[block as usize].published.is_none()));
    }
}
