//! Attention of token tree rows over the block in which the tree begins and the blocks after it. The content
//! of such a block differs by row: each position holds the row's own ancestor, wherever that is stored. So
//! each row gets its own copy of the block, gathered from the cache. It then computes what a chain of its
//! ancestors would (docs/contract.md C3): the same keys at the same positions, merged in the same order.

use super::block::{AttendEach, Block, Fetch, Queries};
use super::{Attend, Task};
use crate::kv_cache::{BLOCK_SIZE, KvElement};
use crate::lanes::{Element, Lanes};
use crate::pass::TreeSegment;

impl<T: Element + KvElement> Attend<'_, T> {
    /// Merges the blocks after the shared ones into the accumulators of a task's rows.
    ///
    /// # Safety
    /// The CPU supports V's instructions.
    #[inline(always)]
    pub(super) unsafe fn attend_to_ancestors<V: Lanes>(
        &self,
        task: &Task,
        tree: &TreeSegment<'_>,
        (queries, own): (&mut Queries, &mut Vec<T>),
    ) {
        let segment = &self.step.pass.segments[task.segment];
        let group = self.step.layout.num_heads / self.step.layout.num_kv_heads;
        for (i, row) in task.rows.clone().enumerate() {
            let visible = self.all_visible(row);
            let of_row = i * group..(i + 1) * group;
            queries.see(of_row.clone(), &visible);
            let begin = visible.start.max(tree.start as usize / BLOCK_SIZE * BLOCK_SIZE);
            for index in begin / BLOCK_SIZE..visible.end.div_ceil(BLOCK_SIZE) {
                self.put_together(task, tree, (row - segment.rows.start + tree.first, index), own);
                let (keys, values) = own.split_at(own.len() / 2);
                let block = Block { index, keys, values, fetch: Fetch::NOTHING };
                // SAFETY: guaranteed by the caller; keys and values are sixteen rows of head_dim, and the
                // row's queries attend to some of them.
                unsafe { V::run_apart(AttendEach { queries, range: of_row.clone(), block }) };
            }
        }
    }

    /// Gathers a block in which the tree's positions hold the row's ancestors and the row itself.
    fn put_together(
        &self,
        task: &Task,
        tree: &TreeSegment<'_>,
        (row, index): (usize, usize),
        own: &mut Vec<T>,
    ) {
        let block_table = self.step.pass.segments[task.segment].block_table;
        let stored =
            |index: usize| self.kv.keys_and_values(block_table[index], self.step.layer, task.kv_head);
        let (keys, values) = stored(index);
        own.clear();
        own.extend_from_slice(keys);
        own.extend_from_slice(values);
        let (own_keys, own_values) = own.split_at_mut(keys.len());
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
            for (own, stored) in own_keys.chunks_exact_mut(BLOCK_SIZE).zip(keys.chunks_exact(BLOCK_SIZE)) {
                own[to] = stored[from];
            }
            own_values[to * head_dim..][..head_dim].copy_from_slice(&values[from * head_dim..][..head_dim]);
        }
    }
}
