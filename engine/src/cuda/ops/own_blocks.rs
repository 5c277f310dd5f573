//! Own blocks: keys and values that single rows of token trees attend to, from the block in which the tree
//! begins on. They are assembled from the context's keys and the row's ancestors, wherever these are stored.
//! Pure index arithmetic. It does not affect numerics: the row then attends to the same keys as in a chain.

use std::ops::Range;

use cpu_kernels::{BLOCK_SIZE, HeadLayout, Segment, TreeSegment};
use half::bf16;
use speculation::tree::MAX_TREE_TOKENS;

use super::tiling::{SPLIT_KEYS, WIDE_QUERIES};

/// Blocks per split.
const SPLIT_BLOCKS: usize = SPLIT_KEYS / BLOCK_SIZE;
/// Flag in a block table: the block is an own block (`OWN` of `attention.cuh`).
const OWN: u32 = 1 << 31;
/// Marks an empty slot (`EMPTY_SLOT` of `trees.cu`).
const EMPTY_SLOT: u32 = u32::MAX;

/// Limit of own blocks in memory, in bytes; rows that need more are processed in several chunks.
const OWN_BYTES: usize = 64 << 20;

/// A row of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TreeRow {
    pub(super) position: u32,
    /// Split in which the tree begins.
    pub(super) split: usize,
    /// Offset at which the row's block table would begin if it included the blocks before that split.
    pub(super) table: u32,
    /// Its own blocks, numbered over the pass.
    pub(super) own: Range<u32>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct OwnBlocks {
    /// `[blocks][16]`: source slots (block * 16 + offset) of each block.
    pub(crate) sources: Vec<u32>,
    /// By row of the pass; empty without trees.
    rows: Vec<Option<TreeRow>>,
}

impl OwnBlocks {
    /// Builds the own blocks of a pass. `tables` holds the concatenated block tables of all segments; those
    /// of tree rows are appended.
    pub(crate) fn new(segments: &[Segment<'_>], tables: &mut Vec<u32>) -> Self {
        let mut own = Self::default();
        for segment in segments {
            let Some(tree) = &segment.tree else { continue };
            own.rows.resize(segment.rows.end, None);
            for row in segment.rows.clone() {
                let row_of_tree = row - segment.rows.start + tree.first;
                own.rows[row] = Some(own.add(segment.block_table, tree, row_of_tree, tables));
            }
        }
        own
    }

    /// Adds the own blocks of a row of a tree, and its block table from the tree's split on.
    fn add(
        &mut self,
        block_table: &[u32],
        tree: &TreeSegment<'_>,
        row: usize,
        tables: &mut Vec<u32>,
    ) -> TreeRow {
        let start = tree.start as usize;
        let mut stored_at: Vec<u32> = tree.stored_at(row).collect();
        stored_at.reverse();
        let position = start + stored_at.len() - 1;
        let first_block = start / BLOCK_SIZE;
        let slot_of = |place: usize| {
            let stored_at = match place.checked_sub(start) {
                None => place,
                Some(behind) => stored_at.get(behind).map(|&at| at as usize)?,
            };
            Some(block_table[stored_at / BLOCK_SIZE] * BLOCK_SIZE as u32 + (stored_at % BLOCK_SIZE) as u32)
        };
        let first_own = self.num_blocks() as u32;
        let places = first_block * BLOCK_SIZE..(position / BLOCK_SIZE + 1) * BLOCK_SIZE;
        self.sources.extend(places.map(|place| slot_of(place).unwrap_or(EMPTY_SLOT)));
        let own = first_own..self.num_blocks() as u32;

        let split = start / SPLIT_KEYS;
        // Not negative, because `tables` already contains the sequence's whole table.
        let table = (tables.len() - split * SPLIT_BLOCKS) as u32;
        tables.extend_from_slice(&block_table[split * SPLIT_BLOCKS..first_block]);
        tables.extend(own.clone().map(|block| OWN | block));
        TreeRow { position: position as u32, split, table, own }
    }

    /// Number of own blocks of the pass.
    fn num_blocks(&self) -> usize {
        self.sources.len() / BLOCK_SIZE
    }

    /// Returns a row of the pass if it belongs to a tree.
    pub(super) fn row(&self, row: usize) -> Option<&TreeRow> {
        self.rows.get(row).and_then(Option::as_ref)
    }
}

/// Size of a block in numbers: one layer, all KV heads.
pub(super) fn own_block_len(layout: HeadLayout) -> usize {
    2 * BLOCK_SIZE * layout.num_kv_heads * layout.head_dim
}

/// Maximum number of own blocks in memory.
pub(super) fn max_own_blocks(layout: HeadLayout) -> usize {
    OWN_BYTES / (own_block_len(layout) * size_of::<bf16>())
}

/// Size of the own blocks of `rows` tree rows in bytes. It covers a chunk of one tile of up to 64 queries.
pub(crate) fn own_bytes(rows: usize, layout: HeadLayout) -> usize {
    let group = layout.num_heads / layout.num_kv_heads;
    let most_of_row = (BLOCK_SIZE - 1 + MAX_TREE_TOKENS).div_ceil(BLOCK_SIZE);
    let of_rows = |rows: usize| rows * most_of_row * own_block_len(layout) * size_of::<bf16>();
    of_rows(rows).min(OWN_BYTES.max(of_rows(WIDE_QUERIES.div_ceil(group) + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree after 138 ids: it begins in block 8 at offset 10; its split begins with block 8. Rows 1 to 7 of
    /// the pass.
    #[test]
    fn rows_read_the_context_and_their_ancestors() {
        let block_table: Vec<u32> = (0..10).map(|block| 100 - block).collect();
        let parents = [0, 0, 1, 2, 4, 5, 6, 7, 8];
        let tree = TreeSegment { start: 138, first: 2, parents: &parents };
        let segments = [
            Segment { rows: 0..1, start: 3, block_table: &[7], tree: None },
            Segment { rows: 1..8, start: 138, block_table: &block_table, tree: Some(tree) },
        ];
        let mut tables = vec![7];
        tables.extend_from_slice(&block_table);
        let own = OwnBlocks::new(&segments, &mut tables);
        assert_eq!(own.row(0), None);
        let (first, last) = (own.row(1).unwrap(), own.row(7).unwrap());
        assert_eq!((first.position, last.position), (139, 144));
        assert_eq!((first.own.clone(), last.own.clone(), first.split), (0..1, 6..8, 1));
        let table_of = |row: &TreeRow| tables[row.table as usize + 8..][..row.own.len()].to_vec();
        assert_eq!(table_of(first), [OWN]);
        assert_eq!(table_of(last), [OWN | 6, OWN | 7]);
        // Row 2 of the tree follows row 0: block 8 has ten ids of the context, then these two.
        let slot = |stored_at: usize| block_table[stored_at / 16] * 16 + (stored_at % 16) as u32;
        let mut expected: Vec<u32> = (128..138).map(slot).collect();
        expected.extend([slot(138), slot(140), EMPTY_SLOT, EMPTY_SLOT, EMPTY_SLOT, EMPTY_SLOT]);
        assert_eq!(own.sources[..16], expected);
        // Row 8 follows rows 7, 6, 5, 4, 3, 1.
        expected.truncate(10);
        expected.extend([139, 141, 142, 143, 144, 145].map(slot));
        expected.push(slot(146));
        expected.extend([EMPTY_SLOT; 15]);
        assert_eq!(own.sources[6 * 16..], expected);
    }
}
