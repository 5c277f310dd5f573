//! The executor of workers that run a model: the rows of all running tasks share each forward, up to a row
//! budget (`scheduling::batch`).
//!
//! A context runs in chunks (chunked prefill), so that a long prompt does not delay other tasks. The role
//! decides ([`RoleLogic`]) once the logits of the context's last row are available.

mod batch_entry;
mod outputs;

use std::collections::VecDeque;

use engine::{DrawRequest, Engine, NumAnswers, SequenceRows, TreeRows};
use scheduling::batch::{RowLimits, StepRows};
use speculation::cached_sequence::WorkerLimits;
use speculation::tree::MAX_TREE_TOKENS;
use speculation::{ReplyBody, Role, Work};

use self::batch_entry::{BatchEntry, batch_entry};
use crate::batch_plan::{FoundPrefix, choose_chunks, look_up_prefixes};
use crate::executor::{ExecutorCounters, ExecutorStats, OutOfKvBlocks, StepExecutor, pin_compute_threads};
use crate::failed_forward::on_failed_forward;
use crate::grammars::{GrammarStats, Grammars};
use crate::role_logic::RoleLogic;
use crate::task::{PrefixLookup, Slot, Task, take_finished};

/// Runs steps on an [`Engine`].
#[derive(Debug)]
pub struct ModelExecutor<D> {
    engine: Engine,
    role: Role,
    /// Number of ids that the tokenizer knows; logits of the model beyond it are padding and are never drawn.
    vocab_size: u32,
    max_batch_rows: usize,
    role_logic: D,
    /// `None`: sequences with a grammar are refused.
    grammars: Option<Grammars>,
    /// Cores that compute threads are pinned to; `None`: not pinned.
    cores: Option<Vec<usize>>,
    counts: ExecutorCounters,
}

/// Maximum ids of a token tree that a worker of this role verifies; 0: chains only.
pub(crate) fn max_tree_tokens(role: Role) -> u32 {
    if role == Role::Target { MAX_TREE_TOKENS as u32 } else { 0 }
}

impl<D: RoleLogic> ModelExecutor<D> {
    /// `max_batch_rows` bounds the rows of one forward, except that one task's last chunk is never split.
    pub fn new(engine: Engine, role: Role, vocab_size: u32, max_batch_rows: usize, role_logic: D) -> Self {
        let vocab_size = vocab_size.min(engine.info().vocab_size);
        Self {
            engine,
            role,
            vocab_size,
            max_batch_rows,
            role_logic,
            grammars: None,
            cores: None,
            counts: ExecutorCounters::default(),
        }
    }

    /// Pins the compute threads to `cores` when the device thread starts. `cores` has at least one core per
    /// thread.
    pub fn pinned_to(self, cores: Option<Vec<usize>>) -> Self {
        Self { cores, ..self }
    }

    /// Enables sequences with a grammar.
    pub fn with_grammars(self, grammars: Grammars) -> Self {
        Self { grammars: Some(grammars), ..self }
    }

    /// Plans the entries of the next forward; see [`crate::batch_plan`].
    fn plan(&mut self, tasks: &mut VecDeque<Task>, prompt_rows: u32) -> Vec<BatchEntry> {
        let is_ready = |task| self.grammars.as_mut().is_none_or(|grammars| grammars.is_ready(task));
        let is_ready: Vec<bool> = tasks.iter().map(is_ready).collect();
        look_up_prefixes(tasks, &is_ready, |task| self.share_prefix(task));
        let rows: Vec<StepRows> = tasks.iter().map(Task::rows_left).collect();
        let limits = RowLimits { all: self.max_batch_rows as u32, prompts: prompt_rows };
        let chunks = choose_chunks(&self.engine, limits, tasks, &is_ready, &rows);
        chunks.iter().map(|chunk| batch_entry(&tasks[chunk.index], chunk, self.role)).collect()
    }

    /// Shares the KV of a task's context that is in the prefix cache.
    fn share_prefix(&mut self, task: &Task) -> Option<FoundPrefix> {
        if task.is_scoring() {
            // A score needs its row computed.
            return None;
        }
        if task.prefix == PrefixLookup::Wanted {
            self.counts.prefix_query_tokens += task.step.append_ids.len() as u64;
        }
        let key = task.spec().isolation_key;
        let found = self.engine.share_prefix(task.slot, key, task.cached.ids());
        let context_done = (found.len - task.step.base_len) as usize;
        self.counts.prefix_hit_tokens += (context_done - task.context_done) as u64;
        Some(FoundPrefix { context_done, wait: found.wait })
    }

