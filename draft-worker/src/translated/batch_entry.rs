//! Selects the draft ids that run as rows of the next forward.

use std::collections::VecDeque;

use scheduling::batch::{RowLimits, StepRows};
use speculation::{TokenId, Work};
use worker::Task;
use worker::batch_plan::{choose_chunks, look_up_prefixes};

use super::TranslatedExecutor;

/// The part of one task in a forward.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BatchEntry {
    /// Index of the task in the queue.
    pub(super) task: usize,
    /// The draft ids that run as rows.
    pub(super) draft_ids: Vec<TokenId>,
    /// Whether these are the last of the task's currently known rows.
    pub(super) ends_context: bool,
    /// Whether the role decides after this forward.
    pub(super) decides: bool,
    /// Whether the step's context is compared with what this worker would have drawn.
    pub(super) compares: bool,
}

impl BatchEntry {
    /// Number of last rows that need logits.
    pub(super) fn num_logits(&self) -> usize {
        if self.compares { self.draft_ids.len() } else { usize::from(self.decides) }
    }
}

impl TranslatedExecutor {
    /// Plans the entries of the next forward; see [`worker::batch_plan`]. The tasks must be aligned.
    pub(super) fn plan(&mut self, tasks: &mut VecDeque<Task>, prompt_rows: u32) -> Vec<BatchEntry> {
        let is_ready: Vec<bool> = tasks.iter().map(|task| self.grammars.is_ready(task)).collect();
        look_up_prefixes(tasks, &is_ready, |task| Some(self.share_prefix(task)));
        let rows: Vec<StepRows> = tasks.iter().map(|task| self.step_rows(task)).collect();
        let limits = RowLimits { all: self.max_batch_rows as u32, prompts: prompt_rows };
        let chunks = choose_chunks(&self.engine, limits, tasks, &is_ready, &rows);
        let entry = |index: usize, rows: u32| {
            let (task, pending) = (&tasks[index], self.pending(&tasks[index]));
            let ends_context = rows as usize == pending.len();
            // Work drafted ahead already includes the comparison.
            let is_new = task.agreed.is_empty() && task.guesses.token_ids.is_empty();
            BatchEntry {
                task: index,
                draft_ids: pending[..rows as usize].to_vec(),
                ends_context,
                decides: ends_context && task.step.work != Work::Feed,
                compares: ends_context && is_new && task.is_comparable(),
            }
        };
        chunks.iter().map(|chunk| entry(chunk.index, chunk.rows(&rows[chunk.index]))).collect()
    }

    /// Rows that a task still needs. A step that is a round for other methods is a round here too and is
    /// never split, however many draft ids it has; their number is bounded.
    fn step_rows(&self, task: &Task) -> StepRows {
        let rows = self.pending(task).len() as u32;
        match task.rows_left().is_round() {
            true => StepRows { context: 0, tail: rows },
            false => StepRows { context: rows, tail: 0 },
        }
    }
}
