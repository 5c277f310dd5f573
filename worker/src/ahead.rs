//! Drafting ahead: while a target verifies a proposal, its draft worker continues from the likeliest outcomes
//! of the verification.
//!
//! A *branch* is the step that a router would send after one outcome of the verification: the whole proposal
//! is accepted, or it is accepted up to some position and a different token follows
//! ([`speculation::tree::ranked_alternatives`] ranks these). Branches run when the worker is otherwise idle,
//! one row each in a shared forward pass, on forks of the sequence's KV. The next step of the sequence shows
//! which outcome occurred. If a branch matches it, the branch's KV becomes the sequence's KV and its guesses
//! become the proposal, however many there are. They equal the guesses that the step itself would have
//! computed, because a row depends only on its sequence (contract I4). All other branches are closed. (Kumar,
//! Dao, May, "Speculative speculative decoding", arXiv 2603.03251.)

mod branch;
mod gain_tracker;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use speculation::cached_sequence::CachedSequence;
use speculation::tree::Candidates;
use speculation::{Proposal, ProposalAhead, ReplyBody, Step, TokenId, Work};

use self::branch::{Branch, SentProposal};
use self::gain_tracker::GainTracker;
use crate::executor::StepExecutor;
use crate::table::{RouterId, SequenceKey, SequenceTable};
use crate::task::{Slot, Task};

/// A worker with more sequences does not draft ahead. Steps of several sequences share forward passes at the
/// draft worker and at the target. If some steps are answered at once and others are not, the sequences fall
/// out of step and each needs its own forward passes. Simulated with 70B on H100s and drafts on one L4,
/// drafting ahead makes one sequence 1.3 times as fast, two 1.1 times, and four 0.91 times
/// (docs/measurements/bench.md).
const MAX_SEQUENCES: usize = 2;

/// Counters of drafting ahead since start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AheadStats {
    /// Steps that matched a branch.
    pub hits: u64,
    /// Steps that matched none of the branches.
    pub misses: u64,
    /// Steps that arrived before anything was guessed ahead of them.
    pub too_early: u64,
    /// Guesses of proposals that were ready when the step arrived.
    pub guesses: u64,
    /// Rows computed in forward passes of branches.
    pub rows: u64,
}

/// Work computed ahead of a step.
#[derive(Debug)]
pub struct PrecomputedDraft {
    /// Holds the KV of the step's context and of all guesses but the last.
    pub slot: Slot,
    /// Guesses after the context.
    pub guesses: Vec<TokenId>,
    /// Alternatives to each guess, as far as they are known.
    pub candidates: Vec<Candidates>,
    /// Number of context ids whose KV is computed.
    pub context_done: usize,
    /// For each context id but the first, whether the worker guessed it.
    pub agreed: Vec<bool>,
    /// When the branch had been drafted to its end and was sent to the router.
    ended_at: Option<Instant>,
}

impl PrecomputedDraft {
    /// Whether the router was sent these guesses before the step arrived at `received`. It then does not wait
    /// for that step's answer.
    fn was_sent_before(&self, received: Instant) -> bool {
        !self.guesses.is_empty() && self.ended_at.is_some_and(|ended_at| ended_at <= received)
    }
}

/// The branches of all sequences whose proposals are being verified. See the module documentation.
#[derive(Debug)]
pub struct DraftAhead {
    /// Maximum branches per proposal and rows per forward pass; 0 disables drafting ahead.
    max_branches: usize,
    proposals: HashMap<SequenceKey, AheadProposal>,
    /// Sequences with branches to run, oldest proposal first.
    order: VecDeque<SequenceKey>,
    gain_tracker: GainTracker,
    stats: AheadStats,
}

/// The possible outcomes of one proposal.
#[derive(Debug)]
struct AheadProposal {
    proposed: SentProposal,
    /// `None` until the first branch is about to run.
    branches: Option<Vec<Branch>>,
}

impl DraftAhead {
    /// Creates a `DraftAhead` with at most `max_branches` branches per proposal; 0 disables drafting ahead.
    pub fn new(max_branches: usize) -> Self {
        Self {
            max_branches,
            proposals: HashMap::new(),
            order: VecDeque::new(),
            gain_tracker: GainTracker::default(),
            stats: AheadStats::default(),
        }
    }

    /// Whether this worker drafts ahead at all. What it guesses ahead are chains, so none of its proposals is
    /// a tree with branches.
    pub fn is_enabled(&self) -> bool {
        self.max_branches > 0
    }

    /// Counters since start.
    pub fn stats(&self) -> AheadStats {
        self.stats
    }

