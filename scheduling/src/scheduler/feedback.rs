//! Learning from replies: times of forward passes, network and rounds, and acceptance of drafts.

use speculation::sequence::Commit;
use speculation::tree::DraftOutcome;
use speculation::{Reply, ReplyBody, Role, Step};

use super::active::{ActiveSequence, PendingProposal};
use super::events::{Command, Report, StepTiming, WorkerKey};
use super::state::SchedulerState;
use crate::cost::{ForwardShape, micros};
use crate::draft_length::RoundTimes;

impl SchedulerState {
    /// Learns from one forward pass of a worker. One with prompt rows shows how much time these add for the
    /// other rows, if it has any.
    pub(super) fn on_timing(&mut self, key: WorkerKey, timing: &StepTiming) {
        let is_informative = timing.rows > 0 && timing.sequences > 0;
        let Some(worker) = self.workers.get_mut(key).filter(|_| is_informative) else { return };
        let round_rows = timing.rows.saturating_sub(timing.prefill_rows);
        if round_rows == 0 {
            return worker.cost.prompts.observe_alone();
        }
        let forward = ForwardShape::measured(round_rows, timing.sequences, timing.kv_tokens);
        if timing.prefill_rows == 0 {
            worker.cost.observe_forward(forward, timing.compute);
            worker.cost.prompts.observe(micros(timing.compute), None);
        } else {
            let rounds_us = worker.cost.forward_us(forward);
            worker.cost.prompts.observe(rounds_us, Some(micros(timing.compute) - rounds_us));
        }
    }

    /// Records that a draft worker answered. Any answer ends an outage, whether its sequence still waits for
    /// it or has moved to another worker.
    pub(super) fn on_draft_answer(&mut self, key: WorkerKey) {
        let Some(worker) = self.workers.get_mut(key) else { return };
        let was_silent = worker.draft_health.is_silent();
        worker.draft_health.answered(self.now);
        if was_silent {
            self.workers.health_changed(key);
            self.commands.push(Command::Report(Report::DraftWorkerRecovered(key)));
        }
    }

    /// Learns the round-trip time of a reply, and the network's part of it.
    pub(super) fn on_reply_time(
        &mut self,
        active: &mut ActiveSequence,
        key: WorkerKey,
        reply: &Reply,
        timing: &StepTiming,
    ) {
        let now = self.now;
        let Some(worker) = self.workers.get_mut(key) else { return };
        let role = worker.info.role;
        if !active.sequence.awaits(role, reply) {
            return;
        }
        if role == Role::Target {
            active.forward_sequences[0] = timing.sequences;
            // The step is sent again with the context that the target has lost.
            active.round.has_prompt |= matches!(reply.body, ReplyBody::NeedContext { .. });
        }
        let round = active.round;
        let (requested_at, forwards) = match role {
            Role::Draft => {
                let Some(pending) = active.pending_proposal.take_if(|pending| is_proposal_of(reply, pending))
                else {
                    return;
                };
                worker.cost.drafted_ahead.observe(reply.num_ahead, pending.num_draft_tokens);
                // Tokens drafted ahead would make the proposal look too fast.
                if reply.num_ahead == 0 {
                    worker.draft_health.observe(now.saturating_sub(pending.at), pending.predicted);
                }
                if !active.sequence.is_drafting() {
                    return;
                }
                (pending.at, forwards_waited_for(reply, pending.num_draft_tokens))
            }
            // A prompt or replay may run in several forwards, of which the reply reports only the last.
            Role::Target => match round.verify_at.filter(|_| !round.has_prompt) {
                Some(verify_at) => (verify_at, 1),
                None => return,
            },
        };
        let worked = timing.queue.saturating_add(timing.compute.saturating_mul(forwards));
        worker.cost.observe_wire(now.saturating_sub(requested_at), worked);
    }

    /// Learns which of the committed tokens a draft worker would have drawn.
    pub(super) fn on_agreement(&mut self, active: &mut ActiveSequence, role: Role, reply: &Reply) {
        if role == Role::Draft && active.sequence.awaits(role, reply) {
            for (positions, accepted) in active.agreement.observe_reported(&reply.agreed) {
                self.lanes.draft_length_mut(active.lane.id).observe_agreement(positions, accepted);
            }
        }
    }

