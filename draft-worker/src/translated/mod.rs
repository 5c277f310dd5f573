//! The executor of a draft whose tokenizer differs from the target's. The wire, the sequence table and all
//! decisions use the target's ids; the engine runs the draft's own ids ([`text::translation`]).
//!
//! Guesses follow the same rule as without translation ([`crate::propose`]), on a row of the target's
//! vocabulary size that holds the draft's logits at the target's ids. So noise, penalties, filters, masks,
//! trees and rejection mode work as for any draft. The one difference: guesses are never drawn on a device.

mod batch_entry;
mod load;
mod outputs;

use std::collections::{HashMap, VecDeque};

use engine::{Engine, SequenceRows};
use speculation::cached_sequence::WorkerLimits;
use speculation::{Proposal, ReplyBody, Role, TokenId, Work};
use text::translation::{TranslatedSequence, Translation};
use worker::RoleLogic as _;
use worker::batch_plan::FoundPrefix;
use worker::executor::{ExecutorCounters, ExecutorStats, OutOfKvBlocks, StepExecutor, pin_compute_threads};
use worker::failed_forward::on_failed_forward;
use worker::grammars::Grammars;
use worker::task::{PrefixLookup, Slot, Task, take_finished};

use self::batch_entry::BatchEntry;
use crate::propose::Propose;

pub use load::load;

/// Runs steps in the target's ids on an engine with different ids.
#[derive(Debug)]
pub struct TranslatedExecutor {
    engine: Engine,
    /// Boxed because tokenizers are large.
    translation: Box<Translation>,
    role_logic: Propose,
    grammars: Grammars,
    max_batch_rows: usize,
    /// Cores that compute threads are pinned to; `None`: not pinned.
    cores: Option<Vec<usize>>,
    /// The cached sequences. The engine holds the KV of a prefix of each one's draft ids.
    sequences: HashMap<Slot, TranslatedSequence>,
    /// One row of logits, in the target's ids.
    row: Vec<f32>,
    counts: ExecutorCounters,
}

impl TranslatedExecutor {
    /// Updates the sequence of `task` to the task's ids including its latest guess, and drops the KV of all
    /// draft ids that changed.
    fn align(&mut self, task: &Task) {
        let sequence = self.sequences.get_mut(&task.slot).expect("tasks run on open slots");
        let guess = task.guesses.token_ids.last().copied();
        let target_ids: Vec<TokenId> = task.cached.ids().iter().copied().chain(guess).collect();
        let is_same = |(cached, target_ids): &(&TokenId, &TokenId)| cached == target_ids;
        let same = sequence.target_ids().iter().zip(&target_ids).take_while(is_same).count();
        sequence.truncate(same);
        let kept = match &target_ids[same..] {
            [] => sequence.draft_ids().len(),
            new => sequence.extend(&self.translation, new),
        };
        self.engine.truncate(task.slot, kept as u32);
    }

    /// Draft ids of `task` without KV.
    fn pending(&self, task: &Task) -> &[TokenId] {
        &self.sequences[&task.slot].draft_ids()[self.engine.len(task.slot) as usize..]
    }

    /// Aligns every task and answers those that need no forward.
    fn answer_at_once(&mut self, tasks: &mut VecDeque<Task>) -> Vec<(Task, ReplyBody)> {
        let mut finished = Vec::new();
        for (index, task) in tasks.iter_mut().enumerate() {
            self.align(task);
            let body = self.answer_without_rows(task);
            finished.extend(body.map(|body| (index, body)));
        }
        take_finished(tasks, finished)
    }

    /// Answers a task that needs no row, whose draft ids exceed the draft's window, or whose draft ids do not
    /// end where the text ends.
    fn answer_without_rows(&mut self, task: &mut Task) -> Option<ReplyBody> {
        let sequence = &self.sequences[&task.slot];
        let has_room = sequence.draft_ids().len() <= self.engine.info().max_model_len as usize;
        let is_run = self.pending(task).is_empty();
        let start = task.step.start();
        let body = match task.step.work {
            Work::Propose { .. } if !has_room || !sequence.is_covered() => {
                ReplyBody::Proposal(Proposal { start, draft: task.guesses.clone() })
            }
            Work::Propose { .. } => {
                if is_run {
                    // The last id must run again, because only its row predicts the next id.
                    self.engine.truncate(task.slot, self.engine.len(task.slot) - 1);
                }
                return None;
            }
            Work::Feed | Work::Verify { .. } if has_room && !is_run => return None,
            Work::Feed | Work::Verify { .. } => ReplyBody::Fed { cached_len: start, prompt_logprobs: None },
        };
        task.context_done = task.step.append_ids.len();
        self.truncate(task.slot, task.cached.len());
        Some(body)
    }

