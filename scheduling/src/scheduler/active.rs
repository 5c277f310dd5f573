//! An active sequence: its state machine and what the scheduler tracks beside it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use speculation::sequence::{Commit, Event, Sequence, SequenceConfig, TargetFault};
use speculation::spec::lane_number;
use speculation::{Reply, Role, SequenceId, SequenceSpec};

use super::SchedulerConfig;
use super::cached_prompt::CachedPrompt;
use super::disabled_reason::DisabledReason;
use super::events::{CommittedRound, NewSequence, SpeculationUsage, WorkerKey};
use super::lanes::{LaneRef, SequenceLengths};
use super::lookup::{LookupDraft, Lookups};
use super::policy::SpeculationRequest;
use super::shadows::Trial;
use super::targets::{MAX_LOSSES, SUSPECT_AFTER};
use super::workers::{Reservation, Worker, Workers};
use crate::agreement::Agreement;
use crate::lookup_rates::LookupSource;
use crate::placement::PrefixMarks;

#[derive(Debug)]
pub(super) struct ActiveSequence {
    pub(super) id: SequenceId,
    pub(super) sequence: Sequence,
    pub(super) lane: LaneRef,
    pub(super) speculation: SpeculationRequest,
    /// Key for fair queueing: the API key, or one derived from a gateway's fairness id.
    pub(super) api_key: u64,
    pub(super) target: Option<Reservation>,
    pub(super) draft: Option<Reservation>,
    /// Value of [`Workers::draft_changes`] when it found no draft worker; it looks again once that changed.
    pub(super) found_no_draft_at: Option<u64>,
    pub(super) failures: TargetFailures,
    /// Prefixes of the prompt, used to choose a target.
    pub(super) marks: Arc<PrefixMarks>,
    /// Numerics class of the text so far; absent before the first target.
    pub(super) numerics_id: Option<String>,
    pub(super) round: Round,
    /// Draft position that the next reported agreement bit refers to.
    pub(super) agreement: Agreement,
    /// Sources of lookup drafts.
    pub(super) lookups: Lookups,
    /// Lookup draft of the round that is about to begin.
    pub(super) lookup_draft: Option<LookupDraft>,
    /// Outstanding request to the draft worker.
    pub(super) pending_proposal: Option<PendingProposal>,
    pub(super) submitted_at: Duration,
    /// When the current wait for a target began.
    pub(super) waiting_since: Duration,
    /// When the wait ends if no target serves the model.
    pub(super) no_target_deadline: Duration,
    /// When the wait for the first target ends, if the request may expire.
    pub(super) expires_at: Option<Duration>,
    /// Number of sequences in the latest target forward, and in that of the latest round without prompt rows.
    pub(super) forward_sequences: [u32; 2],
    /// Whether it lost its last target other than by preemption, or by a refusal before its first token.
    pub(super) is_replay: bool,
    /// Set while a preemption is processed.
    pub(super) is_preempted: bool,
    /// Time of its timer entry.
    pub(super) timer: Option<Duration>,
    /// Why its latest round asked no draft worker and had no lookup draft.
    pub(super) disabled_reason: Option<DisabledReason>,
    /// Prompt tokens that the target had cached from other sequences.
    pub(super) cached: CachedPrompt,
    /// State of shadow drafts for this sequence.
    pub(super) trial: Trial,
}

/// Failures of one sequence's targets.
#[derive(Debug, Default)]
pub(super) struct TargetFailures {
    /// Targets that were lost or left since one last committed anything; one that was lost twice is there
    /// twice.
    pub(super) lost: Vec<WorkerKey>,
    /// Target that it left last; other targets are preferred.
    pub(super) last_target: Option<WorkerKey>,
    /// Targets that refused it; they are not tried again.
    pub(super) refused_by: Vec<WorkerKey>,
    /// Reason of the last failure.
    pub(super) reason: Option<TargetFault>,
}

impl TargetFailures {
    /// Number of different targets that were lost.
    pub(super) fn num_targets_lost(&self) -> usize {
        self.lost.iter().collect::<HashSet<_>>().len()
    }

    /// Whether the sequence itself may cause its targets to fail.
    pub(super) fn is_suspect(&self) -> bool {
        self.num_targets_lost() >= SUSPECT_AFTER
    }

    /// Whether the sequence has used up its attempts.
    pub(super) fn is_final(&self) -> bool {
        self.lost.len() >= MAX_LOSSES
    }
}

/// Phase of a round before its verification is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum RoundPhase {
    /// Its first step is sent at once, or was sent.
    #[default]
    Begun,
    /// A decode step that is delayed to share a forward pass ([`crate::decode_delay`]).
    Delayed,
    /// A decode step in flight to the target.
    DecodeInFlight,
}

