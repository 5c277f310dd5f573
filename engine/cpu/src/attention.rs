//! Attention over the KV blocks of many sequences: a task is a few rows of one sequence, for the query heads that share
//! one key-value head. Every block of a task is read once, for all its queries (`attention/block.rs` is what they do with
//! it); what comes after it, in this task or the next, is fetched meanwhile.
//!
//! The order of each query's sums is fixed by absolute position (docs/contract.md C3): blocks of sixteen keys, merged one
//! after the other by the running maximum. Which queries are computed side by side changes nothing.

mod block;
mod tree;

use std::ops::Range;

use block::{Block, Fetch, Queries, widen};

use super::dispatch::Kernel;
use super::lanes::{Element, LANES, Lanes};
use super::threads::Shared;
use crate::kv_cache::{BLOCK_SIZE, KvBlocks, KvElement};
use crate::pass::AttentionStep;

const _: () = assert!(BLOCK_SIZE == LANES, "a block's scores are one vector");

/// Numbers that the queries of a task may sum into: a third of a first-level cache.
const TASK_NUMBERS: usize = 4096;
/// Queries above which a block is widened to f32 once for all of them.
const WIDEN_ABOVE: usize = 4;
/// How far ahead blocks are fetched into the second-level cache, in bytes; into the first, it is one block.
const FAR_BYTES: usize = 32 << 10;

/// Some rows of a segment, for one key-value head.
#[derive(Debug, Clone)]
pub(super) struct Task {
    /// The pass's.
    segment: usize,
    /// Rows of the pass.
    rows: Range<usize>,
    kv_head: usize,
}

/// A layer's attention in tasks, and about how many multiply-adds it is.
pub(super) fn tasks(step: &AttentionStep<'_>) -> (Vec<Task>, usize) {
    let layout = step.layout;
    let row_numbers = layout.q_width() / layout.num_kv_heads;
    let most = (TASK_NUMBERS / row_numbers).max(1);
    let (mut tasks, mut work) = (Vec::new(), 0);
    for (segment, of) in step.pass.segments.iter().enumerate() {
        let keys = of.start as usize + of.rows.len();
        work += of.rows.len() * keys * 2 * layout.q_width();
        for start in of.rows.clone().step_by(most) {
            let rows = start..of.rows.end.min(start + most);
            tasks.extend((0..layout.num_kv_heads).map(|kv_head| Task {
                segment,
                rows: rows.clone(),
                kv_head,
            }));
        }
    }
    (tasks, work)
}

/// Some tasks, one after the other.
pub(super) struct Attend<'a, T> {
    pub(super) kv: &'a KvBlocks<T>,
    pub(super) step: AttentionStep<'a>,
    pub(super) tasks: &'a [Task],
    /// `[rows, layout.q_width()]`; nobody else writes the heads of these tasks meanwhile.
    pub(super) out: &'a Shared<'a, f32>,
}

impl<T: Element + KvElement> Kernel for Attend<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let head_dim = self.step.layout.head_dim;
        let block_numbers = 2 * head_dim * BLOCK_SIZE;
        let mut queries = Queries::default();
        let (mut wide, mut own) = (Vec::new(), Vec::new());
        let mut near = self.blocks().skip(1);
        let mut far = self.blocks().skip((FAR_BYTES / (block_numbers * size_of::<T>())).max(2));
        for task in self.tasks {
            self.begin(task, &mut queries);
            let block_table = self.step.pass.segments[task.segment].block_table;
            for index in self.blocks_of(task) {
                let (keys, values) =
                    self.kv.keys_and_values(block_table[index], self.step.layer, task.kv_head);
                let fetch = Fetch { near: near.next(), far: far.next() };
                // SAFETY: V's instructions are there by this function's contract; keys and values are sixteen rows of
                // head_dim, as are the widened ones.
                unsafe {
                    if size_of::<T>() < size_of::<f32>() && queries.len() > WIDEN_ABOVE {
                        wide.resize(block_numbers, 0.0);
                        let (wide_keys, wide_values) = wide.split_at_mut(block_numbers / 2);
                        widen::<V, T>(keys, wide_keys, fetch);
                        widen::<V, T>(values, wide_values, fetch.behind(keys));
                        let (keys, values) = (&*wide_keys, &*wide_values);
                        queries.attend::<V, f32>(Block { index, keys, values, fetch: Fetch::NOTHING });
                    } else {
                        queries.attend::<V, T>(Block { index, keys, values, fetch });
                    }
                }
            }
            if let Some(tree) = &self.step.pass.segments[task.segment].tree {
                // SAFETY: V's instructions are there by this function's contract.
                unsafe { self.attend_to_ancestors::<V>(task, tree, (&mut queries, &mut own)) };
            }
            self.write(task, &queries);
        }
    }
}

impl<T: Element + KvElement> Attend<'_, T> {
    /// Where the keys of all blocks of all tasks begin, in the order in which they are read.
    fn blocks(&self) -> impl Iterator<Item = *const u8> {
        self.tasks.iter().flat_map(move |task| {
            let block_table = self.step.pass.segments[task.segment].block_table;
            let keys = move |index: usize| {
                self.kv.keys_and_values(block_table[index], self.step.layer, task.kv_head).0.as_ptr().cast()
            };
            self.blocks_of(task).map(keys)
        })
    }

    /// Indices into the sequence's block table.
    fn blocks_of(&self, task: &Task) -> Range<usize> {
        let last = task.rows.end - 1;
        self.visible(task, task.rows.start).start / BLOCK_SIZE
            ..self.visible(task, last).end.div_ceil(BLOCK_SIZE)
    }

    /// The keys that a row may attend to in blocks that all rows of its segment share: for a tree's, those before the block in which the
    /// tree begins. Neither end falls from one row to the next.
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

    /// The heads of a row of queries, or of outputs, that the task is about.
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