    /// Shares the KV of a task's draft ids that is in the prefix cache.
    fn share_prefix(&mut self, task: &Task) -> FoundPrefix {
        let ids = self.sequences[&task.slot].draft_ids();
        let len = self.engine.len(task.slot);
        if task.prefix == PrefixLookup::Wanted {
            self.counts.prefix_query_tokens += ids.len() as u64 - u64::from(len);
        }
        let key = task.cached.spec().map_or(0, |spec| spec.isolation_key);
        let found = self.engine.share_prefix(task.slot, key, ids);
        self.counts.prefix_hit_tokens += u64::from(found.len - len);
        FoundPrefix { context_done: self.num_covered_context(task), wait: found.wait }
    }

    /// Number of context ids whose draft ids all have KV. The last context id never counts, because the last
    /// row has to run.
    fn num_covered_context(&self, task: &Task) -> usize {
        let num_run = self.engine.len(task.slot) as usize;
        let covered = self.sequences[&task.slot].num_covered(num_run);
        let most = task.step.append_ids.len().saturating_sub(1);
        covered.saturating_sub(task.step.base_len as usize).min(most)
    }

    /// Requests the masks of all entries that are decided on after the next forward.
    fn request_masks(&mut self, tasks: &VecDeque<Task>, plan: &[BatchEntry]) {
        for entry in plan.iter().filter(|entry| entry.decides) {
            let task = &tasks[entry.task];
            self.grammars.request_masks(task, task.guesses.token_ids.last().copied());
        }
    }

    /// Runs one forward of `plan` and returns the finished tasks with their replies.
    fn run(&mut self, tasks: &mut VecDeque<Task>, plan: &[BatchEntry]) -> Vec<(Task, ReplyBody)> {
        let batch: Vec<SequenceRows<'_>> = plan
            .iter()
            .map(|entry| SequenceRows {
                slot: tasks[entry.task].slot,
                token_ids: &entry.draft_ids,
                num_logits: entry.num_logits(),
            })
            .collect();
        let logits = match self.engine.forward(&batch) {
            Ok(logits) => logits,
            Err(error) => {
                let failed = plan.iter().map(|entry| entry.task).collect();
                return on_failed_forward(self, tasks, failed, &error);
            }
        };
        self.counts.sequences += plan.len() as u64;
        let (mut finished, mut row) = (Vec::new(), 0);
        for entry in plan {
            let first_row = row;
            row += entry.num_logits();
            let body = self.process_logits(&mut tasks[entry.task], entry, (&logits, first_row));
            finished.extend(body.map(|body| (entry.task, body)));
        }
        take_finished(tasks, finished)
    }
}

impl StepExecutor for TranslatedExecutor {
    fn begin(&mut self) {
        pin_compute_threads(&mut self.engine, self.cores.as_deref());
    }

    /// In the target's ids and positions.
    fn limits(&self) -> WorkerLimits {
        WorkerLimits {
            role: Role::Draft,
            vocab_size: self.translation.num_target_ids() as u32,
            max_model_len: self.engine.info().max_model_len,
            max_tree_tokens: 0,
            grammars: true,
        }
    }

    fn open(&mut self) -> Slot {
        let slot = self.engine.open();
        self.sequences.insert(slot, TranslatedSequence::default());
        slot
    }

    fn fork(&mut self, slot: Slot, len: u32) -> Option<Slot> {
        let sequence = self.sequences.get(&slot);
        let mut fork = sequence.filter(|sequence| sequence.target_ids().len() >= len as usize)?.clone();
        fork.truncate(len as usize);
        let kv_len = self.engine.len(slot).min(fork.draft_ids().len() as u32);
        let slot = self.engine.fork(slot, kv_len)?;
        self.sequences.insert(slot, fork);
        Some(slot)
    }

    fn resume(&mut self, task: &mut Task) -> Option<ReplyBody> {
        let decision = self.role_logic.resume(task)?;
        self.apply_progress(task, decision)
    }

    fn close(&mut self, slot: Slot) {
        self.grammars.close(slot);
        self.sequences.remove(&slot);
        self.engine.close(slot);
    }

    fn truncate(&mut self, slot: Slot, len: u32) {
        let sequence = self.sequences.get_mut(&slot).expect("only open slots are truncated");
        sequence.truncate(len as usize);
        self.engine.truncate(slot, sequence.draft_ids().len() as u32);
    }

    fn advance(
        &mut self,
        tasks: &mut VecDeque<Task>,
        prompt_rows: u32,
    ) -> Result<Vec<(Task, ReplyBody)>, OutOfKvBlocks> {
        let mut finished = self.answer_at_once(tasks);
        let mut plan = self.plan(tasks, prompt_rows);
        if plan.is_empty() && finished.is_empty() && self.grammars.wait(tasks) {
            plan = self.plan(tasks, prompt_rows);
            if plan.is_empty() {
                return Ok(Vec::new());
            }
        }
        if plan.is_empty() {
            return if finished.is_empty() { Err(OutOfKvBlocks) } else { Ok(finished) };
        }
        self.request_masks(tasks, &plan);
        finished.extend(self.run(tasks, &plan));
        Ok(finished)
    }

    fn blocks_held(&self, slot: Slot) -> u64 {
        self.engine.blocks_held(slot)
    }

    fn stats(&self) -> ExecutorStats {
        ExecutorStats::of_engine(&self.engine, self.counts, self.grammars.stats())
    }
}
