//! Processes the output rows of a forward: context progress, agreement, and finally the role's decision.

use engine::Logits;
use speculation::ReplyBody;
use speculation::acceptance::guess;
use worker::failed_forward::refuse_draw;
use worker::{OutputRows, RoleLogic as _, StepExecutor as _, StepProgress, Task};

use super::TranslatedExecutor;
use super::batch_entry::BatchEntry;

impl TranslatedExecutor {
    /// Processes an entry's rows, whose logits begin at `first_row`; `None` while the task needs another
    /// forward.
    pub(super) fn process_logits(
        &mut self,
        task: &mut Task,
        entry: &BatchEntry,
        (logits, first_row): (&Logits, usize),
    ) -> Option<ReplyBody> {
        // Context ids count as done once they are covered; the last id only with the context's last row.
        task.context_done = match entry.ends_context {
            true => task.step.append_ids.len(),
            false => self.num_covered_context(task).max(task.context_done),
        };
        if !entry.ends_context {
            return None;
        }
        if entry.compares {
            self.compare(task, entry, (logits, first_row));
        }
        if !entry.decides {
            return Some(ReplyBody::Fed { cached_len: task.step.start(), prompt_logprobs: None });
        }
        let masks = match self.grammars.take_masks(task) {
            Ok(masks) => masks,
            Err(error) => return Some(refuse_draw(self, task, error.into())),
        };
        let draft_row = logits.row(first_row + entry.num_logits() - 1);
        self.translation.scatter(draft_row, &mut self.row);
        let vocab_size = self.row.len();
        let rows = OutputRows::Logits { values: &mut self.row, vocab_size, masks: &masks, max_tree_rows: 0 };
        match self.role_logic.process_rows(task, rows) {
            Ok(decision) => self.apply_progress(task, decision),
            Err(error) => Some(refuse_draw(self, task, error.into())),
        }
    }

    /// Records whether context ids are the ones that the worker would have drawn, for the last ids, whose
    /// predecessors' rows ran in this forward. If no draft token ends at a position, the worker would have
    /// drawn nothing there.
    fn compare(&mut self, task: &mut Task, entry: &BatchEntry, (logits, first_row): (&Logits, usize)) {
        let Some(spec) = task.cached.spec().cloned() else { return };
        let sequence = &self.sequences[&task.slot];
        let num_run_before = self.engine.len(task.slot) as usize - entry.draft_ids.len();
        for (i, &next) in task.step.append_ids.iter().enumerate().skip(1) {
            let position = task.step.base_len + i as u32;
            match sequence.draft_len_at(position as usize) {
                None => task.agreed.push(false),
                Some(draft_len) if draft_len <= num_run_before => task.agreed.clear(),
                Some(draft_len) => {
                    let row = first_row + draft_len - 1 - num_run_before;
                    self.translation.scatter(logits.row(row), &mut self.row);
                    // A row that cannot be drawn from counts as disagreement.
                    let drawn = guess(&spec, task.cached.counts_mut(), position, &mut self.row);
                    task.agreed.push(drawn.is_ok_and(|drawn| drawn.token_id == next));
                }
            }
        }
    }

    /// Carries out a decision; `None` while the task needs another forward.
    pub(super) fn apply_progress(&mut self, task: &Task, decision: StepProgress) -> Option<ReplyBody> {
        let StepProgress::Done { body, keep } = decision else { return None };
        self.truncate(task.slot, keep);
        Some(body)
    }
}