    /// Maximum rows of the next forward pass of branches; `None` if there is nothing to draft ahead.
    pub fn next_rows(&self) -> Option<u32> {
        (!self.order.is_empty()).then_some(self.max_branches as u32)
    }

    /// Records the duration of a forward pass of steps without prompts: the time that one guess made ahead
    /// saves.
    pub fn record_forward(&mut self, took: Duration) {
        self.gain_tracker.record_forward(took);
    }

    /// Called after a step of one of `num_sequences` sequences was answered. If the answer is a proposal, its
    /// outcomes can be drafted ahead from now on.
    pub fn on_reply(&mut self, task: &mut Task, body: &ReplyBody, num_sequences: usize) {
        let ReplyBody::Proposal(proposal) = body else { return };
        if self.max_branches == 0 || num_sequences > MAX_SEQUENCES || !self.gain_tracker.should_draft_ahead()
        {
            return;
        }
        if let Some(proposed) = SentProposal::new(task, proposal) {
            self.order.push_back(task.key);
            self.proposals.insert(task.key, AheadProposal { proposed, branches: None });
        }
    }

    /// Runs one forward pass over branches. Returns its number of rows, and what was drafted to its end with
    /// the router that it is for.
    pub fn forward<M: StepExecutor>(
        &mut self,
        executor: &mut M,
        table: &mut SequenceTable,
    ) -> (u32, Vec<(RouterId, ProposalAhead)>) {
        let began = Instant::now();
        let mut tasks: VecDeque<Task> = VecDeque::new();
        let mut members: Vec<SequenceKey> = Vec::new();
        while tasks.len() < self.max_branches
            && let Some(key) = self.order.pop_front()
        {
            self.branch(executor, table, key);
            let Some(branches) = self.proposals.get_mut(&key).and_then(|proposal| proposal.branches.as_mut())
            else {
                continue;
            };
            let room = self.max_branches - tasks.len();
            tasks.extend(branches.iter_mut().filter_map(Branch::take_unfinished).take(room));
            members.push(key);
        }
        let rows_before = executor.stats().rows;
        let finished = if tasks.is_empty() { Ok(Vec::new()) } else { executor.advance(&mut tasks, u32::MAX) };
        let rows = executor.stats().rows - rows_before;
        self.stats.rows += rows;
        let mut drafted = Vec::new();
        match finished {
            Ok(finished) => {
                for (task, body) in finished {
                    let (router, proposal) = (task.key.router, self.drafted(&task, body));
                    self.put_back(executor, task, proposal.is_some().then_some(true));
                    drafted.extend(proposal.map(|proposal| (router, proposal)));
                }
                tasks.into_iter().for_each(|task| self.put_back(executor, task, Some(false)));
            }
            // Out of KV blocks: drop the branches.
            Err(_) => tasks.into_iter().for_each(|task| self.put_back(executor, task, None)),
        }
        for key in members.into_iter().rev() {
            let Some(proposal) = self.proposals.get_mut(&key) else { continue };
            proposal.add_bonus_branches(executor, self.max_branches);
            if proposal.branches.iter().flatten().any(Branch::is_unfinished) {
                self.order.push_front(key);
            }
        }
        self.gain_tracker.record_branch_forward(began, Instant::now());
        (u32::try_from(rows).unwrap_or(u32::MAX), drafted)
    }

    /// What a router needs of a branch that `body` ends; `None` if that is no proposal.
    fn drafted(&self, task: &Task, body: ReplyBody) -> Option<ProposalAhead> {
        let ReplyBody::Proposal(Proposal { draft, .. }) = body else { return None };
        let outcome_start = self.proposals.get(&task.key)?.proposed.start() as usize;
        let Step { sequence_id, epoch, step_seq, .. } = task.step;
        let committed_ids = task.cached.ids()[outcome_start..task.step.start() as usize].to_vec();
        Some(ProposalAhead { sequence_id, epoch, step_seq, committed_ids, draft })
    }

    /// Creates the branches of a sequence if it has none and memory allows: at least half of the KV blocks
    /// must be free.
    fn branch<M: StepExecutor>(&mut self, executor: &mut M, table: &mut SequenceTable, key: SequenceKey) {
        let Some(proposal) = self.proposals.get_mut(&key).filter(|proposal| proposal.branches.is_none())
        else {
            return;
        };
        let stats = executor.stats();
        let has_room = 2 * stats.kv_blocks_used <= stats.kv_blocks_total;
        let entry = table.get_mut(&key);
        let branches = match entry.and_then(|entry| entry.cached.as_ref().map(|cached| (entry.slot, cached)))
        {
            Some((slot, cached)) if has_room => {
                proposal.proposed.branches(executor, (slot, cached), self.max_branches)
            }
            _ => Vec::new(),
        };
        proposal.branches = Some(branches);
    }

