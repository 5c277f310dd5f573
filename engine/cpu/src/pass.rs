//! What the operations on rows take: how heads lie in a row, where rows stand in their sequences and in the KV cache.
//! Data only. Whoever calls has worked every index out and has reserved the blocks; nothing is checked again here.

use std::ops::Range;

use crate::kv_cache::KvSlot;

/// A root mean square norm.
#[derive(Debug, Clone)]
pub struct Norm {
    /// `[width]`.
    pub weight: Vec<f32>,
    /// What is added to the mean of the squares.
    pub eps: f32,
}

/// How the heads lie in a row of `[q heads | k heads | v heads]`.
#[derive(Debug, Clone, Copy)]
pub struct HeadLayout {
    /// Query heads.
    pub num_heads: usize,
    /// Key heads, and value heads: a divisor of the query heads.
    pub num_kv_heads: usize,
    /// Numbers in a head.
    pub head_dim: usize,
}

impl HeadLayout {
    /// Numbers in all query heads of a row.
    pub fn q_width(self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Numbers in all key, or all value, heads of a row.
    pub fn kv_width(self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Numbers in a row.
    pub fn row_width(self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }
}

/// Cosines and sines of the rows' positions.
#[derive(Debug, Default)]
pub struct Angles {
    /// `[rows, half]`.
    pub cos: Vec<f32>,
    /// `[rows, half]`.
    pub sin: Vec<f32>,
    /// Half of the numbers in a head.
    pub half: usize,
}

/// Rows of one sequence, standing one behind the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment<'a> {
    /// The rows of the pass.
    pub rows: Range<usize>,
    /// The position of the first of them.
    pub start: u32,
    /// The sequence's KV blocks in position order.
    pub block_table: &'a [u32],
    /// Where rows are of a token tree: whose ancestors they attend to. Not every device takes trees.
    pub tree: Option<TreeSegment<'a>>,
}

/// Rows of a token tree. Its row i is stored as if it stood at `start + i`, until it is known which path stays; its
/// position is `start` and the number of its ancestors in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeSegment<'a> {
    /// The position of the tree's first rows.
    pub start: u32,
    /// Which row of the tree the segment's first one is.
    pub first: usize,
    /// Of each row of the tree: 0 where nothing of the tree comes before it, else its parent's number and one more.
    pub parents: &'a [u32],
}

impl TreeSegment<'_> {
    /// Where the keys and values of a row of the tree, and of each of its ancestors in it, are stored, as positions in
    /// the block table; from the row itself on, whose position is the highest.
    pub fn stored_at(&self, row: usize) -> impl Iterator<Item = u32> {
        let parent = |&row: &usize| (self.parents[row] as usize).checked_sub(1);
        std::iter::successors(Some(row), parent).map(|row| self.start + row as u32)
    }
}

/// Where the rows of a pass stand.
#[derive(Debug, Clone, Copy)]
pub struct PassRows<'a> {
    /// `[rows]`: positions in their sequences.
    pub positions: &'a [u32],
    /// `[rows]`: where their keys and values go.
    pub slot_mapping: &'a [KvSlot],
    /// The same rows by sequence, in their order.
    pub segments: &'a [Segment<'a>],
}

/// One layer's attention over a pass.
#[derive(Debug, Clone, Copy)]
pub struct AttentionStep<'a> {
    /// How the heads lie in `qkv`.
    pub layout: HeadLayout,
    /// Counted from 0.
    pub layer: usize,
    /// Sliding window: attend only to this many of the last positions.
    pub window: Option<u32>,
    /// Where the rows stand.
    pub pass: PassRows<'a>,
    /// `[rows, layout.row_width()]`, queries and keys already turned.
    pub qkv: &'a [f32],
}
