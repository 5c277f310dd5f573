//! KV cache memory in blocks of [`BLOCK_SIZE`] tokens. A block holds all layers of its tokens, so that it can
//! be copied or dropped whole. Memory is allocated as blocks are first used, in total exactly for the blocks
//! that the cache may have, and never released. The caller tracks which sequence holds which block (the
//! engine's `block_manager`).
//!
//! A block is `[layer][kv head][K: head_dim x BLOCK_SIZE | V: BLOCK_SIZE x head_dim]`: keys are stored by
//! dimension, so that one vector operation covers all keys of a block; values by token.

use std::marker::PhantomData;

use half::bf16;

use crate::KernelError;
use crate::elementwise::round_to_bf16;
use crate::lines::{Line, Lines};
use crate::matrix::MatrixFormat;

/// Tokens per KV block. Attention merges key blocks of exactly this size in position order (docs/contract.md
/// C3), so this number is part of the numerics and not a tuning parameter.
pub const BLOCK_SIZE: usize = 16;

/// Blocks per allocation; the last one may have fewer.
const BLOCKS_PER_CHUNK: usize = 16;

/// Size of a token's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Number of layers of the model.
    pub num_layers: usize,
    /// Number of key heads per layer, and of value heads.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl KvShape {
    /// Elements of one head's keys, or values, in one block.
    pub fn head_len(self) -> usize {
        self.head_dim * BLOCK_SIZE
    }

    /// Elements of one block.
    pub fn block_len(self) -> usize {
        self.token_len() * BLOCK_SIZE
    }

    /// Elements of one token, over all layers.
    pub fn token_len(self) -> usize {
        self.num_layers * self.num_kv_heads * 2 * self.head_dim
    }
}

/// Location of one token's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSlot {
    /// Block of the cache.
    pub block: u32,
    /// Token of the block, below [`BLOCK_SIZE`].
    pub offset: u32,
}

/// A copy of one token's keys and values to another slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenCopy {
    /// Source.
    pub from: KvSlot,
    /// Destination.
    pub to: KvSlot,
}

/// Stored number format of keys and values.
pub(crate) trait KvElement: bytemuck::Pod + Send + Sync {
    fn from_f32(x: f32) -> Self;
}

impl KvElement for f32 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl KvElement for bf16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        round_to_bf16(x)
    }
}

/// Blocks in one number format.
#[derive(Debug)]
pub(crate) struct KvBlocks<T> {
    shape: KvShape,
    /// Number of blocks that may exist.
    max_blocks: usize,
    chunks: Vec<Lines>,
    numbers: PhantomData<T>,
}

/// The KV cache of a model.
#[derive(Debug)]
pub struct KvCache(pub(crate) Stored);

/// Blocks in the format that goes with the model's weights.
#[derive(Debug)]
pub(crate) enum Stored {
    F32(KvBlocks<f32>),
    Bf16(KvBlocks<bf16>),
}

impl KvCache {
    /// Creates a cache for at most `max_blocks` blocks, none of which exists yet; keys and values will be
    /// stored in `format`.
    pub fn new(shape: KvShape, format: MatrixFormat, max_blocks: u32) -> Self {
        let max_blocks = max_blocks as usize;
        Self(match format {
            MatrixFormat::F32 => Stored::F32(KvBlocks::new(shape, max_blocks)),
            MatrixFormat::Bf16 => Stored::Bf16(KvBlocks::new(shape, max_blocks)),
        })
    }

    /// Copies a block, all layers.
    pub fn copy_block(&mut self, from: u32, to: u32) {
        match &mut self.0 {
            Stored::F32(blocks) => blocks.copy_block(from, to),
            Stored::Bf16(blocks) => blocks.copy_block(from, to),
        }
    }

    /// Copies one token's keys and values, all layers.
    pub fn copy_token(&mut self, copy: TokenCopy) {
        match &mut self.0 {
            Stored::F32(blocks) => blocks.copy_token(copy),
            Stored::Bf16(blocks) => blocks.copy_token(copy),
        }
    }

    /// Allocates blocks 0..`num_blocks` if they do not exist. Panics if the cache may not have as many.
    pub fn grow_to(&mut self, num_blocks: u32) -> Result<(), KernelError> {
        match &mut self.0 {
            Stored::F32(blocks) => blocks.grow_to(num_blocks as usize),
            Stored::Bf16(blocks) => blocks.grow_to(num_blocks as usize),
        }
    }
}

impl<T: KvElement> KvBlocks<T> {
    fn new(shape: KvShape, max_blocks: usize) -> Self {
        Self { shape, max_blocks, chunks: Vec::new(), numbers: PhantomData }
    }

    fn grow_to(&mut self, num_blocks: usize) -> Result<(), KernelError> {
        assert!(num_blocks <= self.max_blocks, "{num_blocks} blocks of a cache of {}", self.max_blocks);
        let block_bytes = self.shape.block_len() * size_of::<T>();
        while self.chunks.len() * BLOCKS_PER_CHUNK < num_blocks {
            let blocks = BLOCKS_PER_CHUNK.min(self.max_blocks - self.chunks.len() * BLOCKS_PER_CHUNK);
            let lines = (blocks * block_bytes).div_ceil(size_of::<Line>());
            let chunk = Lines::zeroed(lines, "kv blocks, lower --kv-memory to what the machine has")?;
            chunk.populate();
            self.chunks.push(chunk);
        }
        Ok(())
    }

