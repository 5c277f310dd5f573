//! Operands of the operations on rows: head layout, positions of rows in their sequences, locations in the KV
//! cache. Data only. The caller has computed every index and reserved the blocks; nothing is checked here
//! again.

use std::ops::Range;

use crate::kv_cache::KvSlot;

/// A root mean square norm.
#[derive(Debug, Clone)]
pub struct Norm {
    /// `[width]`.
    pub weight: Vec<f32>,
    /// Added to the mean of the squares.
    pub eps: f32,
}

/// Layout of the heads in a row of `[q heads | k heads | v heads]`.
#[derive(Debug, Clone, Copy)]
pub struct HeadLayout {
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key heads, and of value heads: a divisor of the query heads.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl HeadLayout {
    /// Elements of all query heads of a row.
    pub fn q_width(self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Elements of all key heads of a row, or of all value heads.
    pub fn kv_width(self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Elements of a row.
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
    /// Half the elements of a head.
    pub half: usize,
}

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment<'a> {
    /// Rows of the pass.
    pub rows: Range<usize>,
    /// Position of the first row.
    pub start: u32,
    /// The sequence's KV blocks in position order.
    pub block_table: &'a [u32],
    /// Set if the rows belong to a token tree: the ancestors that they attend to. Not every device supports
    /// trees.
    pub tree: Option<TreeSegment<'a>>,
}

/// Rows of a token tree. Row i of the tree is stored as if its position were `start + i`, until it is known
/// which path is kept. Its position is `start` plus its number of ancestors in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeSegment<'a> {
    /// Position of the tree's first rows.
    pub start: u32,
    /// Row number in the tree of the segment's first row.
    pub first: usize,
    /// One entry per row of the tree: 0 if the row has no parent in the tree, else the parent's number plus
    /// one.
    pub parents: &'a [u32],
}

impl TreeSegment<'_> {
    /// Positions in the block table where the keys and values of a row and of its ancestors in the tree are
    /// stored. Starts with the row itself, whose position is the highest.
    pub fn stored_at(&self, row: usize) -> impl Iterator<Item = u32> {
        let parent = |&row: &usize| (self.parents[row] as usize).checked_sub(1);
        std::iter::successors(Some(row), parent).map(|row| self.start + row as u32)
    }
}

/// Positions and KV locations of the rows of a pass.
#[derive(Debug, Clone, Copy)]
pub struct PassRows<'a> {
    /// `[rows]`: positions in their sequences.
    pub positions: &'a [u32],
    /// `[rows]`: KV slots of the rows.
    pub slot_mapping: &'a [KvSlot],
    /// The same rows by sequence, in order.
    pub segments: &'a [Segment<'a>],
}

/// One layer's attention over a pass.
#[derive(Debug, Clone, Copy)]
pub struct AttentionStep<'a> {
    /// Layout of the heads in `qkv`.
    pub layout: HeadLayout,
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Sliding window: attend only to this many of the last positions.
    pub window: Option<u32>,
    /// Positions and KV locations of the rows.
    pub pass: PassRows<'a>,
    /// `[rows, layout.row_width()]`, with rope applied to queries and keys.
    pub qkv: &'a [f32],
}
