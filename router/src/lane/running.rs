//! One sequence with all that the owner keeps beside its state machine.

use std::time::Duration;

use speculation::sequence::Sequence;
use speculation::{FinishReason, Role};

use crate::generation::{
    CommittedTokens, GenerationEvent, GenerationSink, SpeculationRequest, SpeculationUsage,
};
use crate::lane::LaneKey;
use crate::workers::WorkerKey;

/// A sequence that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) sequence: Sequence,
    pub(super) sink: GenerationSink,
    pub(super) choice: u32,
    pub(super) lane: LaneKey,
    pub(super) request: SpeculationRequest,
    pub(super) target: Option<WorkerKey>,
    pub(super) draft: Option<WorkerKey>,
    /// The bits that its text is made of, once it had a target.
    pub(super) numerics_id: Option<String>,
    /// The round under way.
    pub(super) clock: RoundClock,
    /// Until when it may wait for a target.
    pub(super) target_by: Duration,
    pub(super) disabled_reason: Option<&'static str>,
    /// The request's span; rounds are traced below it.
    pub(super) span: tracing::Span,
    /// The round under way, where the request is traced.
    pub(super) round: tracing::Span,
}

/// What a round has taken so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RoundClock {
    pub(super) begun_at: Duration,
    /// How far it was meant to draft.
    pub(super) chosen: u32,
    /// Whether prompt rows are in it, whose time says nothing of drafting and verifying.
    pub(super) has_prompt: bool,
    /// Whether it waits to leave with others, and whether its target has it: plain rounds only.
    pub(super) is_held: bool,
    pub(super) is_plain_in_flight: bool,
    /// How many tokens the draft worker was asked for, and when last.
    pub(super) asked: u32,
    pub(super) asked_at: Duration,
    /// When verification was first asked for.
    pub(super) verify_at: Option<Duration>,
}

impl Running {
    pub(super) fn worker(&self, role: Role) -> Option<WorkerKey> {
        match role {
            Role::Draft => self.draft,
            Role::Target => self.target,
        }
    }

    pub(super) fn worker_mut(&mut self, role: Role) -> &mut Option<WorkerKey> {
        match role {
            Role::Draft => &mut self.draft,
            Role::Target => &mut self.target,
        }
    }

    pub(super) fn usage(&self) -> SpeculationUsage {
        let counters = self.sequence.counters();
        SpeculationUsage {
            rounds: counters.rounds,
            draft_tokens: counters.draft_tokens,
            accepted_tokens: counters.accepted_tokens,
            disabled_reason: self.disabled_reason,
        }
    }

    pub(super) fn tokens(&self, commit: speculation::sequence::Commit) -> GenerationEvent {
        GenerationEvent::Tokens(CommittedTokens {
            choice: self.choice,
            token_ids: commit.token_ids,
            num_drafted: commit.num_accepted,
            logprobs: commit.logprobs,
            usage: self.usage(),
        })
    }

    pub(super) fn finished(&self, reason: FinishReason) -> GenerationEvent {
        GenerationEvent::Finished { choice: self.choice, reason, usage: self.usage() }
    }

    /// Why this sequence does not speculate at all, if it does not.
    pub(super) fn refuses_drafts(&self) -> bool {
        self.request.enabled == Some(false) || self.request.num_draft_tokens == Some(0)
    }
}
