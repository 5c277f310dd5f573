//! One sequence with all that the owner keeps beside its state machine.

use std::sync::Arc;
use std::time::Duration;

use speculation::agreement::Agreement;
use speculation::placement::PrefixMarks;
use speculation::sequence::Sequence;
use speculation::{FinishReason, Role, SequenceId};

use crate::generation::{
    CommittedTokens, GenerationEvent, GenerationSink, SpeculationRequest, SpeculationUsage,
};
use crate::lane::LaneKey;
use crate::lane::pool::Seat;
use crate::workers::WorkerKey;

/// A sequence that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) id: SequenceId,
    pub(super) sequence: Sequence,
    pub(super) sink: GenerationSink,
    pub(super) choice: u32,
    pub(super) lane: JoinedLane,
    pub(super) request: SpeculationRequest,
    pub(super) target: Option<Seat>,
    pub(super) draft: Option<Seat>,
    /// The prefixes by which a target is chosen.
    pub(super) marks: PrefixMarks,
    /// The bits that its text is made of, once it had a target.
    pub(super) numerics_id: Option<String>,
    /// The round under way.
    pub(super) clock: RoundClock,
    /// Which tokens of a draft its draft worker's agreement stands for.
    pub(super) agreement: Agreement,
    /// The proposal that its draft worker owes.
    pub(super) asked: Option<Asked>,
    pub(super) submitted_at: Duration,
    /// Since when it waits for a target, while it has none.
    pub(super) waits_since: Duration,
    /// Until when it may wait where no target serves its model.
    pub(super) target_by: Duration,
    /// Its one entry among the owner's timers.
    pub(super) timer: Option<Duration>,
    pub(super) disabled_reason: Option<&'static str>,
    /// The request's span; rounds are traced below it.
    pub(super) span: tracing::Span,
    /// The round under way, where the request is traced, and its span's id; else 0.
    pub(super) round: tracing::Span,
    pub(super) round_span_id: u64,
}

/// The lane that a sequence is in.
#[derive(Debug, Clone)]
pub(super) struct JoinedLane {
    /// Names it to workers and in counts.
    pub(super) number: u32,
    pub(super) key: Arc<LaneKey>,
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
    /// Whether its draft worker, which is out, is asked without waiting for it.
    pub(super) is_probing: bool,
    /// How many tokens were asked for, to be waited for.
    pub(super) asked: u32,
    /// When verification was first asked for.
    pub(super) verify_at: Option<Duration>,
}

/// A draft worker was asked for a proposal.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) round: u64,
    pub(super) at: Duration,
    pub(super) num_draft_tokens: u32,
    /// How long it was expected to take.
    pub(super) predicted: Duration,
}

impl Running {
    pub(super) fn worker(&self, role: Role) -> Option<WorkerKey> {
        let seat = match role {
            Role::Draft => &self.draft,
            Role::Target => &self.target,
        };
        seat.as_ref().map(|seat| seat.key)
    }

    pub(super) fn seat_mut(&mut self, role: Role) -> &mut Option<Seat> {
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
            token_ids: commit.token_ids.as_slice().into(),
            num_drafted: commit.num_accepted,
            logprobs: commit.logprobs,
            usage: self.usage(),
        })
    }

    pub(super) fn finished(&self, reason: FinishReason) -> GenerationEvent {
        GenerationEvent::Finished { choice: self.choice, reason, usage: self.usage() }
    }

    /// Ids that it holds.
    pub(super) fn len(&self) -> u32 {
        self.sequence.ids().len() as u32
    }

    /// Ids that it wrote itself.
    pub(super) fn output_len(&self) -> u32 {
        self.len() - self.sequence.spec().prompt_len
    }

    /// Whether no draft worker is of use to this sequence.
    pub(super) fn refuses_drafts(&self) -> bool {
        self.request.enabled == Some(false) || self.request.num_draft_tokens == Some(0)
    }
}
