//! Drafting ahead: while a target verifies a proposal, its draft worker guesses on from what is likeliest to come of it.
//!
//! A *branch* is the step that a router would send after one outcome of the verification: the proposal accepted as a whole, or up to
//! some position and then another token than the proposed one ([`speculation::tree::rivals`] ranks these). Branches run when the worker
//! has nothing else to do, all of them a row each in one forward pass, on forks of the sequence's KV. The next step of the sequence
//! tells which outcome it was. Where a branch leads there, its KV becomes the sequence's and its guesses are the proposal, as many as
//! there are; they are the guesses that the step would have led to, for a row depends on its sequence alone (contract I4). All other
//! branches are closed. (Kumar, Dao, May, "Speculative speculative decoding", arXiv 2603.03251.)

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

/// A worker of more sequences drafts nothing ahead. Their steps share forward passes, at the draft worker and at the target; where some
/// are answered at once and others not they come apart, and each has forward passes of its own. With 70B on H100s and drafts on one L4,
/// simulated, drafting ahead makes one sequence 1.25 times as fast, two 1.09 times, and four 0.91 times (docs/measurements/bench.md).
const MAX_SEQUENCES: usize = 2;

/// What drafting ahead did since start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AheadStats {
    /// Steps that a branch led to.
    pub hits: u64,
    /// Steps that none of the branches led to.
    pub misses: u64,
    /// Steps that came before anything was guessed ahead of them.
    pub too_early: u64,
    /// Guesses of proposals that were there when they were asked for.
    pub guesses: u64,
    /// Rows computed in forward passes of branches.
    pub rows: u64,
}

/// What was computed ahead of a step.
#[derive(Debug)]
pub struct Found {
    /// Holds the KV of the step's context and of the guesses but the last.
    pub slot: Slot,
    /// What follows the context.
    pub guesses: Vec<TokenId>,
    /// Of each guess, what else might stand there, as far as that is known.
    pub candidates: Vec<Candidates>,
    /// Context ids whose KV is there.
    pub context_done: usize,
    /// Of the context's ids but the first, whether the worker guessed them.
    pub agreed: Vec<bool>,
}

/// The branches of every sequence whose proposal is being verified. See the module's page.
#[derive(Debug)]
pub struct Ahead {
    /// Branches of a proposal at most, and rows of one forward pass; 0: nothing is drafted ahead.
    max_branches: usize,
    outcomes: HashMap<SequenceKey, Outcomes>,
    /// Sequences with branches to run, the one that was proposed for first in front.
    order: VecDeque<SequenceKey>,
    balance: Balance,
    stats: AheadStats,
}

/// What may come of one proposal.
#[derive(Debug)]
struct Outcomes {
    proposed: Proposed,
    /// Absent until the first of them is to run.
    branches: Option<Vec<Branch>>,
}

impl Ahead {
    /// With at most this many branches for each proposal; 0 for a worker that never drafts ahead.
    pub fn new(max_branches: usize) -> Self {
        Self {
            max_branches,
            outcomes: HashMap::new(),
            order: VecDeque::new(),
            balance: Balance::default(),
            stats: AheadStats::default(),
        }
    }

    /// Since start.
    pub fn stats(&self) -> AheadStats {
        self.stats
    }

    /// Rows of the next forward pass at most; `None` while there is nothing to draft ahead.
    pub fn rows(&self) -> Option<u32> {
        (!self.order.is_empty()).then_some(self.max_branches as u32)
    }

    /// A forward pass of steps took so long: that is what a guess made ahead saves.
    pub fn ran(&mut self, took: Duration) {
        self.balance.ran(took);
    }

    /// A step of one of `num_sequences` was answered; where that is a proposal, what may come of it can be drafted ahead from now on.
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

    /// One forward pass over branches; the rows it had.
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
            // Without room nothing is drafted ahead.
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

    /// Makes the branches of a sequence, if it has none and there is memory: half of the KV stays free of them.
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

    /// Returns a branch's task: finished, not finished, or of no use.
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

    /// A step of the sequence came, and `cached` holds its context: what was computed ahead of it, if anything was. All else that was
    /// computed ahead for this sequence is forgotten.
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

    /// Forgets what was computed ahead for one sequence.
    pub fn forget<M: Method>(&mut self, method: &mut M, key: &SequenceKey) {
        if let Some(outcomes) = self.remove(key) {
            outcomes.close(method);
        }
    }

    /// Forgets everything that was computed ahead; whether there was any.
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
    /// Once the worker has guessed what follows the whole proposal, adds branches for the next best tokens there.
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
