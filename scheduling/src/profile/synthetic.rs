//! A synthetic model: the answers of a worker that only simulates a profile's timing. Pure; shared by the
//! workers' synthetic engine and the simulator.
//!
//! A target's token and a draft's token are functions of seed, position and the time since the start. The
//! time matters because a profile may change the acceptance over time ([`super::acceptance`]).

use std::sync::Arc;

use speculation::acceptance::{ends_draft, finish_reason};
use speculation::cached_sequence::CachedSequence;
use speculation::tree::{Candidates, TreeGrowth, with_leaves};
use speculation::{Draft, Proposal, ReplyBody, Role, SequenceSpec, Step, TokenId, TokenSpan, Work};

use super::text::{SIBLING_RATES, SyntheticText};
use super::{PoolProfile, Profile};
use crate::batch::StepChunk;

/// The synthetic model of one role.
#[derive(Debug, Clone)]
pub struct SyntheticModel {
    profile: Arc<Profile>,
    role: Role,
}

/// State of a step in progress, updated by the model.
#[derive(Debug)]
pub struct StepInProgress<'a> {
    /// The step.
    pub step: &'a Step,
    /// The cached part of its sequence.
    pub cached: &'a mut CachedSequence,
    /// Number of context ids that have run.
    pub context_done: &'a mut usize,
    /// Tokens drafted so far.
    pub drafted: &'a mut Draft,
    /// Maximum rows per forward of a tree; 0: trees have leaves only.
    pub tree_rows: usize,
    /// The tree so far, if one grows; replaces `drafted`.
    pub tree: &'a mut Option<TreeGrowth>,
    /// For each context id except the first, whether the model would have drawn it.
    pub agreed: &'a mut Vec<bool>,
}

impl SyntheticModel {
    /// Creates the model for the workers of a role.
    pub fn new(profile: Arc<Profile>, role: Role) -> Self {
        Self { profile, role }
    }

    /// The profile.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The role.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The pool of its role.
    pub fn pool(&self) -> &PoolProfile {
        self.profile.pool(self.role)
    }

    /// Processes a share of the step that ran, `seconds` after the start. Returns the answer, or `None` if
    /// the step needs another forward. After an answer only the ids of the cached sequence are still needed.
    pub fn advance(&self, at: &mut StepInProgress<'_>, chunk: &StepChunk, seconds: f64) -> Option<ReplyBody> {
        *at.context_done += chunk.context as usize;
        if !chunk.ends_context {
            return None;
        }
        let spec = Arc::clone(at.cached.spec().expect("an admitted step has a spec"));
        let outputs = SequenceOutputs { model: self, spec: &spec, seconds };
        // In the first forward that ends the context nothing has been drafted yet.
        let is_first = at.drafted.token_ids.is_empty() && at.tree.is_none();
        if self.role == Role::Draft && is_first && at.step.is_comparable(&spec) {
            *at.agreed = outputs.agreed(at.step);
        }
        match &at.step.work {
            Work::Feed => Some(ReplyBody::Fed { cached_len: at.step.start(), prompt_logprobs: None }),
            Work::Verify { draft } => {
                let span = outputs.verify(at.step.start(), draft);
                at.cached.append(&span.token_ids[..span.num_accepted as usize]);
                Some(ReplyBody::Span(span))
            }
            Work::Propose { num_draft_tokens, num_tree_tokens }
                if at.tree_rows > 0 && num_tree_tokens > num_draft_tokens && *num_draft_tokens > 0 =>
            {
                outputs.grow_tree(at, (*num_draft_tokens, *num_tree_tokens))
            }
            Work::Propose { num_draft_tokens, .. } => {
                at.cached.append(at.drafted.token_ids.last().map_or(&[], std::slice::from_ref));
                outputs.draft_next((at.step.start(), *num_draft_tokens), &mut at.drafted.token_ids);
                outputs.proposal(at)
            }
        }
    }

    /// Answers a step whose tokens were computed before it arrived.
    pub fn resume(&self, at: &mut StepInProgress<'_>, seconds: f64) -> Option<ReplyBody> {
        let spec = Arc::clone(at.cached.spec().expect("an admitted step has a spec"));
        SequenceOutputs { model: self, spec: &spec, seconds }.proposal(at)
    }

    /// The model's candidates for each position of a chain, the chain's token first.
    pub fn candidates(&self, spec: &SequenceSpec, start: u32, chain: &[TokenId]) -> Vec<Candidates> {
        SequenceOutputs { model: self, spec, seconds: 0.0 }.candidates(start, chain)
    }
}

/// The model's outputs for one sequence at one time.
struct SequenceOutputs<'a> {
    model: &'a SyntheticModel,
    spec: &'a SequenceSpec,
    seconds: f64,
}

