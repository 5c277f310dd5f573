//! Processes the output rows of a forward: context progress, scores, agreement, and finally the role's
//! decision.

use std::collections::VecDeque;
use std::ops::Range;

use engine::{Answers, EngineError, ForwardOutput, Logits, NumAnswers};
use speculation::acceptance::{DrawResult, guess};
use speculation::logits::score;
use speculation::{Refusal, ReplyBody, Role, Work};

use super::ModelExecutor;
use super::batch_entry::BatchEntry;
use crate::failed_forward::refuse_draw;
use crate::role_logic::{OutputRows, RoleLogic, StepProgress};
use crate::task::Task;

impl<D: RoleLogic> ModelExecutor<D> {
    /// Processes the output of a forward, entry by entry, with the number of answers where rows were drawn on
    /// the device. Returns the finished tasks and their replies.
    pub(super) fn process_outputs<'a>(
        &mut self,
        tasks: &mut VecDeque<Task>,
        entries: impl Iterator<Item = (&'a BatchEntry, Option<NumAnswers>)>,
        mut output: ForwardOutput,
    ) -> Vec<(usize, ReplyBody)> {
        let (logits, mut answers) = output.split();
        let mut bodies = Vec::new();
        let mut row = 0;
        for (entry, num_answers) in entries {
            let task = &mut tasks[entry.task];
            let body = if let Some(num_answers) = num_answers {
                self.process_draws(task, entry, answers.take(num_answers))
            } else {
                let rows = row..row + entry.num_logits;
                row = rows.end;
                self.process_logits(task, entry, logits, rows)
            };
            bodies.extend(body.map(|body| (entry.task, body)));
        }
        bodies
    }

    /// Processes the draws of a task's rows; `None` while the task needs another forward.
    fn process_draws(
        &mut self,
        task: &mut Task,
        entry: &BatchEntry,
        answers: Answers<'_>,
    ) -> Option<ReplyBody> {
        let Answers { drawn, scores, candidates } = answers;
        let done = task.context_done..task.context_done + entry.num_context;
        task.context_done = done.end;
        if task.is_scoring() {
            // The prompt's rows come first. The row of the context's last id is not scored here: its next id
            // is unknown.
            let prompt_left = (task.spec().prompt_len - task.step.base_len) as usize;
            let known = task.step.append_ids.len().min(prompt_left).saturating_sub(1);
            let num_known = known.min(done.end).saturating_sub(done.start);
            task.scores.extend_from_slice(&scores[..num_known]);
        }
        if self.compares(task, entry) {
            for (i, row) in done.zip(drawn) {
                let next = task.step.append_ids.get(i + 1);
                task.agreed.extend(next.map(|&next| *row == DrawResult::Token(next)));
            }
        }
        if !entry.ends_context {
            return None;
        }
        if task.step.work == Work::Feed {
            return Some(fed(task));
        }
        let num_output_rows = task.num_output_rows();
        let drawn = &drawn[drawn.len() - num_output_rows..];
        let num_scores = task.spec().logprobs.map_or(0, |_| num_output_rows.min(scores.len()));
        let scores = &scores[scores.len() - num_scores..];
        let max_tree_rows = self.max_tree_rows(task);
        self.run_role_logic(task, OutputRows::DeviceDraws { drawn, scores, candidates, max_tree_rows })
    }

    /// Processes a task's logits; `None` while the task needs another forward.
    fn process_logits(
        &mut self,
        task: &mut Task,
        entry: &BatchEntry,
        logits: &mut Logits,
        rows: Range<usize>,
    ) -> Option<ReplyBody> {
        let done_before = task.context_done;
        task.context_done += entry.num_context;
        score_prompt(task, done_before..task.context_done, logits, (rows.start, self.vocab_size));
        if self.role == Role::Draft {
            compare(task, done_before..task.context_done, logits, (rows.start, self.vocab_size));
        }
        if !entry.ends_context {
            return None;
        }
        if task.step.work == Work::Feed {
            return Some(fed(task));
        }
        let decided = rows.end - task.num_output_rows()..rows.end;
        let masks = match self.grammars.as_mut().map_or(Ok(Vec::new()), |grammars| grammars.take_masks(task))
        {
            Ok(masks) => masks,
            Err(error) => return Some(refuse_draw(self, task, error.into())),
        };
        let vocab_size = logits.vocab_size();
        let decided = logits.rows_mut(decided);
        for row in decided.chunks_exact_mut(vocab_size) {
            row[self.vocab_size as usize..].fill(f32::NEG_INFINITY);
        }
        let max_tree_rows = self.max_tree_rows(task);
        self.run_role_logic(
            task,
            OutputRows::Logits { values: decided, vocab_size, masks: &masks, max_tree_rows },
        )
    }

