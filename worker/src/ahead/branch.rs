//! One outcome of a verification, and the step that would follow it.

use std::time::Instant;

use speculation::acceptance::supports_trees;
use speculation::cached_sequence::CachedSequence;
use speculation::tree::{Candidates, ranked_alternatives};
use speculation::{Draft, Proposal, SequenceSpec, Step, TokenId, Work};

use super::PrecomputedDraft;
use crate::executor::StepExecutor;
use crate::table::SequenceKey;
use crate::task::{PrefixLookup, Slot, Task};

/// Number of a proposal's branches reserved for alternatives to the token after the whole chain: a quarter,
/// at least two.
fn num_bonus_branches(max_branches: usize) -> usize {
    (max_branches / 4).max(2)
}

/// A proposal that was sent.
#[derive(Debug)]
pub(super) struct SentProposal {
    key: SequenceKey,
    /// The proposal's step without its context; each branch has its own context.
    step: Step,
    start: u32,
    chain: Vec<TokenId>,
    candidates: Vec<Candidates>,
    draft: Draft,
}

/// The step after one outcome, as far as it has run.
#[derive(Debug)]
pub(super) struct Branch {
    /// `None` while the task runs.
    task: Option<Task>,
    slot: Slot,
    /// When it had been drafted to its end, or was dropped.
    ended_at: Option<Instant>,
    /// Position where the outcome differs from the chain; `None` if the whole chain is accepted.
    differs_at: Option<u32>,
}

/// An outcome to draft ahead of.
struct VerifyOutcome {
    /// Number of tokens before the last one.
    end: u32,
    /// The last token.
    token_id: TokenId,
    differs_at: Option<u32>,
    /// How many positions past the end of a proposal to guess.
    extra_positions: u32,
}

impl SentProposal {
    /// `None` if drafting ahead is not possible: the committed tokens are not the target's own draws, masks
    /// are needed, or nothing was proposed.
    pub(super) fn new(task: &mut Task, proposal: &Proposal) -> Option<Self> {
        let chain = std::mem::take(&mut task.guesses.token_ids);
        if chain.is_empty() || !supports_trees(task.spec()) {
            return None;
        }
        let candidates = std::mem::take(&mut task.candidates);
        let Step { sequence_id, epoch, step_seq, prefix_hash, ref work, .. } = task.step;
        let (base_len, append_ids, work) = (proposal.start, Vec::new(), work.clone());
        let step = Step { sequence_id, epoch, step_seq, spec: None, base_len, prefix_hash, append_ids, work };
        let draft = proposal.draft.clone();
        Some(Self { key: task.key, step, start: proposal.start, chain, candidates, draft })
    }

    pub(super) fn epoch(&self) -> u32 {
        self.step.epoch
    }

    /// Position of its first id.
    pub(super) fn start(&self) -> u32 {
        self.start
    }

    /// Returns branches for the likeliest outcomes: the whole chain first, then the best-ranked alternatives.
    pub(super) fn branches<M: StepExecutor>(
        &self,
        executor: &mut M,
        (slot, cached): (Slot, &CachedSequence),
        max_branches: usize,
    ) -> Vec<Branch> {
        let Some(spec) = cached.spec() else { return Vec::new() };
        let behind = self.start + self.chain.len() as u32 - 1;
        let last = self.chain[self.chain.len() - 1];
        let whole = VerifyOutcome { end: behind, token_id: last, differs_at: None, extra_positions: 1 };
        let known = if self.candidates.len() == self.chain.len() {
            ranked_alternatives(&self.candidates)
        } else {
            Vec::new()
        };
        let others = known.iter().map(|alternative| {
            let token_id = self.candidates[alternative.position].token_ids[alternative.rank];
            let end = self.start + alternative.position as u32;
            let extra_positions = u32::from(self.was_sent(alternative.position, token_id));
            VerifyOutcome { end, token_id, differs_at: Some(end), extra_positions }
        });
        let most = max_branches.saturating_sub(num_bonus_branches(max_branches)).max(1);
        std::iter::once(whole)
            .chain(others)
            .filter_map(|outcome| self.open(executor, (slot, cached, spec), outcome))
            .take(most)
            .collect()
    }

    /// Once the branch after the whole chain has its first guess, returns branches for the next best tokens
    /// at that position.
    pub(super) fn bonus_branches<M: StepExecutor>(
        &self,
        executor: &mut M,
        branches: &[Branch],
        max_branches: usize,
    ) -> Vec<Branch> {
        let is_new = |task: &Task| task.guesses.token_ids.len() == 1;
        let whole = branches
            .iter()
            .find(|branch| branch.differs_at.is_none())
            .and_then(|branch| branch.task.as_ref());
        let Some(task) = whole.filter(|task| is_new(task)) else { return Vec::new() };
        let end = task.step.start();
        if branches.iter().any(|branch| branch.differs_at == Some(end)) {
            return Vec::new();
        }
        let Some(next_best) = task.candidates.first() else { return Vec::new() };
        let num = num_bonus_branches(max_branches).min(max_branches.saturating_sub(branches.len()));
        next_best.token_ids[1..]
            .iter()
            .filter_map(|&token_id| {
                let outcome = VerifyOutcome { end, token_id, differs_at: Some(end), extra_positions: 0 };
                self.open(executor, (task.slot, &task.cached, task.spec()), outcome)
            })
            .take(num)
            .collect()
    }