    /// Requests the masks of all entries that are decided on after the next forward.
    fn request_masks(&mut self, tasks: &VecDeque<Task>, plan: &[BatchEntry]) {
        let Some(grammars) = &mut self.grammars else { return };
        for entry in plan {
            let task = &tasks[entry.task];
            if entry.ends_context && task.step.work != Work::Feed {
                let guess = task.guesses.token_ids.last().copied();
                grammars.request_masks(task, guess.filter(|_| entry.num_context == 0));
            }
        }
    }
}

impl<D: RoleLogic> StepExecutor for ModelExecutor<D> {
    fn begin(&mut self) {
        pin_compute_threads(&mut self.engine, self.cores.as_deref());
    }

    fn limits(&self) -> WorkerLimits {
        WorkerLimits {
            role: self.role,
            vocab_size: self.vocab_size,
            max_model_len: self.engine.info().max_model_len,
            max_tree_tokens: max_tree_tokens(self.role),
            grammars: self.grammars.is_some(),
        }
    }

    fn open(&mut self) -> Slot {
        self.engine.open()
    }

    fn fork(&mut self, slot: Slot, len: u32) -> Option<Slot> {
        self.engine.fork(slot, len)
    }

    fn resume(&mut self, task: &mut Task) -> Option<ReplyBody> {
        let decision = self.role_logic.resume(task)?;
        self.apply_progress(task, decision)
    }

    fn close(&mut self, slot: Slot) {
        if let Some(grammars) = &mut self.grammars {
            grammars.close(slot);
        }
        self.engine.close(slot);
    }

    fn truncate(&mut self, slot: Slot, len: u32) {
        self.engine.truncate(slot, len);
    }

    fn advance(
        &mut self,
        tasks: &mut VecDeque<Task>,
        prompt_rows: u32,
    ) -> Result<Vec<(Task, ReplyBody)>, OutOfKvBlocks> {
        let mut plan = self.plan(tasks, prompt_rows);
        if plan.is_empty() && self.grammars.as_mut().is_some_and(|grammars| grammars.wait(tasks)) {
            plan = self.plan(tasks, prompt_rows);
            if plan.is_empty() {
                return Ok(Vec::new());
            }
        }
        if plan.is_empty() {
            return Err(OutOfKvBlocks);
        }
        self.request_masks(tasks, &plan);
        let batch: Vec<SequenceRows<'_>> = plan
            .iter()
            .map(|entry| SequenceRows {
                slot: tasks[entry.task].slot,
                token_ids: &entry.token_ids,
                num_logits: entry.num_logits,
            })
            .collect();
        let requests: Vec<Option<DrawRequest<'_>>> =
            plan.iter().map(|entry| self.draw_request(&tasks[entry.task], entry)).collect();
        let answers = |(request, entry): (&Option<DrawRequest<'_>>, &BatchEntry)| {
            request.map(|request| request.answers(entry.num_logits))
        };
        let num_answers: Vec<Option<NumAnswers>> = requests.iter().zip(&plan).map(answers).collect();
        let trees: Vec<TreeRows<'_>> = plan
            .iter()
            .enumerate()
            .filter(|(_, entry)| !entry.parents.is_empty())
            .map(|(sequence, entry)| {
                let BatchEntry { num_stored, parents, .. } = entry;
                TreeRows { sequence, num_stored: *num_stored, parents }
            })
            .collect();
        let ran = self.engine.forward_with_trees(&batch, &requests, &trees);
        let outcome = match ran {
            Ok(outcome) => outcome,
            Err(error) => {
                let failed = plan.iter().map(|entry| entry.task).collect();
                return Ok(on_failed_forward(self, tasks, failed, &error));
            }
        };
        self.counts.sequences += plan.len() as u64;
        let finished = self.process_outputs(tasks, plan.iter().zip(num_answers), outcome);
        Ok(take_finished(tasks, finished))
    }

    fn blocks_held(&self, slot: Slot) -> u64 {
        self.engine.blocks_held(slot)
    }

    fn stats(&self) -> ExecutorStats {
        let grammars = self.grammars.as_ref().map_or_else(GrammarStats::default, Grammars::stats);
        ExecutorStats::of_engine(&self.engine, self.counts, grammars)
    }
}

#[cfg(test)]
pub(crate) mod tests;
