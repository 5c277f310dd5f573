//! Beginning of rounds. The draft length is chosen first. Rounds with a draft leave at once. Decode steps
//! leave together with other decode steps of the same target if sharing its next forward pass pays
//! (`delayed.rs`). The health of the draft worker decides whether a round asks it and how long it
//! waits for the proposal ([`crate::draft_health`]). A lookup draft replaces the choice if it promises more;
//! such a round is a decode step with more rows.

use std::time::Duration;

use speculation::sequence::Event;
use speculation::{Role, SequenceId};

use super::Scheduler;
use super::active::{ActiveSequence, Round, RoundPhase};
use super::disabled_reason::DisabledReason;
use super::events::{Command, Report, WorkerKey};
use super::lanes::LaneChoice;
use super::lookup::LookupDraft;
use super::state::SchedulerState;
use crate::draft_health::{Access, PROBE_TOKENS, predicted_proposal};

/// Rounds between two computations of the target's step deadline. It is a rough bound, not worth computing in
/// every round.
const ROUNDS_PER_DEADLINE: u64 = 64;

/// How a round begins. By default it asks no draft worker.
#[derive(Debug, Default)]
struct RoundPlan {
    num_draft_tokens: u32,
    /// Maximum tokens of a tree; the draft is a chain unless this exceeds `num_draft_tokens`.
    num_tree_tokens: u32,
    /// Ask the unresponsive draft worker without waiting for the proposal.
    is_health_probe: bool,
    /// The round is a probe of another draft length and must not be replaced by a lookup draft.
    is_probe: bool,
    /// Why nothing is drafted.
    disabled_reason: Option<DisabledReason>,
}

impl RoundPlan {
    fn decode(reason: DisabledReason) -> Self {
        Self { disabled_reason: Some(reason), ..Self::default() }
    }
}

impl Scheduler {
    /// Begins the rounds of all sequences that are ready.
    pub(super) fn begin_rounds(&mut self) {
        while let Some(id) = self.state.ready.pop_front() {
            // Skip stale entries: the target was lost and a new entry will follow, or the round began or is
            // delayed because of another entry.
            let begins = |active: &ActiveSequence| {
                active.sequence.is_ready() && active.round.phase != RoundPhase::Delayed
            };
            if !self.sequences.get(&id).is_some_and(begins) {
                continue;
            }
            self.assign_draft(id);
            let Some(active) = self.sequences.get_mut(&id) else { continue };
            self.state.prepare_round(active);
            match active.round.phase {
                RoundPhase::Delayed => self.state.delayed.push(active),
                RoundPhase::Begun | RoundPhase::DecodeInFlight => self.begin_round(id),
            }
        }
        self.begin_decode_rounds();
    }

    pub(super) fn begin_round(&mut self, id: SequenceId) {
        let Some(active) = self.sequences.get_mut(&id) else { return };
        if let Some(LookupDraft { token_ids, .. }) = active.lookup_draft.take() {
            let feed_draft = self.state.feeds_draft(active);
            return self.drive(id, Event::BeginLookupRound { token_ids, feed_draft });
        }
        let num_tree_tokens = active.round.num_tree_tokens;
        let (num_draft_tokens, draft_wait) = match active.round {
            Round { is_health_probe: true, .. } => (PROBE_TOKENS, Duration::ZERO),
            Round { chosen_k: k, .. } => {
                let predicted = self.state.predicted_proposal(active, active.sequence.draft_lag(), k);
                active.round.predicted = Some(predicted);
                (k, self.state.draft_wait(active, predicted))
            }
        };
        let feed_draft = num_draft_tokens == 0 && self.state.feeds_draft(active);
        self.drive(id, Event::BeginRound { num_draft_tokens, num_tree_tokens, draft_wait, feed_draft });
    }
}