    /// Whether the proposal also contains `token_id` beside the chain. If so, the target draws one more token
    /// after it.
    fn was_sent(&self, position: usize, token_id: TokenId) -> bool {
        let row = self.chain[..position].iter().try_fold(0, |row, &id| self.draft.child(row, id));
        row.is_some_and(|row| self.draft.child(row, token_id).is_some())
    }

    /// Creates the task of the step after an outcome. Returns `None` after a stop token, at the end of the
    /// window, or if the executor cannot fork.
    fn open<M: StepExecutor>(
        &self,
        executor: &mut M,
        (slot, cached, spec): (Slot, &CachedSequence, &SequenceSpec),
        outcome: VerifyOutcome,
    ) -> Option<Branch> {
        let Work::Propose { num_draft_tokens, num_tree_tokens } = self.step.work else { return None };
        let VerifyOutcome { end, token_id, differs_at, extra_positions } = outcome;
        let num_draft_tokens = num_draft_tokens + extra_positions;
        let window = spec.max_len.min(executor.limits().max_model_len);
        if spec.stop_token_ids.contains(&token_id) || end + 1 + num_draft_tokens >= window {
            return None;
        }
        let slot = executor.fork(slot, end)?;
        let mut cached = cached.clone();
        cached.truncate(end);
        cached.append(&[token_id]);
        let work = Work::Propose { num_draft_tokens, num_tree_tokens };
        let step = Step { base_len: end, append_ids: vec![token_id], work, ..self.step.clone() };
        let mut task = Task::new(self.key, slot, step, cached, Instant::now());
        task.prefix = PrefixLookup::Done;
        Some(Branch { task: Some(task), slot, ended_at: None, differs_at })
    }
}

impl Branch {
    pub(super) fn is_unfinished(&self) -> bool {
        self.ended_at.is_none()
    }

    pub(super) fn has_guesses(&self) -> bool {
        self.task.as_ref().is_some_and(|task| !task.guesses.token_ids.is_empty())
    }

    pub(super) fn take_unfinished(&mut self) -> Option<Task> {
        if self.is_unfinished() { self.task.take() } else { None }
    }

    pub(super) fn owns_task(&self, task: &Task) -> bool {
        self.task.is_none() && self.slot == task.slot
    }

    pub(super) fn put_back(&mut self, task: Task, is_finished: bool) {
        self.ended_at = is_finished.then(Instant::now);
        self.task = Some(task);
    }

    /// Marks the branch as finished after its task was dropped.
    pub(super) fn mark_finished(&mut self) {
        self.ended_at = Some(Instant::now());
    }

    pub(super) fn close<M: StepExecutor>(self, executor: &mut M) {
        if let Some(task) = self.task {
            executor.close(task.slot);
        }
    }

    /// Returns how many of the branch's guesses were committed, if `committed` is this outcome followed by
    /// zero or more of its guesses.
    pub(super) fn num_committed_guesses(&self, committed: &[TokenId]) -> Option<usize> {
        let task = self.task.as_ref().filter(|_| self.has_guesses())?;
        let guesses = &task.guesses.token_ids;
        let end = task.step.start() as usize;
        let consumed = committed.len().checked_sub(end).filter(|&consumed| consumed <= guesses.len())?;
        let is_it = committed[..end] == task.cached.ids()[..end] && committed[end..] == guesses[..consumed];
        is_it.then_some(consumed)
    }

    /// Converts the branch to the work that it saves `step`, once `consumed` of its guesses are committed.
    pub(super) fn into_draft(self, consumed: usize, step: &Step) -> Option<PrecomputedDraft> {
        let Self { task, differs_at, ended_at, .. } = self;
        let task = task?;
        let guesses = task.guesses.token_ids[consumed..].to_vec();
        let candidates = task.candidates.get(consumed..).unwrap_or_default().to_vec();
        // The last guess has not run yet; if it is committed, its row is still missing.
        let context_done = step.append_ids.len() - usize::from(guesses.is_empty());
        let agreed = (step.base_len + 1..step.start()).map(|position| Some(position) != differs_at).collect();
        Some(PrecomputedDraft { slot: task.slot, guesses, candidates, context_done, agreed, ended_at })
    }
}
