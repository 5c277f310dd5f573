//! Tracks which sequence references which KV blocks: pure bookkeeping, no KV memory is touched here. A batch
//! reserves all the blocks that it needs or none, so a forward that does not fit changes nothing.
//!
//! Sequences that called [`BlockManager::share_prefix`] publish every block that they fill, under the hash of
//! all ids up to its end, and start with blocks that others published (docs/contract.md A, shared prefixes).
//! A published block is never written. To continue inside one, a sequence unpublishes it if no other sequence
//! references it, and copies it otherwise. `pool` decides what happens to unreferenced blocks, `block_hash`
//! computes a block's hash.

mod block_hash;
mod pool;

use std::collections::HashMap;

use block_hash::BlockHash;
use cpu_kernels::BLOCK_SIZE;
use pool::BlockPool;

use crate::{EngineError, SlotId, TokenId};

/// A sequence's blocks in position order, and its number of tokens.
#[derive(Debug, Default)]
struct Sequence {
    block_table: Vec<u32>,
    len: u32,
    sharing: Option<Sharing>,
    /// Hashes of blocks that this sequence is about to compute; other sequences wait for them.
    claims: Vec<BlockHash>,
}

/// State of a sequence that shares blocks.
#[derive(Debug, Clone)]
struct Sharing {
    isolation_key: u64,
    /// All ids whose KV the sequence has.
    ids: Vec<TokenId>,
    /// Hash of each full block.
    hashes: Vec<BlockHash>,
    /// Number of leading blocks that are published: computed and in the hash index.
    num_published: usize,
}

/// Result of [`BlockManager::share_prefix`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Number of tokens that the sequence has now.
    pub len: u32,
    /// Whether another sequence is about to compute the next block.
    pub wait: bool,
}

/// A block copy to perform before the next forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockCopy {
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// Allocates blocks 0..total.
#[derive(Debug)]
pub(crate) struct BlockManager {
    pool: BlockPool,
    sequences: HashMap<SlotId, Sequence>,
    claims: HashMap<BlockHash, SlotId>,
    next_slot: u64,
}

impl BlockManager {
    pub(crate) fn new(total: u32) -> Self {
        Self { pool: BlockPool::new(total), sequences: HashMap::new(), claims: HashMap::new(), next_slot: 0 }
    }

    pub(crate) fn open(&mut self) -> SlotId {
        let slot = SlotId(self.next_slot);
        self.next_slot += 1;
        self.sequences.insert(slot, Sequence::default());
        slot
    }

    /// Opens a sequence of `len` tokens whose KV nobody writes. Nothing that it holds is ever published. The
    /// caller has checked that there are enough blocks.
    pub(crate) fn open_unwritten(&mut self, len: u32) -> SlotId {
        let slot = self.open();
        self.append_rows(slot, len);
        slot
    }

    /// Opens a sequence with the first `len` tokens of another one. Both share the blocks; a shared tail is
    /// copied before it is written. Returns `None` if the other slot is not open or has fewer tokens.
    pub(crate) fn fork(&mut self, slot: SlotId, len: u32) -> Option<SlotId> {
        let source = self.sequences.get(&slot).filter(|source| len <= source.len)?;
        let block_table = source.block_table[..blocks_for(len)].to_vec();
        let mut sharing = source.sharing.clone();
        if let Some(sharing) = &mut sharing {
            sharing.truncate(len as usize);
        }
        block_table.iter().for_each(|&block| self.pool.add_reference(block));
        let fork = self.open();
        self.sequences.insert(fork, Sequence { block_table, len, sharing, claims: Vec::new() });
        Some(fork)
    }

    pub(crate) fn close(&mut self, slot: SlotId) {
        self.truncate(slot, 0);
        self.sequences.remove(&slot);
    }