impl SchedulerState {
    /// Chooses how the next round of a sequence begins.
    fn prepare_round(&mut self, active: &mut ActiveSequence) {
        let pinned = self.lanes.policy().pinned_draft_tokens(&active.lane.key.task_type, &active.speculation);
        let mut plan = self.plan_round(active, pinned);
        let has_prompt = active.is_prefilling();
        active.lookup_draft = if has_prompt { None } else { self.look_up(active, &plan, pinned) };
        if active.lookup_draft.is_some() {
            plan = RoundPlan::default();
        }
        let RoundPlan { num_draft_tokens: k, num_tree_tokens, is_health_probe, disabled_reason, .. } = plan;
        active.disabled_reason = disabled_reason;
        let phase = if k == 0 && !has_prompt { RoundPhase::Delayed } else { RoundPhase::Begun };
        active.round = Round {
            begun_at: self.now,
            phase,
            chosen_k: k,
            source: active.lookup_draft.as_ref().map(|draft| draft.source),
            num_tree_tokens,
            has_prompt,
            prompt_forwards: self.target_prompt_forwards(active),
            is_health_probe,
            ..Round::default()
        };
        if active.sequence.counters().rounds.is_multiple_of(ROUNDS_PER_DEADLINE) {
            active.sequence.set_target_deadline(self.target_deadline(active));
        }
        if active.is_traced() {
            let num_looked_up = active.lookup_draft.as_ref().map_or(0, |draft| draft.token_ids.len() as u32);
            self.commands.push(Command::RoundBegun(active.id, k + num_looked_up));
        }
    }

    /// Number of forwards with prompts that the sequence's target has completed.
    fn target_prompt_forwards(&self, active: &ActiveSequence) -> u64 {
        active.worker_in(&self.workers, Role::Target).map_or(0, |target| target.cost.prompts.forwards())
    }

    /// Returns a lookup draft if it promises more than the round that was chosen. A draft length fixed by the
    /// request or the operator applies to the draft worker; there, a lookup draft of at most that length is
    /// used only in its absence.
    fn look_up(&self, active: &ActiveSequence, plan: &RoundPlan, pinned: Option<u32>) -> Option<LookupDraft> {
        let asks_worker = plan.num_draft_tokens > 0;
        let is_fixed = pinned.is_some() && asks_worker;
        if is_fixed || pinned == Some(0) || plan.is_health_probe || plan.is_probe {
            return None;
        }
        let max_tokens = pinned.unwrap_or(self.lanes.policy().lane(&active.lane.key.task_type).max_k);
        self.choose_lookup(active, asks_worker, max_tokens)
    }

    /// `pinned` is the draft length fixed by the request or the operator.
    fn plan_round(&mut self, active: &ActiveSequence, pinned: Option<u32>) -> RoundPlan {
        if active.speculation.disables_drafting() {
            return RoundPlan::decode(DisabledReason::Request);
        }
        if pinned == Some(0) {
            return RoundPlan::decode(DisabledReason::Policy);
        }
        if active.sequence.draft_refusal().is_some() {
            return RoundPlan::decode(DisabledReason::DraftRefused);
        }
        let (target, draft) = (active.worker(Role::Target), active.worker(Role::Draft));
        let Some(draft_worker) = draft.and_then(|key| self.workers.get_mut(key)) else {
            return RoundPlan::decode(DisabledReason::NoDraftWorker);
        };
        match draft_worker.draft_health.access(self.now) {
            Access::Wait => {}
            Access::Probe if active.sequence.can_request_proposal(self.now) => {
                draft_worker.draft_health.probed(self.now);
                let reason = DisabledReason::DraftSilent;
                return RoundPlan { is_health_probe: true, ..RoundPlan::decode(reason) };
            }
            Access::Probe | Access::Skip => return RoundPlan::decode(DisabledReason::DraftSilent),
        }
        let chosen = match pinned {
            Some(k) => Some(LaneChoice::fixed(k)),
            None => self.choose_draft_length(active, target, draft),
        };
        let Some(chosen) = chosen else { return RoundPlan::decode(DisabledReason::DoesNotPay) };
        let LaneChoice { num_draft_tokens, num_tree_tokens, held_back, is_probe } = chosen;
        let pinned_tree = self.lanes.policy().pinned_tree_tokens(&active.speculation);
        let max_tree_tokens =
            active.worker_in(&self.workers, Role::Target).map_or(0, |target| target.info.max_tree_tokens);
        RoundPlan {
            num_draft_tokens,
            num_tree_tokens: pinned_tree.unwrap_or(num_tree_tokens).min(max_tree_tokens),
            is_health_probe: false,
            is_probe,
            disabled_reason: (num_draft_tokens == 0)
                .then_some(held_back.unwrap_or(DisabledReason::DoesNotPay)),
        }
    }