    /// Puts a branch's task back: `Some(true)` if finished, `Some(false)` if not, `None` to close it.
    fn put_back<M: StepExecutor>(&mut self, executor: &mut M, task: Task, finished: Option<bool>) {
        let branches = self.proposals.get_mut(&task.key).and_then(|proposal| proposal.branches.as_mut());
        let place = branches.and_then(|branches| branches.iter_mut().find(|branch| branch.owns_task(&task)));
        match (place, finished) {
            (Some(branch), Some(is_finished)) => branch.put_back(task, is_finished),
            (place, _) => {
                executor.close(task.slot);
                place.into_iter().for_each(Branch::mark_finished);
            }
        }
    }

    /// Returns the work computed ahead of `step`, if any; `cached` already holds the step's context.
    /// Everything else computed ahead for this sequence is dropped.
    pub fn take<M: StepExecutor>(
        &mut self,
        executor: &mut M,
        (key, step, cached): (&SequenceKey, &Step, &CachedSequence),
        received: Instant,
    ) -> Option<PrecomputedDraft> {
        let found = self.take_branch(executor, (key, step, cached));
        let is_at_router = found.as_ref().is_some_and(|found| found.was_sent_before(received));
        if !is_at_router {
            self.gain_tracker.record_admission(received);
        }
        found
    }

    fn take_branch<M: StepExecutor>(
        &mut self,
        executor: &mut M,
        (key, step, cached): (&SequenceKey, &Step, &CachedSequence),
    ) -> Option<PrecomputedDraft> {
        let proposal = self.remove(key)?;
        let num_asked = match step.work {
            Work::Propose { num_draft_tokens, .. } => Some(num_draft_tokens as usize),
            Work::Feed | Work::Verify { .. } => None,
        };
        let is_same = step.epoch == proposal.proposed.epoch() && step.spec.is_none();
        let branches = proposal.branches.unwrap_or_default();
        let has_guesses = branches.iter().any(Branch::has_guesses);
        let mut found = None;
        for branch in branches {
            let consumed = branch
                .num_committed_guesses(cached.ids())
                .filter(|_| found.is_none() && num_asked.is_some() && is_same);
            match consumed {
                Some(consumed) => found = branch.into_draft(consumed, step),
                None => branch.close(executor),
            }
        }
        if let Some(num_asked) = num_asked {
            match &found {
                Some(found) => {
                    self.stats.hits += 1;
                    self.stats.guesses += found.guesses.len() as u64;
                    self.gain_tracker.record_saved(found.guesses.len().min(num_asked));
                }
                None if has_guesses => self.stats.misses += 1,
                None => self.stats.too_early += 1,
            }
        }
        found
    }

    /// Drops everything computed ahead for one sequence.
    pub fn drop_sequence<M: StepExecutor>(&mut self, executor: &mut M, key: &SequenceKey) {
        if let Some(proposal) = self.remove(key) {
            proposal.close(executor);
        }
    }

    /// Drops everything computed ahead; returns whether there were branches.
    pub fn drop_all<M: StepExecutor>(&mut self, executor: &mut M) -> bool {
        self.order.clear();
        let proposals = std::mem::take(&mut self.proposals);
        let had_branches = proposals
            .values()
            .any(|proposal| proposal.branches.as_ref().is_some_and(|list| !list.is_empty()));
        proposals.into_values().for_each(|proposal| proposal.close(executor));
        had_branches
    }

    fn remove(&mut self, key: &SequenceKey) -> Option<AheadProposal> {
        let proposal = self.proposals.remove(key)?;
        self.order.retain(|waiting| waiting != key);
        Some(proposal)
    }
}

impl AheadProposal {
    /// Once the worker has guessed the token after the whole proposal, adds branches for the next best tokens
    /// at that position.
    fn add_bonus_branches<M: StepExecutor>(&mut self, executor: &mut M, max_branches: usize) {
        let Some(branches) = &mut self.branches else { return };
        let more = self.proposed.bonus_branches(executor, branches, max_branches);
        branches.extend(more);
    }

    fn close<M: StepExecutor>(self, executor: &mut M) {
        self.branches.into_iter().flatten().for_each(|branch| branch.close(executor));
    }
}
