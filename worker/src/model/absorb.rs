//! Processes the output rows of a forward: context progress, scores, agreement, and finally the role's
//! decision.

use std::collections::VecDeque;
use std::ops::Range;

use engine::{Answers, EngineError, Logits, NumAnswers, Outcome};
use speculation::acceptance::{RowDraw, guess};
use speculation::logits::score;
use speculation::{ReplyBody, Role, Work};

use super::ModelMethod;
use super::portion::Portion;
use crate::decide::{Decide, Decision, Rows};
use crate::task::Task;

impl<D: Decide> ModelMethod<D> {
    /// Processes the output of a forward, portion by portion, with the number of answers where rows were drawn on
    /// the device. Returns the finished tasks and their replies.
    pub(super) fn absorb_all<'a>(
        &mut self,
        tasks: &mut VecDeque<Task>,
        portions: impl Iterator<Item = (&'a Portion, Option<NumAnswers>)>,
        mut outcome: Outcome,
    ) -> Vec<(usize, ReplyBody)> {
        let (logits, mut answers) = outcome.split();
        let mut bodies = Vec::new();
        let mut row = 0;
        for (portion, num_answers) in portions {
            let task = &mut tasks[portion.task];
            let body = if let Some(num_answers) = num_answers {
                self.absorb_drawn(task, portion, answers.take(num_answers))
            } else {
                let rows = row..row + portion.num_logits;
                row = rows.end;
                self.absorb(task, portion, logits, rows)
            };
            bodies.extend(body.map(|body| (portion.task, body)));
        }
        bodies
    }

    /// Processes the draws of a task's rows; `None` while the task needs another forward.
    fn absorb_drawn(
        &mut self,
        task: &mut Task,
        portion: &Portion,
        answers: Answers<'_>,
    ) -> Option<ReplyBody> {
        let Answers { drawn, scores, candidates } = answers;
        let done = task.context_done..task.context_done + portion.num_context;
        task.context_done = done.end;
        if task.is_scoring() {
            // The prompt's rows come first. The row of the context's last id is not scored here: its next id
            // is unknown.
            let prompt_left = (task.spec().prompt_len - task.step.base_len) as usize;
            let known = task.step.append_ids.len().min(prompt_left).saturating_sub(1);
            let num_known = known.min(done.end).saturating_sub(done.start);
            task.scores.extend_from_slice(&scores[..num_known]);
        }
        if self.compares(task, portion) {
            for (i, row) in done.zip(drawn) {
                let next = task.step.append_ids.get(i + 1);
                task.agreed.extend(next.map(|&next| *row == RowDraw::Token(next)));
            }
        }
        if !portion.ends_context {
            return None;
        }
        if task.step.work == Work::Feed {
            return Some(fed(task));
        }
        let num_decided = task.num_decided();
        let drawn = &drawn[drawn.len() - num_decided..];
        let told = task.spec().logprobs.map_or(0, |_| num_decided.min(scores.len()));
        let scores = &scores[scores.len() - told..];
        let tree_room = self.tree_room(task);
        self.settle(task, Rows::Drawn { drawn, scores, candidates, tree_room })
    }

    /// Processes a task's logits; `None` while the task needs another forward.
    fn absorb(
        &mut self,
        task: &mut Task,
        portion: &Portion,
        logits: &mut Logits,
        rows: Range<usize>,
    ) -> Option<ReplyBody> {
        let done_before = task.context_done;
        task.context_done += portion.num_context;
        score_prompt(task, done_before..task.context_done, logits, (rows.start, self.vocab_size));
        if self.role == Role::Draft {
            compare(task, done_before..task.context_done, logits, (rows.start, self.vocab_size));
        }
        if !portion.ends_context {
            return None;
        }
        if task.step.work == Work::Feed {
            return Some(fed(task));
        }
        let decided = rows.end - task.num_decided()..rows.end;
        let masks = match self.grammars.as_mut().map_or(Ok(Vec::new()), |grammars| grammars.take(task)) {
            Ok(masks) => masks,
            Err(error) => return Some(self.refuse_draw(task, &error)),
        };
        let vocab_size = logits.vocab_size();
        let decided = logits.rows_mut(decided);
        for row in decided.chunks_exact_mut(vocab_size) {
            row[self.vocab_size as usize..].fill(f32::NEG_INFINITY);
        }
        let tree_room = self.tree_room(task);
        self.settle(task, Rows::Logits { values: decided, vocab_size, masks: &masks, tree_room })
    }

    /// Number of tree rows that fit into the task's window and the free KV.
    fn tree_room(&self, task: &Task) -> u32 {
        if !self.engine.takes_trees() {
            return 0;
        }
        let held = self.engine.len(self.slots[&task.slot]);
        let free = self.engine.free_blocks() * u64::from(self.engine.info().kv_block_size);
        self.engine.info().max_model_len.saturating_sub(held).min(u32::try_from(free).unwrap_or(u32::MAX))
    }

    /// Lets the role decide on a task's rows; `None` while the task needs another forward.
    fn settle(&mut self, task: &mut Task, rows: Rows<'_>) -> Option<ReplyBody> {
        match self.decide.decide(task, rows) {
            Ok(decision) => self.conclude(task, decision),
            Err(error) => Some(self.refuse_draw(task, &error)),
        }
    }

    /// Carries out a decision; `None` while the task needs another forward.
    pub(super) fn conclude(&mut self, task: &mut Task, decision: Decision) -> Option<ReplyBody> {
        let Decision::Done { body, keep } = decision else { return None };
        match self.keep(task, keep) {
            Ok(()) => Some(body),
            Err(error) if error.is_fatal() => panic!("{error}"),
            Err(error) => Some(self.refuse_draw(task, &error)),
        }
    }

    /// Truncates the KV to the ids that stay; for a tree, to one path of it.
    fn keep(&mut self, task: &Task, keep: u32) -> Result<(), EngineError> {
        let slot = self.slots[&task.slot];
        let start = task.step.start();
        let held = &task.cached.ids()[start as usize..];
        match (&task.step.work, &task.tree) {
            (Work::Verify { draft }, _) if draft.is_tree() => {
                let path: Vec<usize> = draft.rows_along(held).into_iter().map(|row| row - 1).collect();
                self.engine.keep_path(slot, start, (&path, held))
            }
            (Work::Propose { .. }, Some(tree)) => {
                self.engine.keep_path(slot, start, (&tree.rows_along(held), held))
            }
            _ => {
                self.engine.truncate(slot, keep);
                Ok(())
            }
        }
    }

    /// Refuses a step whose draw failed; its context stays cached.
    fn refuse_draw(&mut self, task: &mut Task, error: &dyn std::error::Error) -> ReplyBody {
        task.cached.cut(task.step.start());
        self.engine.truncate(self.slots[&task.slot], task.step.start());
        ReplyBody::Refused { reason: error.to_string() }
    }
}

/// The reply to a feed step whose whole context is computed.
fn fed(task: &mut Task) -> ReplyBody {
    let prompt_logprobs = task.take_scores();
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
