//! One sequence under way, with everything that the scheduler keeps beside its state machine.

use std::time::Duration;

use speculation::sequence::{Commit, Event, Sequence, TargetFault};
use speculation::{Reply, Role, SequenceId};

use super::cached_prompt::CachedPrompt;
use super::events::{CommittedRound, SpeculationUsage, WorkerKey};
use super::lanes::{Joined, SequenceLengths};
use super::lookup::{LookupDraft, Lookups};
use super::policy::SpeculationRequest;
use super::shadows::Trial;
use super::targets::SUSPECT_AFTER;
use super::workers::Reservation;
use crate::agreement::Agreement;
use crate::lookup_rates::LookupSource;
use crate::placement::PrefixMarks;

#[derive(Debug)]
pub(super) struct ActiveSequence {
    pub(super) id: SequenceId,
    pub(super) sequence: Sequence,
    pub(super) lane: Joined,
    pub(super) speculation: SpeculationRequest,
    /// Whose it is.
    pub(super) api_key: u64,
    pub(super) target: Option<Reservation>,
    pub(super) draft: Option<Reservation>,
    pub(super) failures: TargetFailures,
    /// Its prompt's prefixes, by which a target is chosen.
    pub(super) marks: PrefixMarks,
    /// The numerics class of its text so far, once it had a target.
    pub(super) numerics_id: Option<String>,
    pub(super) round: Round,
    /// Draft position that the next reported agreement bit refers to.
    pub(super) agreement: Agreement,
    /// What its drafts are looked up in.
    pub(super) lookups: Lookups,
    /// The lookup draft of the round that begins.
    pub(super) looked_up: Option<LookupDraft>,
    /// The proposal that its draft worker owes.
    pub(super) asked: Option<Asked>,
    pub(super) submitted_at: Duration,
    /// When it began to wait for a target, while it has none.
    pub(super) waiting_since: Duration,
    /// When its wait ends if no target serves its model.
    pub(super) give_up_at: Duration,
    /// When its wait for its first target ends, if it may be turned away.
    pub(super) expires_at: Option<Duration>,
    /// Sequences in the target's latest forward with it, and in that of its latest round that was nothing but drafting and verifying.
    pub(super) forward_sequences: [u32; 2],
    /// Whether it lost its last target, and did not only give way there.
    pub(super) is_replay: bool,
    /// While it is being preempted.
    pub(super) gives_way: bool,
    /// Its entry among the timers.
    pub(super) timer: Option<Duration>,
    pub(super) disabled_reason: Option<&'static str>,
    /// Prompt tokens that its target had from other sequences.
    pub(super) cached: CachedPrompt,
    /// Draft workers on trial, as far as this sequence is evidence.
    pub(super) trial: Trial,
}

/// What went wrong with the targets of one sequence.
#[derive(Debug, Default)]
pub(super) struct TargetFailures {
    /// Targets in a row that were lost, or left, before they committed anything.
    pub(super) in_a_row: u32,
    /// The target that it left last: another one is preferred.
    pub(super) left: Option<WorkerKey>,
    /// Targets that refused it: they are not asked again.
    pub(super) refused_by: Vec<WorkerKey>,
    /// The last reason.
    pub(super) reason: Option<TargetFault>,
}

impl TargetFailures {
    /// Whether the sequence may be what its targets died of.
    pub(super) fn is_suspect(&self) -> bool {
        self.in_a_row >= SUSPECT_AFTER
    }
}

/// Where a round stands before its verification is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum RoundPhase {
    /// It leaves at once, or has left.
    #[default]
    Begun,
    /// A decode step that waits to share a forward pass ([`crate::decode_delay`]).
    Delayed,
    /// A decode step that its target has not answered.
    DecodeInFlight,
}