    /// Records a proposal request to a draft worker.
    pub(super) fn on_proposal_requested(
        &mut self,
        active: &mut ActiveSequence,
        step: &Step,
        num_draft_tokens: u32,
    ) {
        let num_ids = step.append_ids.len() as u32;
        let predicted = match active.round.predicted.take() {
            Some(predicted) if num_draft_tokens == active.round.chosen_k => predicted,
            _ => self.predicted_proposal(active, num_ids, num_draft_tokens),
        };
        let (step_seq, at) = (step.step_seq, self.now);
        active.pending_proposal = Some(PendingProposal { step_seq, at, num_draft_tokens, predicted });
        if !active.round.is_health_probe {
            active.round.num_requested = num_draft_tokens;
            active.round.draft_rows = num_ids;
        }
    }

    /// Records that verification was requested, with `supplied` drafted tokens.
    pub(super) fn on_verify_requested(&mut self, active: &mut ActiveSequence, supplied: u32) {
        if active.round.verify_at.is_some() {
            return;
        }
        active.round.verify_at = Some(self.now);
        if active.round.num_requested == 0 {
            return;
        }
        let draft = active.worker_in(&self.workers, Role::Draft);
        if draft.is_none_or(|worker| worker.draining.is_active()) {
            // A worker that was lost or began to drain meanwhile tells nothing about those that remain.
            active.round.num_requested = 0;
            return;
        }
        let draft_length = self.lanes.draft_length_mut(active.lane.id);
        draft_length.observe_proposal(active.round.num_requested, supplied);
    }

    /// Records that a proposal missed its deadline.
    pub(super) fn on_late_draft(&mut self, active: &ActiveSequence) {
        let (now, requested_at) = (self.now, active.pending_proposal.map(|pending| pending.at));
        let Some(requested_at) = requested_at else { return };
        let Some(worker) = active.worker(Role::Draft).and_then(|key| self.workers.get_mut(key)) else {
            return;
        };
        if worker.draft_health.deadline_missed(requested_at, now) {
            let worker = worker.key;
            self.workers.health_changed(worker);
            let report = Report::DraftWorkerSilent { worker, waited: now - requested_at };
            self.commands.push(Command::Report(report));
        }
    }

    /// Learns from a completed round. Its time counts only if the round had no prompt and the chosen draft
    /// length.
    pub(super) fn on_round(&mut self, active: &mut ActiveSequence, commit: &Commit) {
        let now = self.now;
        let (lane, round) = (active.lane.id, active.round);
        // A lookup draft tells nothing about the lane's draft worker.
        let evidence = if round.source.is_some() { DraftOutcome::default() } else { commit.draft_outcome };
        // Acceptance by position is that of a chain; in a tree, that of the first children.
        let (judged, accepted) = (evidence.num_positions, evidence.num_first);
        self.lanes.on_verified(lane, &evidence, active.len());
        active.agreement.on_verified(judged, accepted);
        active.trial.served(judged, accepted);
        let Some(verify_at) = round.verify_at else { return };
        if round.has_prompt || round.num_requested != round.chosen_k || round.source.is_some() {
            return;
        }
        let (target, draft) = (active.worker(Role::Target), active.worker(Role::Draft));
        let Some(workers) = self.workers.lane_workers(target, draft) else { return };
        let times = RoundTimes {
            num_draft_tokens: round.num_requested,
            draft_rows: round.draft_rows,
            draft_wait: verify_at.saturating_sub(round.begun_at),
            verify: now.saturating_sub(verify_at),
            committed: commit.token_ids.len() as u32,
            num_leaves: commit.num_draft_tokens.saturating_sub(judged),
            forward_sequences: active.forward_sequences,
            met_prompts: workers.target.prompts.forwards() != round.prompt_forwards,
        };
        active.forward_sequences[1] = active.forward_sequences[0];
        self.lanes.draft_length_mut(lane).observe_round(&times, workers.target, workers.draft);
    }
}

/// Number of forward passes that the router waited for until a draft worker answered a request for `asked`
/// tokens. A proposal that ends early, such as after a stop token, takes fewer than were requested.
fn forwards_waited_for(reply: &Reply, asked: u32) -> u32 {
    let ReplyBody::Proposal(proposal) = &reply.body else { return 0 };
    proposal.draft.depth().clamp(1, asked.max(1)).saturating_sub(reply.num_ahead)
}

fn is_proposal_of(reply: &Reply, pending: &PendingProposal) -> bool {
    reply.step_seq == pending.step_seq && matches!(reply.body, ReplyBody::Proposal(_))
}
