//! What the rows of a forward lead to: more context done, agreement, and in the end what the role decides.

use engine::Logits;
use speculation::ReplyBody;
use speculation::acceptance::guess;
use worker::{Decide as _, Decision, Method as _, Rows, Task};

use super::TranslatedMethod;
use super::rows::Portion;

impl TranslatedMethod {
    /// What a portion's rows lead to; `None` while the task needs another forward. Its logits begin at row `first_row`.
    pub(super) fn absorb(
        &mut self,
        task: &mut Task,
        portion: &Portion,
        (logits, first_row): (&Logits, usize),
    ) -> Option<ReplyBody> {
        let held = &self.sequences[&task.slot];
        let covered = held.text.num_covered(self.engine.len(held.slot) as usize);
        let len = task.step.append_ids.len();
        // As many as are covered; the last of them only with the context's last row.
        let done = covered.saturating_sub(task.step.base_len as usize).min(len.saturating_sub(1));
        task.context_done = if portion.ends_context { len } else { done.max(task.context_done) };
        if !portion.ends_context {
            return None;
        }
        if portion.compares {
            self.compare(task, portion, (logits, first_row));
        }
        if !portion.decides {
            return Some(ReplyBody::Fed { cached_len: task.step.start(), prompt_logprobs: None });
        }
        let masks = match self.grammars.take(task) {
            Ok(masks) => masks,
            Err(error) => return Some(self.refuse_draw(task, &error)),
        };
        let draft_row = logits.row(first_row + portion.num_logits() - 1);
        self.translation.scatter(draft_row, &mut self.row);
        let vocab_size = self.row.len();
        let rows = Rows::Logits { values: &mut self.row, vocab_size, masks: &masks, tree_room: 0 };
        match self.decide.decide(task, rows) {
            Ok(decision) => self.conclude(task, decision),
            Err(error) => Some(self.refuse_draw(task, &error)),
        }
    }

    /// Says of the context's ids whether they are what the worker would have drawn there: of the last ones, behind which a row ran. Where
    /// the draft's tokens end elsewhere it would have drawn nothing.
    fn compare(&mut self, task: &mut Task, portion: &Portion, (logits, first_row): (&Logits, usize)) {
        let Some(spec) = task.cached.spec().cloned() else { return };
        let held = &self.sequences[&task.slot];
        let num_run_before = self.engine.len(held.slot) as usize - portion.draft_ids.len();
        for (i, &next) in task.step.append_ids.iter().enumerate().skip(1) {
            let position = task.step.base_len + i as u32;
            match held.text.draft_len_at(position as usize) {
                None => task.agreed.push(false),
                Some(draft_len) if draft_len <= num_run_before => task.agreed.clear(),
                Some(draft_len) => {
                    let row = first_row + draft_len - 1 - num_run_before;
                    self.translation.scatter(logits.row(row), &mut self.row);
                    // A row from which nothing can be drawn agrees with nothing.
                    let drawn = guess(&spec, task.cached.counts_mut(), position, &mut self.row);
                    task.agreed.push(drawn.is_ok_and(|drawn| drawn.token_id == next));
                }
            }
        }
    }

    /// Carries out a decision; `None` while the task needs another forward.
    pub(super) fn conclude(&mut self, task: &Task, decision: Decision) -> Option<ReplyBody> {
        let Decision::Done { body, keep } = decision else { return None };
        self.truncate(task.slot, keep);
        Some(body)
    }

    /// A step that came to nothing: its context stays.
    fn refuse_draw(&mut self, task: &mut Task, error: &dyn std::error::Error) -> ReplyBody {
        task.cached.cut(task.step.start());
        self.truncate(task.slot, task.step.start());
        ReplyBody::Refused { reason: error.to_string() }
    }
}
