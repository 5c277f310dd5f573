//! Attention of token tree rows over the block in which the tree begins and the blocks after it. The content
//! of such a block differs by row: each position holds the row's own ancestor, wherever that is stored. So
//! each row gets its own copy of the block, gathered from the cache. It then computes what a chain of its
//! ancestors would (docs/contract.md C3): the same keys at the same positions, merged in the same order.

use super::block::{AttendRange, Block, BlockPrefetch, Queries};
use super::{Attend, Task};
use crate::kv_cache::{BLOCK_SIZE, KvElement};
use crate::pass::TreeSegment;
use crate::simd::{Element, F32x16};

impl<T: Element + KvElement> Attend<'_, T> {
    /// Merges the blocks after the shared ones into the accumulators of a task's rows.
    ///
    /// # Safety
    /// The CPU supports V's instructions.
    #[inline(always)]
    pub(super) unsafe fn attend_to_ancestors<V: F32x16>(
        &self,
        task: &Task,
        tree: &TreeSegment<'_>,
        (queries, gathered): (&mut Queries, &mut Vec<T>),
    ) {
        let segment = &self.step.pass.segments[task.segment];
        let group = self.step.layout.num_heads / self.step.layout.num_kv_heads;
        for (i, row) in task.rows.clone().enumerate() {
            let visible = self.all_visible(row);
            let row_queries = i * group..(i + 1) * group;
            queries.set_visible(row_queries.clone(), &visible);
            let begin = visible.start.max(tree.start as usize / BLOCK_SIZE * BLOCK_SIZE);
            for index in begin / BLOCK_SIZE..visible.end.div_ceil(BLOCK_SIZE) {
                self.gather_block(task, tree, (row - segment.rows.start + tree.first, index), gathered);
                let (keys, values) = gathered.split_at(gathered.len() / 2);
                let block = Block { index, keys, values, prefetch: BlockPrefetch::NONE };
                // SAFETY: guaranteed by the caller; keys and values are sixteen rows of head_dim, and the
                // row's queries attend to some of them.
                unsafe { V::run_outlined(AttendRange { queries, range: row_queries.clone(), block }) };
            }
        }
    }

    /// Gathers a block in which the tree's positions hold the row's ancestors and the row itself.
    fn gather_block(
        &self,
        task: &Task,
        tree: &TreeSegment<'_>,
        (row, index): (usize, usize),
        gathered: &mut Vec<T>,
    ) {
        let block_table = self.step.pass.segments[task.segment].block_table;
        let stored =
            |index: usize| self.kv.keys_and_values(block_table[index], self.step.layer, task.kv_head);
        let (keys, values) = stored(index);
        gathered.clear();
        gathered.extend_from_slice(keys);
        gathered.extend_from_slice(values);
        let (gathered_keys, gathered_values) = gathered.split_at_mut(keys.len());
        let head_dim = self.step.layout.head_dim;
        // From the row itself back to the tree's first position.
        let depth = tree.stored_at(row).count();
        let positions = (tree.start as usize..tree.start as usize + depth).rev();
        for (position, from) in positions.zip(tree.stored_at(row)) {
            let from = from as usize;
            if position / BLOCK_SIZE != index || position == from {
                continue;
            }
            let (keys, values) = stored(from / BLOCK_SIZE);
            let (to, from) = (position % BLOCK_SIZE, from % BLOCK_SIZE);
            for (gathered, stored) in
                gathered_keys.chunks_exact_mut(BLOCK_SIZE).zip(keys.chunks_exact(BLOCK_SIZE))
            {
                gathered[to] = stored[from];
            }
            gathered_values[to * head_dim..][..head_dim]
                .copy_from_slice(&values[from * head_dim..][..head_dim]);
        }
    }
}
