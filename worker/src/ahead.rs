//! Drafting ahead: while a target verifies a proposal, its draft worker continues from the likeliest outcomes
//! of the verification.
//!
//! A *branch* is the step that a router would send after one outcome of the verification: the whole proposal
//! is accepted, or it is accepted up to some position and a different token follows
//! ([`speculation::tree::rivals`] ranks these). Branches run when the worker is otherwise idle, one row each
//! in a shared forward pass, on forks of the sequence's KV. The next step of the sequence shows which outcome
//! occurred. If a branch matches it, the branch's KV becomes the sequence's KV and its guesses become the
//! proposal, however many there are. They equal the guesses that the step itself would have computed, because
//! a row depends only on its sequence (contract I4). All other branches are closed. (Kumar, Dao, May,
//! "Speculative speculative decoding", arXiv 2603.03251.)

mod balance;
mod branch;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use speculation::cached_sequence::CachedSequence;
use speculation::tree::Candidates;
use speculation::{ReplyBody, Step, TokenId, Work};

use self::balance::Balance;
use self::branch::{Branch, Proposed};
use crate::method::Method;
use crate::table::{SequenceKey, Table};
use crate::task::{Slot, Task};

/// A worker with more sequences does not draft ahead. Steps of several sequences share forward passes at the
/// draft worker and at the target. If some steps are answered at once and others are not, the sequences fall
/// out of step and each needs its own forward passes. Simulated with 70B on H100s and drafts on one L4,
/// drafting ahead makes one sequence 1.25 times as fast, two 1.09 times, and four 0.91 times
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
pub struct Found {
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
}

/// The branches of all sequences whose proposals are being verified. See the module documentation.
#[derive(Debug)]
pub struct Ahead {
    /// Maximum branches per proposal and rows per forward pass; 0 disables drafting ahead.
    max_branches: usize,
    outcomes: HashMap<SequenceKey, Outcomes>,
    /// Sequences with branches to run, oldest proposal first.
    order: VecDeque<SequenceKey>,
    balance: Balance,
    stats: AheadStats,
}

/// The possible outcomes of one proposal.
#[derive(Debug)]
struct Outcomes {
    proposed: Proposed,
    /// `None` until the first branch is about to run.
    branches: Option<Vec<Branch>>,
}

impl Ahead {
    /// Creates an `Ahead` with at most `max_branches` branches per proposal; 0 disables drafting ahead.
    pub fn new(max_branches: usize) -> Self {
        Self {
            max_branches,
            outcomes: HashMap::new(),
            order: VecDeque::new(),
            balance: Balance::default(),
            stats: AheadStats::default(),
        }
    }

    /// Counters since start.
    pub fn stats(&self) -> AheadStats {
        self.stats
    }

    /// Maximum rows of the next forward pass of branches; `None` if there is nothing to draft ahead.
    pub fn rows(&self) -> Option<u32> {
        (!self.order.is_empty()).then_some(self.max_branches as u32)
    }

    /// Records the duration of a forward pass of steps: the time that one guess made ahead saves.
    pub fn ran(&mut self, took: Duration) {
        self.balance.ran(took);
    }

    /// Called after a step of one of `num_sequences` sequences was answered. If the answer is a proposal, its
    /// outcomes can be drafted ahead from now on.
    pub fn answered(&mut self, task: &mut Task, body: &ReplyBody, num_sequences: usize) {
        let ReplyBody::Proposal(proposal) = body else { return };
        if self.max_branches == 0 || num_sequences > MAX_SEQUENCES || !self.balance.pays() {
            return;
        }
        if let Some(proposed) = Proposed::new(task, proposal) {
            self.order.push_back(task.key);
            self.outcomes.insert(task.key, Outcomes { proposed, branches: None });
        }
    }

    /// Runs one forward pass over branches and returns its number of rows.
    pub fn forward<M: Method>(&mut self, method: &mut M, table: &mut Table) -> u32 {
        let began = Instant::now();
        let mut tasks: VecDeque<Task> = VecDeque::new();
        let mut members: Vec<SequenceKey> = Vec::new();
        while tasks.len() < self.max_branches
            && let Some(key) = self.order.pop_front()
        {
            self.branch(method, table, key);
            let Some(branches) = self.outcomes.get_mut(&key).and_then(|outcomes| outcomes.branches.as_mut())
            else {
                continue;
            };
            tasks.extend(branches.iter_mut().filter_map(Branch::take_unfinished));
            members.push(key);
        }
        let rows_before = method.stats().rows;
        let finished = if tasks.is_empty() { Ok(Vec::new()) } else { method.advance(&mut tasks, u32::MAX) };
        let rows = method.stats().rows - rows_before;
        self.stats.rows += rows;
        match finished {
            Ok(finished) => {
                for (task, body) in finished {
                    self.put_back(method, task, matches!(body, ReplyBody::Proposal(_)).then_some(true));
                }
                tasks.into_iter().for_each(|task| self.put_back(method, task, Some(false)));
            }
            // Out of KV blocks: drop the branches.
            Err(_) => tasks.into_iter().for_each(|task| self.put_back(method, task, None)),
        }
        for key in members.into_iter().rev() {
            let Some(outcomes) = self.outcomes.get_mut(&key) else { continue };
            outcomes.branch_behind_the_whole(method, self.max_branches);
            if outcomes.branches.iter().flatten().any(Branch::is_unfinished) {
                self.order.push_front(key);
            }
        }
        self.balance.ran_ahead(began, Instant::now());
        u32::try_from(rows).unwrap_or(u32::MAX)
    }

