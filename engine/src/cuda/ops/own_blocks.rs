//! Blocks of keys and values that rows of token trees have to themselves: from the one in which the tree begins on, put together from
//! the context's keys there and the row's ancestors', wherever these are stored. Pure index arithmetic: nothing of it is part of the
//! numerics, for a row then meets the keys of a chain.

use std::ops::Range;

use cpu_kernels::{BLOCK_SIZE, HeadLayout, Segment, TreeSegment};
use half::bf16;
use speculation::tree::MAX_TREE_TOKENS;

use super::tiling::{SPLIT_KEYS, WIDE_QUERIES};

/// Blocks of a split.
const SPLIT_BLOCKS: usize = SPLIT_KEYS / BLOCK_SIZE;
/// In a block table, as `attention.cu` has it: the block is one of these.
const OWN: u32 = 1 << 31;
/// In place of a slot, as `trees.cu` has it: the row sees nothing there.
const NOWHERE: u32 = u32::MAX;

/// Bytes of them that are kept at a time: rows that have more take turns.
const OWN_BYTES: usize = 64 << 20;

/// A row of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TreeRow {
    pub(super) position: u32,
    /// The split in which the tree begins.
    pub(super) split: usize,
    /// Where the row's block table would begin, had it the blocks before that split too.
    pub(super) table: u32,
    /// Its blocks, of the pass's.
    pub(super) own: Range<u32>,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct OwnBlocks {
    /// `[blocks][16]`: slots (block * 16 + offset) of what each block is put together from.
    pub(crate) sources: Vec<u32>,
    /// By row of the pass; empty where there is no tree.
    rows: Vec<Option<TreeRow>>,
}

impl OwnBlocks {
    /// Those of a pass. `tables` are the block tables of all segments, one behind the other; those of rows go behind them.
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

    /// The blocks of a row of a tree, and its block table from the tree's split on.
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
        self.sources.extend(places.map(|place| slot_of(place).unwrap_or(NOWHERE)));
        let own = first_own..self.num_blocks() as u32;

        let split = start / SPLIT_KEYS;
        // The sequence's whole table is among those before, so that this is not below 0.
        let table = (tables.len() - split * SPLIT_BLOCKS) as u32;
        tables.extend_from_slice(&block_table[split * SPLIT_BLOCKS..first_block]);
        tables.extend(own.clone().map(|block| OWN | block));
        TreeRow { position: position as u32, split, table, own }
    }

    /// All blocks of the pass.
    fn num_blocks(&self) -> usize {
        self.sources.len() / BLOCK_SIZE
    }

    /// A row of the pass, where it is a tree's.
    pub(super) fn row(&self, row: usize) -> Option<&TreeRow> {
        self.rows.get(row).and_then(Option::as_ref)
    }
}

/// Numbers of a block: of one layer, all KV heads.
pub(super) fn own_block_len(layout: HeadLayout) -> usize {
    2 * BLOCK_SIZE * layout.num_kv_heads * layout.head_dim
}

/// Blocks that are kept at a time.
pub(super) fn most_own(layout: HeadLayout) -> usize {
    OWN_BYTES / (own_block_len(layout) * size_of::<bf16>())
}

/// Bytes of the blocks of so many rows of trees. A tile of a turn of its own has up to 64.
pub(crate) fn own_bytes(rows: usize, layout: HeadLayout) -> usize {
    let group = layout.num_heads / layout.num_kv_heads;
    let most_of_row = (BLOCK_SIZE - 1 + MAX_TREE_TOKENS).div_ceil(BLOCK_SIZE);
    let of_rows = |rows: usize| rows * most_of_row * own_block_len(layout) * size_of::<bf16>();
    of_rows(rows).min(OWN_BYTES.max(of_rows(WIDE_QUERIES.div_ceil(group) + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree behind 138 ids: its split begins at block 8, it at block 8, place 10. Rows 1 and 5 of the pass.
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
        // Row 2 of the tree stands behind row 0: of block 8, ten of the context, these two.
        let slot = |stored_at: usize| block_table[stored_at / 16] * 16 + (stored_at % 16) as u32;
        let mut expected: Vec<u32> = (128..138).map(slot).collect();
        expected.extend([slot(138), slot(140), NOWHERE, NOWHERE, NOWHERE, NOWHERE]);
        assert_eq!(own.sources[..16], expected);
        // Row 8 stands behind 7, 6, 5, 4, 3, 1.
        expected.truncate(10);
        expected.extend([139, 141, 142, 143, 144, 145].map(slot));
        expected.push(slot(146));
        expected.extend([NOWHERE; 15]);
        assert_eq!(own.sources[6 * 16..], expected);
    }
}
