//! What the rows of a forward lead to: more context done, scores, agreement, and in the end what the role decides.

use std::ops::Range;

use engine::{EngineError, Logits};
use speculation::acceptance::{RowDraw, guess};
use speculation::logits::score;
use speculation::{ReplyBody, Role, TokenLogprobs, Work};

use super::ModelMethod;
use super::portion::Portion;
use crate::decide::{Decide, Decision, Rows};
use crate::task::Task;

impl<D: Decide> ModelMethod<D> {
    /// What the draws of a task's rows lead to; `None` while it needs another forward.
    pub(super) fn absorb_drawn(
        &mut self,
        task: &mut Task,
        portion: &Portion,
        (drawn, scores): (&[RowDraw], &[TokenLogprobs]),
    ) -> Option<ReplyBody> {
        let done = task.context_done..task.context_done + portion.num_context;
        task.context_done = done.end;
        if task.is_scoring() {
            // Those of the prompt come first; of the context's last id nothing is known that follows.
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
        self.settle(task, Rows::Drawn { drawn, scores: &scores[scores.len() - told..] })
    }

    /// What a task's logits lead to; `None` while it needs another forward.
    pub(super) fn absorb(
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

    /// Rows of a tree that a task's window and the free KV have room for.
    fn tree_room(&self, task: &Task) -> u32 {
        if !self.engine.takes_trees() {
            return 0;
        }
        let held = self.engine.len(self.slots[&task.slot]);
        let free = self.engine.free_blocks() * u64::from(self.engine.info().kv_block_size);
        self.engine.info().max_model_len.saturating_sub(held).min(u32::try_from(free).unwrap_or(u32::MAX))
    }

    /// What the role makes of a task's rows; `None` while it needs another forward.
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

    /// Leaves the KV of what is held: of a tree, one path of it.
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

    /// A step that came to nothing: its context stays.
    fn refuse_draw(&mut self, task: &mut Task, error: &dyn std::error::Error) -> ReplyBody {
        task.cached.cut(task.step.start());
        self.engine.truncate(self.slots[&task.slot], task.step.start());
        ReplyBody::Refused { reason: error.to_string() }
    }
}

/// The answer to a step that only feeds, once all of it is there.
fn fed(task: &mut Task) -> ReplyBody {
    let prompt_logprobs = task.take_scores();
    ReplyBody::Fed { cached_len: task.step.start(), prompt_logprobs }
}

/// Says of the ids that follow the context ids `done` (indices into the context), whose logits start at `first_row`, whether they are what the worker
/// would have drawn there.
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
        // A row from which nothing can be drawn agrees with nothing.
        let drawn = guess(&spec, task.cached.counts_mut(), position, row);
        task.agreed.push(drawn.is_ok_and(|drawn| drawn.token_id == next));
    }
}

/// Scores the prompt ids that follow the context ids `done` (indices into the context), whose logits start at `first_row`. What stands past
/// the vocabulary is padding.
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