impl SequenceOutputs<'_> {
    fn text(&self) -> SyntheticText {
        let SequenceSpec { seed, choice, .. } = *self.spec;
        SyntheticText { seed, choice, vocab_size: self.model.profile.vocab_size }
    }

    /// Acceptance probability of a token after `in_a_row` accepted ones.
    fn rate(&self, in_a_row: usize) -> f64 {
        self.model.profile.acceptance.rate(self.spec.lane, in_a_row, self.seconds)
    }

    /// For each context id except the first, whether the model would have drafted it.
    fn agreed(&self, step: &Step) -> Vec<bool> {
        let text = self.text();
        let mut in_a_row = 0;
        let agrees = |(position, id): (u32, &TokenId)| {
            let agrees = text.draft_token(position, self.rate(in_a_row)) == *id;
            in_a_row = if agrees { in_a_row + 1 } else { 0 };
            agrees
        };
        (step.base_len..).zip(&step.append_ids).skip(1).map(agrees).collect()
    }

    /// Verifies as [`speculation::acceptance`] does, with tokens from the profile's text.
    fn verify(&self, start: u32, draft: &Draft) -> TokenSpan {
        let text = self.text();
        let mut span = TokenSpan { start, ..TokenSpan::default() };
        let mut next = Some(0);
        while let Some(row) = next {
            let position = start + span.num_accepted;
            let token = text.token(position);
            let child = draft.child(row, token);
            span.token_ids.push(token);
            span.num_accepted += u32::from(child.is_some());
            span.finish = finish_reason(self.spec, position, token);
            next = child.filter(|_| span.finish.is_none());
        }
        span
    }

    /// A draft model's candidates for each position of a chain, the chain's token first.
    fn candidates(&self, start: u32, chain: &[TokenId]) -> Vec<Candidates> {
        let candidates = |(in_a_row, &first)| self.candidates_after(start, in_a_row, first);
        chain.iter().enumerate().map(candidates).collect()
    }

    /// A draft model's candidates after `in_a_row` drafted tokens, `first` first.
    fn candidates_after(&self, start: u32, in_a_row: usize, first: TokenId) -> Candidates {
        let rate = self.rate(in_a_row);
        let mut token_ids = vec![first];
        token_ids.extend(self.text().siblings(start + in_a_row as u32, first));
        let of_siblings = SIBLING_RATES.iter().map(|of_wrong| (1.0 - rate) * of_wrong);
        Candidates::new(token_ids, std::iter::once(rate).chain(of_siblings))
    }

    /// The model's token after `in_a_row` drafted tokens.
    fn guess(&self, start: u32, in_a_row: usize) -> TokenId {
        self.text().draft_token(start + in_a_row as u32, self.rate(in_a_row))
    }

    /// Adds the candidates after the rows that ran to the step's tree. Returns the proposal once it is
    /// complete.
    fn grow_tree(
        &self,
        at: &mut StepInProgress<'_>,
        (num_positions, num_tokens): (u32, u32),
    ) -> Option<ReplyBody> {
        let start = at.step.start();
        let num_positions = num_positions.min(self.spec.max_len.saturating_sub(start).max(1)) as usize;
        let new = || TreeGrowth::new(num_positions, num_tokens as usize, at.tree_rows);
        let tree = at.tree.get_or_insert_with(new);
        let candidates =
            |path: &Vec<TokenId>| self.candidates_after(start, path.len(), self.guess(start, path.len()));
        let found: Vec<Candidates> = tree.next_paths().iter().map(candidates).collect();
        tree.add_candidates(&found, |id| ends_draft(self.spec, id));
        if tree.num_next() > 0 {
            return None;
        }
        let draft = tree.draft();
        let path = draft.first_path();
        at.cached.append(&path[..path.len().saturating_sub(1)]);
        Some(ReplyBody::Proposal(Proposal { start, draft }))
    }

    /// Adds a drafted token, as a draft worker's model does.
    fn draft_next(&self, (start, k): (u32, u32), drafted: &mut Vec<TokenId>) {
        if k > 0 {
            drafted.push(self.guess(start, drafted.len()));
        }
    }

    /// Returns the proposal if it is complete.
    fn proposal(&self, at: &StepInProgress<'_>) -> Option<ReplyBody> {
        let Work::Propose { num_draft_tokens, num_tree_tokens } = at.step.work else { return None };
        let (start, drafted) = (at.step.start(), &at.drafted.token_ids);
        let num_drafted = drafted.len() as u32;
        let stopped = drafted.last().is_some_and(|id| ends_draft(self.spec, *id));
        if num_drafted < num_draft_tokens && !stopped && start + num_drafted < self.spec.max_len {
            return None;
        }
        let draft = match num_tree_tokens > num_draft_tokens {
            true => with_leaves(&self.candidates(start, drafted), num_tree_tokens as usize),
            false => at.drafted.clone(),
        };
        Some(ReplyBody::Proposal(Proposal { start, draft }))
    }
}