    /// Creates the branches of a sequence if it has none and memory allows: at least half of the KV blocks
    /// must be free.
    fn branch<M: Method>(&mut self, method: &mut M, table: &mut Table, key: SequenceKey) {
        let Some(outcomes) = self.outcomes.get_mut(&key).filter(|outcomes| outcomes.branches.is_none())
        else {
            return;
        };
        let stats = method.stats();
        let has_room = 2 * stats.kv_blocks_used <= stats.kv_blocks_total;
        let held = table.get_mut(&key);
        let branches = match held.and_then(|held| held.cached.as_ref().map(|cached| (held.slot, cached))) {
            Some((slot, cached)) if has_room => {
                outcomes.proposed.branches(method, (slot, cached), self.max_branches)
            }
            _ => Vec::new(),
        };
        outcomes.branches = Some(branches);
    }

    /// Puts a branch's task back: `Some(true)` if finished, `Some(false)` if not, `None` to close it.
    fn put_back<M: Method>(&mut self, method: &mut M, task: Task, finished: Option<bool>) {
        let branches = self.outcomes.get_mut(&task.key).and_then(|outcomes| outcomes.branches.as_mut());
        let place =
            branches.and_then(|branches| branches.iter_mut().find(|branch| branch.is_place_of(&task)));
        match (place, finished) {
            (Some(branch), Some(is_finished)) => branch.put_back(task, is_finished),
            (place, _) => {
                method.close(task.slot);
                place.into_iter().for_each(Branch::give_up);
            }
        }
    }

    /// Returns the work computed ahead of `step`, if any; `cached` already holds the step's context.
    /// Everything else computed ahead for this sequence is dropped.
    pub fn take<M: Method>(
        &mut self,
        method: &mut M,
        (key, step, cached): (&SequenceKey, &Step, &CachedSequence),
        received: Instant,
    ) -> Option<Found> {
        self.balance.admitted(received);
        let outcomes = self.remove(key)?;
        let is_asked = matches!(step.work, Work::Propose { .. });
        let is_same = step.epoch == outcomes.proposed.epoch() && step.spec.is_none();
        let branches = outcomes.branches.unwrap_or_default();
        let has_guesses = branches.iter().any(Branch::has_guesses);
        let mut found = None;
        for branch in branches {
            let consumed = branch.leads_to(cached.ids()).filter(|_| found.is_none() && is_asked && is_same);
            match (consumed, branch.into_task()) {
                (Some(consumed), Some((task, differs_at))) => {
                    found = Some(branch::found(task, (consumed, differs_at), step));
                }
                (_, Some((task, _))) => method.close(task.slot),
                (_, None) => {}
            }
        }
        if is_asked {
            match &found {
                Some(found) => {
                    self.stats.hits += 1;
                    self.stats.guesses += found.guesses.len() as u64;
                    self.balance.saved(found.guesses.len());
                }
                None if has_guesses => self.stats.misses += 1,
                None => self.stats.too_early += 1,
            }
        }
        found
    }

    /// Drops everything computed ahead for one sequence.
    pub fn forget<M: Method>(&mut self, method: &mut M, key: &SequenceKey) {
        if let Some(outcomes) = self.remove(key) {
            outcomes.close(method);
        }
    }

    /// Drops everything computed ahead; returns whether there were branches.
    pub fn forget_all<M: Method>(&mut self, method: &mut M) -> bool {
        self.order.clear();
        let outcomes = std::mem::take(&mut self.outcomes);
        let had_branches =
            outcomes.values().any(|outcomes| outcomes.branches.as_ref().is_some_and(|list| !list.is_empty()));
        outcomes.into_values().for_each(|outcomes| outcomes.close(method));
        had_branches
    }

    fn remove(&mut self, key: &SequenceKey) -> Option<Outcomes> {
        let outcomes = self.outcomes.remove(key)?;
        self.order.retain(|waiting| waiting != key);
        Some(outcomes)
    }
}

impl Outcomes {
    /// Once the worker has guessed the token after the whole proposal, adds branches for the next best tokens
    /// at that position.
    fn branch_behind_the_whole<M: Method>(&mut self, method: &mut M, max_branches: usize) {
        let Some(branches) = &mut self.branches else { return };
        let more = self.proposed.branches_behind(method, branches, max_branches);
        branches.extend(more);
    }

    fn close<M: Method>(self, method: &mut M) {
        for branch in self.branches.into_iter().flatten() {
            if let Some((task, _)) = branch.into_task() {
                method.close(task.slot);
            }
        }
    }
}