    /// Drops the tokens at position `len` and after, releases the blocks that had only those, and drops the
    /// sequence's claims.
    pub(crate) fn truncate(&mut self, slot: SlotId, len: u32) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        sequence.drop_claims(&mut self.claims);
        if len >= sequence.len {
            return;
        }
        sequence.len = len;
        if let Some(sharing) = &mut sequence.sharing {
            sharing.truncate(len as usize);
        }
        // Release from the end, so that the tail of an unused prefix is evicted first.
        for block in sequence.block_table.drain(blocks_for(len)..).rev() {
            self.pool.release(block);
        }
    }

    /// Number of tokens of the sequence, or `None` if the slot is not open.
    pub(crate) fn len(&self, slot: SlotId) -> Option<u32> {
        self.sequences.get(&slot).map(|sequence| sequence.len)
    }

    /// Blocks of the sequence in position order; empty if the slot is not open.
    pub(crate) fn block_table(&self, slot: SlotId) -> &[u32] {
        self.sequences.get(&slot).map_or(&[], |sequence| &sequence.block_table)
    }

    /// Number of blocks that `new_tokens` more tokens would take, including the copy of a shared tail.
    pub(crate) fn blocks_needed(&self, slot: SlotId, new_tokens: u32) -> u64 {
        let Some(sequence) = self.sequences.get(&slot) else { return 0 };
        if new_tokens == 0 {
            return 0;
        }
        let tokens = u64::from(sequence.len) + u64::from(new_tokens);
        let more = tokens.div_ceil(BLOCK_SIZE as u64).saturating_sub(sequence.block_table.len() as u64);
        let copied = sequence.tail().is_some_and(|tail| self.pool.is_shared(tail));
        more + u64::from(copied)
    }

    /// Number of unreferenced blocks, cached ones included.
    pub(crate) fn free_blocks(&self) -> u64 {
        self.pool.available()
    }

    pub(crate) fn total_blocks(&self) -> u64 {
        self.pool.total()
    }

    pub(crate) fn referenced_blocks(&self) -> u64 {
        self.total_blocks() - self.free_blocks()
    }

    /// Number of published blocks that no sequence references.
    pub(crate) fn cached_blocks(&self) -> u64 {
        self.pool.num_cached()
    }

    /// Number of cached blocks that were evicted since start.
    pub(crate) fn evicted_blocks(&self) -> u64 {
        self.pool.num_evicted()
    }

    /// Number of blocks that the KV memory must hold once `needed` more are allocated; an error if fewer are
    /// free.
    pub(crate) fn high_water_mark_after(&self, needed: u64) -> Result<u32, EngineError> {
        let free = self.free_blocks();
        if needed > free {
            return Err(EngineError::OutOfKv { needed, free });
        }
        Ok(self.pool.high_water_mark_after(needed))
    }

    /// Extends a sequence with published blocks, as far as they match `ids` and leave at least one id to
    /// compute. `ids` starts with the ids that the sequence has. From then on the sequence publishes the
    /// blocks that it fills, and claims its next blocks: sequences with the same ids that call this meanwhile
    /// get `wait` and must call again. Sharing is turned off for a sequence if the isolation key changes or
    /// `ids` differ from what was computed. A sequence that has rows of a token tree is not extended.
    pub(crate) fn share_prefix(&mut self, slot: SlotId, isolation_key: u64, ids: &[TokenId]) -> PrefixMatch {
        let Some(sequence) = self.sequences.get_mut(&slot) else {
            return PrefixMatch { len: 0, wait: false };
        };
        let held = sequence.len as usize;
        if held == 0 {
            sequence.sharing = Some(Sharing::new(isolation_key));
        }
        let unchanged = PrefixMatch { len: sequence.len, wait: false };
        let Some(sharing) = &mut sequence.sharing else { return unchanged };
        if sharing.isolation_key != isolation_key || !ids.starts_with(&sharing.ids) {
            sequence.stop_sharing(&mut self.claims);
            return unchanged;
        }
        if sharing.ids.len() != held || !held.is_multiple_of(BLOCK_SIZE) {
            return unchanged;
        }
        let usable = ids.len().saturating_sub(1) / BLOCK_SIZE * BLOCK_SIZE;
        let mut blocks = ids[held..usable.max(held)].chunks_exact(BLOCK_SIZE);
        let mut hash = sharing.last_hash();
        let mut wait = false;
        for block_ids in blocks.by_ref() {
            hash = hash.next(block_ids);
            if let Some(block) = self.pool.reference_published(&hash) {
                sequence.block_table.push(block);
                sequence.len += BLOCK_SIZE as u32;
                sharing.push(block_ids, hash);
            } else {
                wait = self.claims.get(&hash).is_some_and(|claimant| *claimant != slot);
                break;
            }
        }
        if !wait {
            let computed = sharing.hashes.len() * BLOCK_SIZE;
            let mut hash = sharing.last_hash();
            for block_ids in ids[computed..usable.max(computed)].chunks_exact(BLOCK_SIZE) {
                hash = hash.next(block_ids);
                if self.claims.insert(hash, slot) != Some(slot) {
                    sequence.claims.push(hash);
                }
            }
        }
        PrefixMatch { len: sequence.len, wait }
    }

    /// Extends a sequence. The caller has checked that there are enough blocks, and performs the returned
    /// copy before writing. Sharing is turned off for a sequence that still has rows of a token tree: their
    /// KV is not that of a chain, and another sequence must never find it.
    pub(crate) fn append(&mut self, slot: SlotId, ids: &[TokenId]) -> Option<BlockCopy> {
        if ids.is_empty() {
            return None;
        }
        let sequence = self.sequences.get_mut(&slot)?;
        match &mut sequence.sharing {
            Some(sharing) if sharing.ids.len() == sequence.len as usize => sharing.append(ids),
            Some(_) => sequence.stop_sharing(&mut self.claims),
            None => {}
        }
        self.append_rows(slot, ids.len() as u32)
    }

    /// Makes a sequence reference the original of a block again, after the copy that
    /// [`BlockManager::append`] returned has failed. No other call may have come in between.
    pub(crate) fn undo_copy(&mut self, slot: SlotId, BlockCopy { from, to }: BlockCopy) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        for block in sequence.block_table.iter_mut().filter(|block| **block == to) {
            *block = from;
            self.pool.add_reference(from);
            self.pool.release(to);
        }
    }

    /// Replaces the tree rows from `start` on by `ids`, the path whose KV was moved there, and publishes its
    /// full blocks.
    pub(crate) fn keep_path(&mut self, slot: SlotId, start: u32, ids: &[TokenId]) {
        self.truncate(slot, start + ids.len() as u32);
        if let Some(sharing) = self.sequences.get_mut(&slot).and_then(|sequence| sequence.sharing.as_mut()) {
            sharing.truncate(start as usize);
            sharing.append(ids);
        }
        self.publish(slot);
    }

    /// Extends a sequence by rows, as [`BlockManager::append`] does after it has recorded their ids. Rows
    /// without ids, such as those of a token tree, are never published; they remain until the sequence is
    /// truncated or [`BlockManager::keep_path`] replaces them by a path.
    pub(crate) fn append_rows(&mut self, slot: SlotId, num_rows: u32) -> Option<BlockCopy> {
        let sequence = self.sequences.get_mut(&slot)?;
        let mut copy = None;
        if let Some(tail) = sequence.tail().filter(|_| num_rows > 0) {
            if self.pool.is_shared(tail) {
                let to = self.pool.allocate();
                copy = Some(BlockCopy { from: tail, to });
                self.pool.release(tail);
                *sequence.block_table.last_mut().expect("the tail is the last block") = to;
            } else {
                self.pool.unpublish(tail);
            }
        }
        sequence.len += num_rows;
        while sequence.block_table.len() < blocks_for(sequence.len) {
            sequence.block_table.push(self.pool.allocate());
        }
        copy
    }

    /// Publishes the blocks that a sequence has filled, once they are computed. If an equal block is
    /// published already, the sequence references that one and releases its own: their bits are equal.
    pub(crate) fn publish(&mut self, slot: SlotId) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let Some(sharing) = &mut sequence.sharing else { return };
        for index in sharing.num_published..sharing.hashes.len() {
            let (hash, own) = (sharing.hashes[index], sequence.block_table[index]);
            if let Some(equal) = self.pool.reference_published(&hash) {
                sequence.block_table[index] = equal;
                self.pool.release(own);
            } else {
                self.pool.publish(own, hash);
            }
            if self.claims.get(&hash) == Some(&slot) {
                self.claims.remove(&hash);
                sequence.claims.retain(|claim| *claim != hash);
            }
        }
        sharing.num_published = sharing.hashes.len();
    }
}