    /// Number of tree rows that fit into the task's window and the free KV.
    fn max_tree_rows(&self, task: &Task) -> u32 {
        let held = self.engine.len(task.slot);
        let free = self.engine.free_blocks() * u64::from(self.engine.info().kv_block_size);
        self.engine.info().max_model_len.saturating_sub(held).min(u32::try_from(free).unwrap_or(u32::MAX))
    }

    /// Lets the role decide on a task's rows; `None` while the task needs another forward.
    fn run_role_logic(&mut self, task: &mut Task, rows: OutputRows<'_>) -> Option<ReplyBody> {
        match self.role_logic.process_rows(task, rows) {
            Ok(decision) => self.apply_progress(task, decision),
            Err(error) => Some(refuse_draw(self, task, error.into())),
        }
    }

    /// Carries out a decision; `None` while the task needs another forward.
    pub(super) fn apply_progress(&mut self, task: &mut Task, decision: StepProgress) -> Option<ReplyBody> {
        let StepProgress::Done { body, keep } = decision else { return None };
        match self.truncate_kv(task, keep) {
            Ok(()) => Some(body),
            Err(error) if error.is_fatal() => panic!("{error}"),
            Err(error) => Some(refuse_draw(self, task, Refusal::failure(error.to_string()))),
        }
    }

    /// Truncates the KV to the ids that stay; for a tree, to one path of it.
    fn truncate_kv(&mut self, task: &Task, keep: u32) -> Result<(), EngineError> {
        let slot = task.slot;
        let start = task.step.start();
        let held = &task.cached.ids()[start as usize..];
        match (&task.step.work, &task.tree) {
            (Work::Verify { draft }, _) if draft.is_tree() => {
                let path: Vec<usize> = draft.rows_on_path(held).into_iter().map(|row| row - 1).collect();
                self.engine.keep_path(slot, start, (&path, held))
            }
            (Work::Propose { .. }, Some(tree)) => {
                self.engine.keep_path(slot, start, (&tree.rows_on_path(held), held))
            }
            _ => {
                self.engine.truncate(slot, keep);
                Ok(())
            }
        }
    }
}

/// The reply to a feed step whose whole context is computed.
fn fed(task: &mut Task) -> ReplyBody {
    let prompt_logprobs = task.take_prompt_scores();
    ReplyBody::Fed { cached_len: task.step.start(), prompt_logprobs }
}

/// Records whether the ids after the context ids `done` (indices into the context) are the ones that the
/// worker would have drawn. The logits of `done` start at `first_row`.
fn compare(task: &mut Task, done: Range<usize>, logits: &mut Logits, (first_row, vocab_size): (usize, u32)) {
    if !task.is_comparable() {
        return;
    }
    let Some(spec) = task.cached.spec().cloned() else { return };
    for (row, i) in done.enumerate() {
        let Some(&next) = task.step.append_ids.get(i + 1) else { return };
        let row = logits.rows_mut(first_row + row..first_row + row + 1);
        row[vocab_size as usize..].fill(f32::NEG_INFINITY);
        let position = task.step.base_len + i as u32 + 1;
        // A row that cannot be drawn from counts as disagreement.
        let drawn = guess(&spec, task.cached.counts_mut(), position, row);
        task.agreed.push(drawn.is_ok_and(|drawn| drawn.token_id == next));
    }
}

/// Scores the prompt ids after the context ids `done` (indices into the context), whose logits start at
/// `first_row`. Columns past the vocabulary are padding.
fn score_prompt(task: &mut Task, done: Range<usize>, logits: &Logits, (first_row, vocab_size): (usize, u32)) {
    if !task.is_scoring() {
        return;
    }
    let top = task.spec().prompt_logprobs.unwrap_or(0);
    let prompt_left = (task.spec().prompt_len - task.step.base_len) as usize;
    for (row, i) in done.enumerate() {
        match task.step.append_ids.get(i + 1) {
            Some(&next) if i + 1 < prompt_left => {
                let row = &logits.row(first_row + row)[..vocab_size as usize];
                let scored = score(row, next, top);
                task.scores.push(scored);
            }
            _ => break,
        }
    }
}