    fn choose_draft_length(
        &mut self,
        active: &ActiveSequence,
        target: Option<WorkerKey>,
        draft: Option<WorkerKey>,
    ) -> Option<LaneChoice> {
        let workers = self.workers.lane_workers(target, draft)?;
        let (lane, draft_lag) = (&active.lane, active.sequence.draft_lag());
        let target_loads = || self.workers.target_loads(&lane.key.model, lane.id);
        let chosen = self.lanes.choose(lane.id, &workers, target_loads, draft_lag);
        if !chosen.is_probe {
            let report = Report::DraftLength(active.lane.id, chosen.num_draft_tokens);
            self.commands.push(Command::Report(report));
        }
        Some(chosen)
    }

    /// Whether the sequence's draft worker, not asked for a draft, is fed: enough ids are due, and the lane
    /// pays for them.
    fn feeds_draft(&mut self, active: &ActiveSequence) -> bool {
        let id = active.lane.id;
        let may_be_asked =
            self.lanes.draft_length_mut(id).keeps_drafts_fed() && !self.is_draft_silent(active);
        let Some(feed) = active.sequence.due_feed(self.now, may_be_asked) else { return false };
        let draft = active.worker_in(&self.workers, Role::Draft);
        draft.is_some_and(|draft| self.lanes.draft_length_mut(id).pays_for_feed(feed, &draft.cost))
    }

    /// Whether the sequence's draft worker does not answer. What it is sent would only queue up.
    fn is_draft_silent(&self, active: &ActiveSequence) -> bool {
        active.worker_in(&self.workers, Role::Draft).is_some_and(|worker| worker.draft_health.is_silent())
    }

    /// How long a round waits for a proposal that is predicted to take `predicted`.
    fn draft_wait(&self, active: &ActiveSequence, predicted: Duration) -> Duration {
        let worker = active.worker_in(&self.workers, Role::Draft);
        worker.map_or(Duration::ZERO, |worker| worker.draft_health.deadline(predicted))
    }

    /// Predicted time of the sequence's draft worker for `k` tokens after `rows` ids that it lacks.
    pub(super) fn predicted_proposal(&self, active: &ActiveSequence, rows: u32, k: u32) -> Duration {
        let worker = active.worker_in(&self.workers, Role::Draft);
        let context_len = f64::from(active.len());
        worker.map_or(Duration::ZERO, |worker| {
            predicted_proposal((rows, k), worker.load, context_len, &worker.cost)
        })
    }

    /// Records that the sequence's decode step, if one is in flight or delayed, is done at its target, or is
    /// not sent there. At the next target another round begins, with a replay.
    pub(super) fn decode_answered(&mut self, active: &mut ActiveSequence) {
        match active.round.phase {
            RoundPhase::Begun => return,
            RoundPhase::Delayed => {
                active.round.phase = RoundPhase::Begun;
                return self.delayed.leave(active.id, active.worker(Role::Target));
            }
            RoundPhase::DecodeInFlight => active.round.phase = RoundPhase::Begun,
        }
        if let Some(worker) = active.worker(Role::Target).and_then(|key| self.workers.get_mut(key)) {
            worker.decodes_in_flight = worker.decodes_in_flight.saturating_sub(1);
            self.delayed.target_changed(worker.key);
        }
    }
}
