//! Attention over the KV blocks of many sequences. A task is a few rows of one sequence, for the query heads
//! that share one key-value head. A task reads each of its blocks once, for all its queries
//! (`attention/block.rs` does the arithmetic), and prefetches the blocks that follow, in this task or the
//! next.
//!
//! The order of each query's sums is fixed by absolute position (docs/contract.md C3): blocks of sixteen
//! keys, merged in order under the running maximum. The result does not depend on which queries are computed
//! together.

mod block;
mod tree;

use std::ops::Range;

use block::{Block, BlockPrefetch, Queries, widen};

use super::dispatch::Kernel;
use super::simd::{Element, F32x16, LANES};
use super::threads::SharedSliceMut;
use crate::kv_cache::{BLOCK_SIZE, KvBlocks, KvElement};
use crate::pass::AttentionStep;

const _: () = assert!(BLOCK_SIZE == LANES, "the scores of a block must fill one vector");

/// Maximum accumulators of the queries of a task: a third of an L1 cache.
const MAX_TASK_ACCUMULATORS: usize = 4096;
/// With more queries than this, a block is widened to f32 once for all of them.
const WIDEN_ABOVE: usize = 4;
/// Prefetch distance into the L2 cache in bytes; the distance into the L1 cache is one block.
const L2_PREFETCH_BYTES: usize = 32 << 10;

/// Some rows of a segment, for one key-value head.
#[derive(Debug, Clone)]
pub(super) struct Task {
    /// Index in the pass's segments.
    segment: usize,
    /// Range of rows of the pass.
    rows: Range<usize>,
    kv_head: usize,
}

/// Splits a layer's attention into tasks. Also returns the approximate number of multiply-adds.
pub(super) fn tasks(step: &AttentionStep<'_>) -> (Vec<Task>, usize) {
    let layout = step.layout;
    let row_len = layout.q_width() / layout.num_kv_heads;
    let max_rows = (MAX_TASK_ACCUMULATORS / row_len).max(1);
    let (mut tasks, mut work) = (Vec::new(), 0);
    for (segment, part) in step.pass.segments.iter().enumerate() {
        let keys = part.start as usize + part.rows.len();
        work += part.rows.len() * keys * 2 * layout.q_width();
        for start in part.rows.clone().step_by(max_rows) {
            let rows = start..part.rows.end.min(start + max_rows);
            tasks.extend((0..layout.num_kv_heads).map(|kv_head| Task {
                segment,
                rows: rows.clone(),
                kv_head,
            }));
        }
    }
    (tasks, work)
}

/// Kernel that runs some tasks in order.
pub(super) struct Attend<'a, T> {
    pub(super) kv: &'a KvBlocks<T>,
    pub(super) step: AttentionStep<'a>,
    pub(super) tasks: &'a [Task],
    /// `[rows, layout.q_width()]`. No other thread writes the heads of these tasks meanwhile.
    pub(super) out: &'a SharedSliceMut<'a, f32>,
}

impl<T: Element + KvElement> Kernel for Attend<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let head_dim = self.step.layout.head_dim;
        let block_numbers = 2 * head_dim * BLOCK_SIZE;
        let mut queries = Queries::default();
        let (mut wide, mut gathered) = (Vec::new(), Vec::new());
        let mut l1 = self.blocks().skip(1);
        let mut l2 = self.blocks().skip((L2_PREFETCH_BYTES / (block_numbers * size_of::<T>())).max(2));
        for task in self.tasks {
            self.begin(task, &mut queries);
            let block_table = self.step.pass.segments[task.segment].block_table;
            for index in self.blocks_of(task) {
                let (keys, values) =
                    self.kv.keys_and_values(block_table[index], self.step.layer, task.kv_head);
                let prefetch = BlockPrefetch { l1: l1.next(), l2: l2.next() };
                // SAFETY: this function's contract guarantees V's instructions; keys and values are sixteen
                // rows of head_dim, as are the widened ones.
                unsafe {
                    if size_of::<T>() < size_of::<f32>() && queries.len() > WIDEN_ABOVE {
                        wide.resize(block_numbers, 0.0);
                        let (wide_keys, wide_values) = wide.split_at_mut(block_numbers / 2);
                        widen::<V, T>(keys, wide_keys, prefetch);
                        widen::<V, T>(values, wide_values, prefetch.advanced_past(keys));
                        let (keys, values) = (&*wide_keys, &*wide_values);
                        queries.attend::<V, f32>(Block {
                            index,
                            keys,
                            values,
                            prefetch: BlockPrefetch::NONE,
                        });
                    } else {
                        queries.attend::<V, T>(Block { index, keys, values, prefetch });
                    }
                }
            }
            if let Some(tree) = &self.step.pass.segments[task.segment].tree {
                // SAFETY: this function's contract guarantees V's instructions.
                unsafe { self.attend_to_ancestors::<V>(task, tree, (&mut queries, &mut gathered)) };
            }
            self.write(task, &queries);
        }
    }
}

impl<T: Element + KvElement> Attend<'_, T> {
    /// Start of the keys of all blocks of all tasks, in the order in which they are read.
    fn blocks(&self) -> impl Iterator<Item = *const u8> {
        self.tasks.iter().flat_map(move |task| {
            let block_table = self.step.pass.segments[task.segment].block_table;
            let keys = move |index: usize| {
                self.kv.keys_and_values(block_table[index], self.step.layer, task.kv_head).0.as_ptr().cast()
            };
            self.blocks_of(task).map(keys)
        })
    }

    /// Blocks of the task that all its rows share, as indices into the sequence's block table.
    fn blocks_of(&self, task: &Task) -> Range<usize> {
        let last = task.rows.end - 1;
        self.visible(task, task.rows.start).start / BLOCK_SIZE
            ..self.visible(task, last).end.div_ceil(BLOCK_SIZE)
    }

    /// The keys that a row may attend to in blocks that all rows of its segment share: in a tree, those
    /// before the block in which the tree begins. Both ends are non-decreasing from row to row.
    fn visible(&self, task: &Task, row: usize) -> Range<usize> {
        let keys = self.all_visible(row);
        match &self.step.pass.segments[task.segment].tree {
            None => keys,
            Some(tree) => {
                let end = tree.start as usize / BLOCK_SIZE * BLOCK_SIZE;
                keys.start.min(end)..end
            }
        }
    }

    /// All keys that a row may attend to.
    fn all_visible(&self, row: usize) -> Range<usize> {
        let position = self.step.pass.positions[row] as usize;
        let first = self.step.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        first..position + 1
    }

    /// The task's heads in a row of queries or of outputs.
    fn heads(&self, task: &Task) -> Range<usize> {
        let width = self.step.layout.q_width() / self.step.layout.num_kv_heads;
        task.kv_head * width..(task.kv_head + 1) * width
    }

    fn begin(&self, task: &Task, queries: &mut Queries) {
        let layout = self.step.layout;
        queries.clear(layout.head_dim);
        for row in task.rows.clone() {
            let numbers = &self.step.qkv[row * layout.row_width()..(row + 1) * layout.row_width()];
            queries.add(&numbers[self.heads(task)], &self.visible(task, row));
        }
    }

    fn write(&self, task: &Task, queries: &Queries) {
        let stride = self.step.layout.q_width();
        let heads = self.heads(task);
        for (i, row) in task.rows.clone().enumerate() {
            // SAFETY: no other task has this row and head.
            let out = unsafe { self.out.slice_mut(row * stride + heads.start..row * stride + heads.end) };
            queries.write(i * heads.len(), out);
        }
    }
}
