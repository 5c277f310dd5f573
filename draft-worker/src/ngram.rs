//! Drafting without a model: proposes the ids that followed an earlier occurrence of the last few tokens.

use std::collections::VecDeque;

use speculation::acceptance::effective_mode;
use speculation::cached_sequence::WorkerLimits;
use speculation::{AcceptanceMode, Draft, Proposal, ReplyBody, Role, Work};
use worker::Task;
use worker::executor::{ExecutorStats, OutOfKvBlocks, StepExecutor};
use worker::task::Slot;

/// The n-gram executor; keeps ids only. See [`speculation::ngram::propose`].
#[derive(Debug, Default)]
pub struct NgramExecutor {
    next_slot: u64,
}

impl StepExecutor for NgramExecutor {
    fn limits(&self) -> WorkerLimits {
        WorkerLimits {
            role: Role::Draft,
            vocab_size: u32::MAX,
            max_model_len: u32::MAX,
            max_tree_tokens: 0,
            grammars: true,
        }
    }

    fn open(&mut self) -> Slot {
        self.next_slot += 1;
        Slot(self.next_slot)
    }

    fn close(&mut self, _slot: Slot) {}

    fn truncate(&mut self, _slot: Slot, _len: u32) {}

    fn advance(
        &mut self,
        tasks: &mut VecDeque<Task>,
        _prompt_rows: u32,
    ) -> Result<Vec<(Task, ReplyBody)>, OutOfKvBlocks> {
        Ok(tasks.drain(..).map(answer).collect())
    }

    fn blocks_held(&self, _slot: Slot) -> u64 {
        0
    }

    fn stats(&self) -> ExecutorStats {
        ExecutorStats::default()
    }
}

fn answer(mut task: Task) -> (Task, ReplyBody) {
    let start = task.step.start();
    let Work::Propose { num_draft_tokens, .. } = task.step.work else {
        return (task, ReplyBody::Fed { cached_len: start, prompt_logprobs: None });
    };
    let token_ids = speculation::ngram::propose(task.cached.ids(), num_draft_tokens as usize);
    let q = match effective_mode(task.spec()) {
        AcceptanceMode::Rejection => speculation::ngram::point_distributions(&token_ids),
        AcceptanceMode::Coupled | AcceptanceMode::Typical => Vec::new(),
    };
    // As with a model, all guesses but the last are cached.
    task.cached.append(&token_ids[..token_ids.len().saturating_sub(1)]);
    (task, ReplyBody::Proposal(Proposal { start, draft: Draft { q, ..Draft::chain(token_ids) } }))
}
