//! A synthetic model: what a worker that only keeps a profile's time answers. Pure; the workers' synthetic
//! engine and the simulator share it.
//!
//! A target's draw and a draft's guess are functions of seed, position and the time since the start, by which
//! a profile may change how often guesses are right ([`super::acceptance`]).

use std::sync::Arc;

use speculation::cached_sequence::CachedSequence;
use speculation::tree::{Candidates, with_leaves};
use speculation::{
    Draft, FinishReason, Proposal, ReplyBody, Role, SequenceSpec, Step, TokenId, TokenSpan, Work,
};

use super::text::SyntheticText;
use super::{Pool, Profile};
use crate::batch::Share;

/// The model of one role.
#[derive(Debug, Clone)]
pub struct SyntheticModel {
    profile: Arc<Profile>,
    role: Role,
}

/// A step under way, as the model changes it.
#[derive(Debug)]
pub struct StepUnderWay<'a> {
    /// The step.
    pub step: &'a Step,
    /// What is held of its sequence.
    pub cached: &'a mut CachedSequence,
    /// Context ids that have run.
    pub context_done: &'a mut usize,
    /// Guesses made so far.
    pub guesses: &'a mut Draft,
    /// Which of the context's ids the model would have drawn.
    pub agreed: &'a mut Vec<bool>,
}

impl SyntheticModel {
    /// The model that workers of a role run.
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

    /// The workers of its role.
    pub fn pool(&self) -> &Pool {
        match self.role {
            Role::Draft => &self.profile.draft,
            Role::Target => &self.profile.target,
        }
    }

    /// A share of the step has run, `seconds` after the start: the answer, or `None` while the step needs
    /// another forward. With an answer, exactly the ids of the cached sequence are of further use.
    pub fn advance(&self, at: &mut StepUnderWay<'_>, share: &Share, seconds: f64) -> Option<ReplyBody> {
        *at.context_done += share.context as usize;
        if !share.ends_context {
            return None;
        }
        let spec = Arc::clone(at.cached.spec().expect("an admitted step has a spec"));
        let say = Sayings { model: self, spec: &spec, seconds };
        // The first forward that ends the context has no guess before it.
        if self.role == Role::Draft && at.guesses.token_ids.is_empty() && at.step.is_comparable(&spec) {
            *at.agreed = say.agreed(at.step);
        }
        match &at.step.work {
            Work::Feed => Some(ReplyBody::Fed { cached_len: at.step.start(), prompt_logprobs: None }),
            Work::Verify { draft } => {
                let span = say.verify(at.step.start(), draft);
                at.cached.append(&span.token_ids[..span.num_accepted as usize]);
                Some(ReplyBody::Span(span))
            }
            Work::Propose { num_draft_tokens, .. } => {
                at.cached.append(at.guesses.token_ids.last().map_or(&[], std::slice::from_ref));
                say.guess_next((at.step.start(), *num_draft_tokens), &mut at.guesses.token_ids);
                say.proposal(at)
            }
        }
    }

    /// The answer to a step of which enough was computed before it came.
    pub fn resume(&self, at: &mut StepUnderWay<'_>, seconds: f64) -> Option<ReplyBody> {
        let spec = Arc::clone(at.cached.spec().expect("an admitted step has a spec"));
        Sayings { model: self, spec: &spec, seconds }.proposal(at)
    }

    /// What the model would put at each position of a chain, the chain's token first.
    pub fn candidates(&self, spec: &SequenceSpec, start: u32, chain: &[TokenId]) -> Vec<Candidates> {
        Sayings { model: self, spec, seconds: 0.0 }.candidates(start, chain)
    }
}

/// What the model says of one sequence at one time.
struct Sayings<'a> {
    model: &'a SyntheticModel,
    spec: &'a SequenceSpec,
    seconds: f64,
}

impl Sayings<'_> {
    fn text(&self) -> SyntheticText {
        let SequenceSpec { seed, choice, .. } = *self.spec;
        SyntheticText { seed, choice, vocab_size: self.model.profile.vocab_size }
    }

    /// The chance that a guess is right where `in_a_row` guesses before it were.
    fn rate(&self, in_a_row: usize) -> f64 {
        self.model.profile.acceptance.rate(self.spec.lane, in_a_row, self.seconds)
    }

    /// Which ids of the context but the first the model would have guessed.
    fn agreed(&self, step: &Step) -> Vec<bool> {
        let text = self.text();
        let mut in_a_row = 0;
        let agrees = |(position, id): (u32, &TokenId)| {
            let agrees = text.guess(position, self.rate(in_a_row)) == *id;
            in_a_row = if agrees { in_a_row + 1 } else { 0 };
            agrees
        };
        (step.base_len..).zip(&step.append_ids).skip(1).map(agrees).collect()
    }

    /// As [`speculation::acceptance`] verifies, with tokens from the profile's text.
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
            span.finish = finish(self.spec, position, token);
            next = child.filter(|_| span.finish.is_none());
        }
        span
    }

    /// What a draft worker's model would put at each position of a chain, the chain's token first.
    fn candidates(&self, start: u32, chain: &[TokenId]) -> Vec<Candidates> {
        let text = self.text();
        let candidates = |(position, &first): (u32, &TokenId)| {
            let mut token_ids = vec![first];
            token_ids.extend(text.siblings(position, first).into_iter().filter(|&id| id != first));
            let margins = (0..token_ids.len()).map(|rank| rank as f64).collect();
            Candidates { token_ids, margins, surprise: 0.5 }
        };
        (start..).zip(chain).map(candidates).collect()
    }

    /// Adds a guess, as a draft worker's model does.
    fn guess_next(&self, (start, k): (u32, u32), guesses: &mut Vec<TokenId>) {
        if k > 0 {
            let rate = self.rate(guesses.len());
            guesses.push(self.text().guess(start + guesses.len() as u32, rate));
        }
    }

    /// The proposal, once it is complete.
    fn proposal(&self, at: &StepUnderWay<'_>) -> Option<ReplyBody> {
        let Work::Propose { num_draft_tokens, num_tree_tokens } = at.step.work else { return None };
        let (start, guesses) = (at.step.start(), &at.guesses.token_ids);
        let num_guessed = guesses.len() as u32;
        let stopped = guesses.last().is_some_and(|id| self.spec.stop_token_ids.contains(id));
        if num_guessed < num_draft_tokens && !stopped && start + num_guessed < self.spec.max_len {
            return None;
        }
        let draft = match num_tree_tokens > num_draft_tokens {
            true => with_leaves(&self.candidates(start, guesses), num_tree_tokens as usize),
            false => at.guesses.clone(),
        };
        Some(ReplyBody::Proposal(Proposal { start, draft }))
    }
}

fn finish(spec: &SequenceSpec, position: u32, token: TokenId) -> Option<FinishReason> {
    if spec.stop_token_ids.contains(&token) {
        Some(FinishReason::Stop)
    } else if position.saturating_add(1) >= spec.max_len {
        Some(FinishReason::Length)
    } else {
        None
    }
}