/// The round under way.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Round {
    pub(super) begun_at: Duration,
    pub(super) phase: RoundPhase,
    /// Draft length chosen for it.
    pub(super) chosen: u32,
    /// How long that proposal was expected to take as the round began, until it is asked for.
    pub(super) predicted: Option<Duration>,
    /// Tokens of a tree at most.
    pub(super) num_tree_tokens: u32,
    /// Whether prompt rows are in it: its time then says nothing of drafting and verifying.
    pub(super) has_prompt: bool,
    /// Where its draft was looked up, if it was.
    pub(super) source: Option<LookupSource>,
    /// Whether a silent draft worker is asked in it, without waiting for the proposal.
    pub(super) is_probing: bool,
    /// Tokens that a draft worker was asked for, to be waited for.
    pub(super) asked: u32,
    /// Whether that proposal missed its deadline.
    pub(super) is_late: bool,
    /// When verification was first asked for.
    pub(super) verify_at: Option<Duration>,
}

/// A request to a draft worker that is not answered yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    /// The step's number.
    pub(super) step: u64,
    pub(super) at: Duration,
    pub(super) num_draft_tokens: u32,
    /// How long the answer was expected to take.
    pub(super) predicted: Duration,
}

impl ActiveSequence {
    pub(super) fn worker(&self, role: Role) -> Option<WorkerKey> {
        let reservation = match role {
            Role::Draft => &self.draft,
            Role::Target => &self.target,
        };
        reservation.as_ref().map(|reservation| reservation.key)
    }

    pub(super) fn reservation_mut(&mut self, role: Role) -> &mut Option<Reservation> {
        match role {
            Role::Draft => &mut self.draft,
            Role::Target => &mut self.target,
        }
    }

    pub(super) fn usage(&self) -> SpeculationUsage {
        let counters = self.sequence.counters();
        let (appeared, not_yet) = self.lookups.num_predicted();
        SpeculationUsage {
            rounds: counters.rounds,
            draft_tokens: counters.draft_tokens,
            accepted_tokens: counters.accepted_tokens,
            // Of a prompt at least the last token is computed.
            cached_tokens: self.cached.tokens().min(self.sequence.spec().prompt_len.saturating_sub(1).into()),
            accepted_prediction_tokens: appeared,
            rejected_prediction_tokens: not_yet,
            disabled_reason: self.disabled_reason,
        }
    }

    pub(super) fn committed(&self, commit: Commit) -> CommittedRound {
        let source = self.round.source.filter(|_| commit.num_draft_tokens > 0);
        CommittedRound { id: self.id, lane: self.lane.id, commit, source, usage: self.usage() }
    }

    /// Its target says how much of the prompt it had cached, of a step that was sent again since, too. Only the target that writes the first
    /// token counts.
    pub(super) fn on_cached(&mut self, reply: &Reply) {
        if self.output_len() == 0 {
            self.cached.answered(reply);
        }
    }

    /// Ids that it holds.
    pub(super) fn len(&self) -> u32 {
        self.sequence.ids().len() as u32
    }

    /// Ids that it generated.
    pub(super) fn output_len(&self) -> u32 {
        self.len() - self.sequence.spec().prompt_len
    }

    pub(super) fn lengths(&self) -> SequenceLengths {
        let spec = self.sequence.spec();
        SequenceLengths { now: self.len(), prompt: spec.prompt_len, max: spec.max_len }
    }

    /// Whether the request is traced.
    pub(super) fn is_traced(&self) -> bool {
        !self.sequence.spec().traceparent.is_empty()
    }

    /// When the sequence has to be looked at if nothing else happens to it.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let waits_until = || self.expires_at.map_or(self.give_up_at, |at| at.min(self.give_up_at));
        self.sequence.next_deadline().or_else(|| self.target.is_none().then(waits_until))
    }

    /// Whether a draft worker is of use to it.
    pub(super) fn wants_draft(&self) -> bool {
        !self.speculation.refuses_drafts() && self.sequence.draft_refusal().is_none()
    }
}

/// Events that an action of a sequence leads to, for the same sequence.
pub(super) type FollowUps = std::collections::VecDeque<Event>;
