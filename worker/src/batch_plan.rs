//! Selects the tasks that take part in the next forward of an executor that runs a model: their grammar is
//! compiled, no other task is computing a prefix block that they need, and their KV fits.
//! [`mod@scheduling::batch`] divides the rows.

use std::collections::VecDeque;

use engine::Engine;
use scheduling::batch::{MAX_ROUND_CONTEXT, RowLimits, StepChunk, StepRows, form_batch};

use crate::task::{PrefixLookup, Task};

/// Result of a lookup in the prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundPrefix {
    /// Number of the step's context ids that have KV now.
    pub context_done: usize,
    /// Whether another task is about to compute the next block.
    pub wait: bool,
}

/// Looks up new tasks' contexts in the prefix cache. `share` shares the KV that is found for a task with its
/// sequence, or returns `None` if all rows of the context must be computed.
///
/// A task whose grammar is not compiled (`is_ready` is false) is looked up later: a lookup claims the blocks
/// that the task will compute, and other tasks would wait for blocks that nothing computes.
pub fn look_up_prefixes(
    tasks: &mut VecDeque<Task>,
    is_ready: &[bool],
    mut share: impl FnMut(&Task) -> Option<FoundPrefix>,
) {
    for (task, is_ready) in tasks.iter_mut().zip(is_ready) {
        if !is_ready || task.prefix == PrefixLookup::Done {
            continue;
        }
        // The context of a round is shorter than a block.
        let is_round = task.step.base_len > 0 && task.step.append_ids.len() <= MAX_ROUND_CONTEXT as usize;
        let found = if is_round { None } else { share(task) };
        task.prefix = match found {
            Some(FoundPrefix { wait: true, .. }) => PrefixLookup::Waiting,
            Some(FoundPrefix { wait: false, .. }) | None => PrefixLookup::Done,
        };
        if let Some(FoundPrefix { context_done, .. }) = found {
            task.num_cached += (context_done - task.context_done) as u32;
            task.context_done = context_done;
        }
    }
    // A task waits for another ready task of the queue. If all of them wait, none would ever run, so the
    // first runs.
    let waits = |(task, is_ready): (&Task, &bool)| !is_ready || task.prefix == PrefixLookup::Waiting;
    if tasks.iter().zip(is_ready).all(waits)
        && let Some(first) = is_ready.iter().position(|is_ready| *is_ready)
    {
        tasks[first].prefix = PrefixLookup::Done;
    }
}

/// Chooses the chunks of the next forward within `limits`. `rows` are the rows that each task still needs.
/// The tasks of the chunks are marked as run.
pub fn choose_chunks(
    engine: &Engine,
    limits: RowLimits,
    tasks: &mut VecDeque<Task>,
    is_ready: &[bool],
    rows: &[StepRows],
) -> Vec<StepChunk> {
    let mut blocks_left = engine.free_blocks();
    let chunks = form_batch(rows, limits, |index, rows| {
        let task = &tasks[index];
        let blocks = engine.blocks_needed(task.slot, rows);
        let fits = blocks <= blocks_left && task.prefix == PrefixLookup::Done && is_ready[index];
        blocks_left -= if fits { blocks } else { 0 };
        fits
    });
    for chunk in &chunks {
        tasks[chunk.index].has_run = true;
    }
    chunks
}