    fn copy_block(&mut self, from: u32, to: u32) {
        let len = self.shape.block_len();
        let ((from_chunk, from), (to_chunk, to)) = (self.place(from, 0, 0), self.place(to, 0, 0));
        if from_chunk == to_chunk {
            numbers_mut::<T>(&mut self.chunks[from_chunk]).copy_within(from..from + len, to);
        } else if let Ok([from_chunk, to_chunk]) = self.chunks.get_disjoint_mut([from_chunk, to_chunk]) {
            numbers_mut::<T>(to_chunk)[to..to + len].copy_from_slice(&numbers(from_chunk)[from..from + len]);
        }
    }

    fn copy_token(&mut self, TokenCopy { from, to }: TokenCopy) {
        let (head_dim, head_len) = (self.shape.head_dim, self.shape.head_len());
        let (from_offset, to_offset) = (from.offset as usize, to.offset as usize);
        for layer in 0..self.shape.num_layers {
            for kv_head in 0..self.shape.num_kv_heads {
                let (keys, values) = self.keys_and_values(from.block, layer, kv_head);
                let key: Vec<T> = keys.chunks_exact(BLOCK_SIZE).map(|column| column[from_offset]).collect();
                let value = values[from_offset * head_dim..][..head_dim].to_vec();
                let (chunk, start) = self.place(to.block, layer, kv_head);
                let head = &mut numbers_mut::<T>(&mut self.chunks[chunk])[start..start + 2 * head_len];
                let (k, v) = head.split_at_mut(head_len);
                k.chunks_exact_mut(BLOCK_SIZE).zip(key).for_each(|(column, x)| column[to_offset] = x);
                v[to_offset * head_dim..][..head_dim].copy_from_slice(&value);
            }
        }
    }

    /// Keys `[head_dim][BLOCK_SIZE]` and values `[BLOCK_SIZE][head_dim]` of one head in one block.
    #[inline(always)]
    pub(crate) fn keys_and_values(&self, block: u32, layer: usize, kv_head: usize) -> (&[T], &[T]) {
        let (chunk, start) = self.place(block, layer, kv_head);
        let head_len = self.shape.head_len();
        numbers(&self.chunks[chunk])[start..start + 2 * head_len].split_at(head_len)
    }

    /// Stores one token's keys and values, each `[kv head][head_dim]`, rounded to the stored format.
    pub(crate) fn write(&mut self, layer: usize, slot: KvSlot, keys: &[f32], values: &[f32]) {
        let (head_dim, head_len) = (self.shape.head_dim, self.shape.head_len());
        let offset = slot.offset as usize;
        for (kv_head, (key, value)) in
            keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim)).enumerate()
        {
            let (chunk, start) = self.place(slot.block, layer, kv_head);
            let head = &mut numbers_mut::<T>(&mut self.chunks[chunk])[start..start + 2 * head_len];
            let (k, v) = head.split_at_mut(head_len);
            for (column, &x) in k.chunks_exact_mut(BLOCK_SIZE).zip(key) {
                column[offset] = T::from_f32(x);
            }
            for (stored, &x) in v[offset * head_dim..].iter_mut().zip(value) {
                *stored = T::from_f32(x);
            }
        }
    }

    fn place(&self, block: u32, layer: usize, kv_head: usize) -> (usize, usize) {
        let (chunk, block) = (block as usize / BLOCKS_PER_CHUNK, block as usize % BLOCKS_PER_CHUNK);
        let head = layer * self.shape.num_kv_heads + kv_head;
        (chunk, block * self.shape.block_len() + head * 2 * self.shape.head_len())
    }
}

#[inline(always)]
fn numbers<T: KvElement>(lines: &Lines) -> &[T] {
    bytemuck::cast_slice(lines)
}

fn numbers_mut<T: KvElement>(lines: &mut Lines) -> &mut [T] {
    bytemuck::cast_slice_mut(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape { num_layers: 2, num_kv_heads: 1, head_dim: 8 };

    /// The size of the cache is a limit, also where blocks are allocated several at a time.
    #[test]
    fn no_more_memory_is_allocated_than_the_blocks_of_the_cache() {
        let bytes_of = |blocks: usize| blocks * SHAPE.block_len() * size_of::<bf16>();
        for max_blocks in [1, 15, 16, 17, 40] {
            let mut kv = KvBlocks::<bf16>::new(SHAPE, max_blocks);
            for num_blocks in 0..=max_blocks {
                kv.grow_to(num_blocks).unwrap();
                let bytes = kv.chunks.iter().map(|chunk| chunk.len() * size_of::<Line>()).sum::<usize>();
                let allowed = bytes_of(num_blocks)..=bytes_of(max_blocks);
                assert!(allowed.contains(&bytes), "{bytes} bytes for {num_blocks} of {max_blocks} blocks");
            }
            // The last block is there as a whole.
            let last = KvSlot { block: max_blocks as u32 - 1, offset: BLOCK_SIZE as u32 - 1 };
            kv.write(1, last, &[1.0; 8], &[2.0; 8]);
            kv.copy_block(last.block, 0);
            let (_, values) = kv.keys_and_values(0, 1, 0);
            assert_eq!(values[values.len() - 8..], [bf16::from_f32(2.0); 8]);
        }
    }
}