/// The current round.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Round {
    pub(super) begun_at: Duration,
    pub(super) phase: RoundPhase,
    /// Draft length chosen for the round.
    pub(super) chosen_k: u32,
    /// Predicted time of the proposal when the round began; taken when the proposal is requested.
    pub(super) predicted: Option<Duration>,
    /// Maximum number of tree tokens.
    pub(super) num_tree_tokens: u32,
    /// Whether it includes rows of a prompt or replay. Its time then tells nothing about drafting and
    /// verifying.
    pub(super) has_prompt: bool,
    /// The target's number of forwards with prompts when the round began.
    pub(super) prompt_forwards: u64,
    /// Source of its lookup draft, if it has one.
    pub(super) source: Option<LookupSource>,
    /// Whether it also sends a request to an unresponsive draft worker, without waiting for the proposal.
    pub(super) is_health_probe: bool,
    /// Number of tokens requested from a draft worker whose proposal the round waits for.
    pub(super) num_requested: u32,
    /// Number of committed ids in that request.
    pub(super) draft_rows: u32,
    /// Whether the proposal missed its deadline.
    pub(super) is_late: bool,
    /// When verification was first requested.
    pub(super) verify_at: Option<Duration>,
}

/// An outstanding request to a draft worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct PendingProposal {
    pub(super) step_seq: u64,
    pub(super) at: Duration,
    pub(super) num_draft_tokens: u32,
    /// Predicted time to the answer.
    pub(super) predicted: Duration,
}

impl ActiveSequence {
    /// Creates a sequence of this lane, without workers.
    pub(super) fn new(new: NewSequence, lane: LaneRef, now: Duration, config: &SchedulerConfig) -> Self {
        let NewSequence {
            id, spec, vocab_size, prompt, speculation, prediction, api_key, may_expire, ..
        } = new;
        let limits = SequenceConfig { vocab_size, target_deadline: config.target_deadline };
        let spec = SequenceSpec { lane: lane_number(&lane.key.task_type), ..spec };
        Self {
            id,
            sequence: Sequence::with_prefix(id, Arc::new(spec), prompt.prefix.clone(), limits),
            lane,
            speculation,
            api_key,
            target: None,
            draft: None,
            found_no_draft_at: None,
            failures: TargetFailures::default(),
            marks: Arc::clone(&prompt.marks),
            numerics_id: None,
            round: Round::default(),
            agreement: Agreement::default(),
            lookups: Lookups::new(prediction, prompt.prefix.len()),
            lookup_draft: None,
            pending_proposal: None,
            submitted_at: now,
            waiting_since: now,
            no_target_deadline: now,
            expires_at: may_expire.then(|| now + config.queue_wait),
            forward_sequences: [0; 2],
            is_replay: false,
            is_preempted: false,
            timer: None,
            disabled_reason: None,
            cached: CachedPrompt::default(),
            trial: Trial::default(),
        }
    }

    pub(super) fn worker(&self, role: Role) -> Option<WorkerKey> {
        let reservation = match role {
            Role::Draft => &self.draft,
            Role::Target => &self.target,
        };
        reservation.as_ref().map(|reservation| reservation.key)
    }

    /// The worker in this role, among all `workers`.
    pub(super) fn worker_in<'a>(&self, workers: &'a Workers, role: Role) -> Option<&'a Worker> {
        workers.get(self.worker(role)?)
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
            // The last prompt token at least is always computed.
            cached_tokens: self.cached.tokens().min(self.sequence.spec().prompt_len.saturating_sub(1).into()),
            accepted_prediction_tokens: appeared,
            rejected_prediction_tokens: not_yet,
            disabled_reason: self.disabled_reason.map(DisabledReason::as_str),
        }
    }

    pub(super) fn committed(&self, commit: Commit) -> CommittedRound {
        let source = self.round.source.filter(|_| commit.num_draft_tokens > 0);
        CommittedRound { id: self.id, lane: self.lane.id, commit, source, usage: self.usage() }
    }

    /// Records how much of the prompt the target had cached, also for a step that was sent again since. Only
    /// the target that generates the first token counts.
    pub(super) fn on_cached(&mut self, reply: &Reply) {
        if self.output_len() == 0 {
            self.cached.answered(reply);
        }
    }

    /// Whether its first step at its present target is not done. That step runs the whole context: the
    /// prompt, or a replay.
    pub(super) fn is_prefilling(&self) -> bool {
        self.target.as_ref().is_some_and(Reservation::is_prefilling)
    }

    /// Number of ids: prompt and output.
    pub(super) fn len(&self) -> u32 {
        self.sequence.ids().len() as u32
    }

    /// Number of generated ids.
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

    /// Time at which the sequence must be checked if nothing else happens to it.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let waits_until =
            || self.expires_at.map_or(self.no_target_deadline, |at| at.min(self.no_target_deadline));
        self.sequence.next_deadline().or_else(|| self.target.is_none().then(waits_until))
    }

    /// Whether it can use a draft worker.
    pub(super) fn can_use_draft(&self) -> bool {
        !self.speculation.disables_drafting() && self.sequence.draft_refusal().is_none()
    }
}

/// Further events for the same sequence that result from its actions.
pub(super) type FollowUps = std::collections::VecDeque<Event>;