impl Sequence {
    /// Publishes nothing from now on.
    fn stop_sharing(&mut self, claims: &mut HashMap<BlockHash, SlotId>) {
        self.sharing = None;
        self.drop_claims(claims);
    }

    /// Lets other sequences wait no longer for the blocks that this one was about to compute.
    fn drop_claims(&mut self, claims: &mut HashMap<BlockHash, SlotId>) {
        for hash in self.claims.drain(..) {
            claims.remove(&hash);
        }
    }

    /// The partially filled block that the next token goes into, if there is one.
    fn tail(&self) -> Option<u32> {
        match (self.len as usize).is_multiple_of(BLOCK_SIZE) {
            true => None,
            false => self.block_table.last().copied(),
        }
    }
}

impl Sharing {
    fn new(isolation_key: u64) -> Self {
        Self { isolation_key, ids: Vec::new(), hashes: Vec::new(), num_published: 0 }
    }

    fn last_hash(&self) -> BlockHash {
        self.hashes.last().copied().unwrap_or_else(|| BlockHash::root(self.isolation_key))
    }

    /// Adds a block that was found published.
    fn push(&mut self, ids: &[TokenId], hash: BlockHash) {
        self.ids.extend_from_slice(ids);
        self.hashes.push(hash);
        self.num_published = self.hashes.len();
    }

    fn append(&mut self, ids: &[TokenId]) {
        self.ids.extend_from_slice(ids);
        let hashed = self.hashes.len() * BLOCK_SIZE;
        let mut hash = self.last_hash();
        for block in self.ids[hashed..].chunks_exact(BLOCK_SIZE) {
            hash = hash.next(block);
            self.hashes.push(hash);
        }
    }

    fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
        self.hashes.truncate(len / BLOCK_SIZE);
        self.num_published = self.num_published.min(self.hashes.len());
    }
}

/// Number of blocks that hold `len` tokens.
pub(crate) fn blocks_for(len: u32) -> usize {
    (len as usize).div_ceil(BLOCK_SIZE)
}

#[cfg(test)]
mod tests;
