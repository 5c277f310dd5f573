//! The router's end of the protocol (contract part A): one sequence, from prompt to finish, as
//! `step(now, event) -> actions`. Contains no clock, socket or task. A driver sends the steps of
//! [`Action::Send`] and passes back what arrives, in any order, late, twice or never.
//!
//! A round: request a proposal from the draft worker, wait no longer than its deadline, and have the target
//! verify whatever has arrived. A proposal that was drafted ahead of what the target then committed is
//! verified at once. A target with too little cached is fed first. A draft worker with too little cached is
//! fed in parallel with the target's step, and the round continues without it.

mod ahead;
mod draft;
mod events;
mod link;
mod lookup;
#[cfg(test)]
mod network_tests;
mod shadow;
mod target;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use crate::acceptance::{effective_mode, supports_trees};
use crate::prefix::Prefix;
use crate::step::{
    Draft, FinishReason, MAX_COMPARED_IDS, MAX_CONTEXT_IDS, MAX_DRAFT_TOKENS, PromptLogprobs, Proposal,
    ProposalAhead, Reply, ReplyBody, Step, TokenSpan, Work,
};
use crate::tree::MAX_TREE_TOKENS;
use crate::{AcceptanceMode, Refusal, Role, SequenceId, SequenceSpec, TokenId};
use ahead::LastProposal;
pub use draft::DueFeed;
pub use events::{Action, Anomaly, Commit, Counters, Event, TargetFault};
use link::{InFlight, ProposalRequest, WorkerLink};
pub use shadow::{SHADOW_TOKENS, Shadow, ShadowFault, ShadowScore};

/// A worker that lags by more ids is fed before it is asked to draw.
pub const FEED_LAG: u32 = 64;

/// Maximum wait before a silent draft worker is asked again; the wait doubles each time.
pub const MAX_RETRY_WAIT: Duration = Duration::from_secs(5);

/// Consecutive `need_context` replies that end an assignment.
const MAX_MISSES: u32 = 3;

/// Number of resends of a target step before the target is dropped.
const MAX_RESENDS: u32 = 2;

/// Settings that the driver fixes for every sequence.
#[derive(Debug, Clone, Copy)]
pub struct SequenceConfig {
    /// Ids at and above this are invalid; a proposal is cut before the first such id.
    pub vocab_size: u32,
    /// Timeout of a target step, after which it is sent again.
    pub target_deadline: Duration,
}

#[derive(Debug, PartialEq)]
enum Phase {
    /// No target assigned.
    Unassigned,
    /// Waiting for the lane to begin a round.
    Ready,
    /// Waiting for a proposal until `until`.
    Drafting { until: Duration },
    /// Waiting for the target: a feed or a verification.
    Target,
    /// Finished or cancelled.
    Done,
}

/// One sequence at the router. See the module documentation.
#[derive(Debug)]
pub struct Sequence {
    id: SequenceId,
    spec: Arc<SequenceSpec>,
    /// The spec as the draft worker gets it.
    draft_spec: Arc<SequenceSpec>,
    config: SequenceConfig,
    committed: Prefix,
    phase: Phase,
    step_seq: u64,
    target: WorkerLink,
    draft: WorkerLink,
    /// The draft of the current round, kept for resends.
    verifying: Draft,
    /// A proposal that arrived after its deadline and may still be useful.
    late_proposal: Option<Proposal>,
    /// The last proposal received, used or not: it determines how much of the draft worker's KV is valid.
    last_proposal: Option<LastProposal>,
    /// The draft worker's step whose proposal was drafted ahead and used before the answer.
    replaced_step: Option<u64>,
    /// When a silent draft worker may be asked again, and the wait, which doubles each time.
    draft_retry_at: Duration,
    draft_retry_wait: Duration,
    draft_refusal: Option<String>,
    /// Prompt ids before this position are scored.
    prompt_scored: u32,
    counters: Counters,
    actions: Vec<Action>,
}

impl Sequence {
    /// Creates a sequence with its prompt and no target.
    pub fn new(id: SequenceId, spec: Arc<SequenceSpec>, prompt: &[TokenId], config: SequenceConfig) -> Self {
        Self::with_prefix(id, spec, Prefix::new(prompt), config)
    }

    /// Like [`Self::new`], with a prompt that is hashed already.
    pub fn with_prefix(
        id: SequenceId,
        spec: Arc<SequenceSpec>,
        prompt: Prefix,
        config: SequenceConfig,
    ) -> Self {
        Self {
            id,
            draft_spec: without_logprobs(&spec),
            spec,
            config,
            committed: prompt,
            phase: Phase::Unassigned,
            step_seq: 0,
            target: WorkerLink::default(),
            draft: WorkerLink::default(),
            verifying: Draft::default(),
            late_proposal: None,
            last_proposal: None,
            replaced_step: None,
            draft_retry_at: Duration::ZERO,
            draft_retry_wait: Duration::ZERO,
            draft_refusal: None,
            prompt_scored: 1,
            counters: Counters::default(),
            actions: Vec::new(),
        }
    }

    /// Prompt and committed output.
    pub fn ids(&self) -> &[TokenId] {
        self.committed.ids()
    }

    /// The spec of the sequence.
    pub fn spec(&self) -> &Arc<SequenceSpec> {
        &self.spec
    }

    /// Counters so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Whether the sequence has ended.
    pub fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }

    /// Whether a round may begin.
    pub fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }

    /// Whether the sequence is waiting for a proposal.
    pub fn is_drafting(&self) -> bool {
        matches!(self.phase, Phase::Drafting { .. })
    }

    /// Why the draft worker refused this sequence, if it did.
    pub fn draft_refusal(&self) -> Option<&str> {
        self.draft_refusal.as_deref()
    }

    /// Sets the timeout of the target's next steps, after which a step is sent again.
    pub fn set_target_deadline(&mut self, deadline: Duration) {
        self.config.target_deadline = deadline;
    }

    /// Whether the draft worker may receive a step: none is in flight, or its retry wait has passed.
    pub fn can_request_proposal(&self, now: Duration) -> bool {
        self.draft.assigned && (self.draft.in_flight.is_none() || now >= self.draft_retry_at)
    }

    /// Whether this reply answers the latest step of that role.
    pub fn awaits(&self, role: Role, reply: &Reply) -> bool {
        self.link(role).answers(reply)
    }

    /// When to pass [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Duration> {
        match &self.phase {
            Phase::Drafting { until } => Some(*until),
            Phase::Target => self.target.in_flight.as_ref().map(|step| step.deadline),
            Phase::Unassigned | Phase::Ready | Phase::Done => None,
        }
    }

    /// The only entry point: handles an event and returns the actions to carry out, in order.
    pub fn step(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.step_into(now, event, &mut actions);
        actions
    }

    /// Like [`Self::step`], appending to an existing buffer.
    pub fn step_into(&mut self, now: Duration, event: Event, actions: &mut Vec<Action>) {
        std::mem::swap(&mut self.actions, actions);
        self.handle(now, event);
        std::mem::swap(&mut self.actions, actions);
    }

    fn handle(&mut self, now: Duration, event: Event) {
        if self.phase != Phase::Done {
            match event {
                Event::Assigned(role) => self.on_assigned(now, role),
                Event::Lost(role) => self.on_lost(now, role),
                Event::Reassign(role) if self.link(role).assigned => self.drop_worker(now, role),
                Event::Reassign(_) => {}
                Event::BeginRound { num_draft_tokens, num_tree_tokens, draft_wait, feed_draft } => {
                    let desired = ProposalRequest { num_draft_tokens, num_tree_tokens };
                    self.begin_round(now, desired, draft_wait, feed_draft);
                }
                Event::BeginLookupRound { token_ids, feed_draft } => {
                    self.begin_lookup_round(now, token_ids, feed_draft);
                }
                Event::Reply(role, reply) => self.on_reply(now, role, reply),
                Event::ProposalAhead(ahead) => self.on_proposal_ahead(ahead),
                Event::Preempted(role, epoch) => {
                    if epoch == self.link(role).epoch && self.link(role).assigned {
                        self.on_lost(now, role);
                    }
                }
                Event::Tick => self.on_tick(now),
                Event::Cancel => self.finish(None),
            }
        }
    }

    fn on_assigned(&mut self, now: Duration, role: Role) {
        self.link_mut(role).assign();
        match role {
            Role::Draft => {
                self.forget_proposals();
                self.draft_retry_at = Duration::ZERO;
                self.draft_retry_wait = Duration::ZERO;
            }
            Role::Target if self.phase == Phase::Unassigned => self.score_or_ready(now),
            Role::Target => {}
        }
    }

    fn on_lost(&mut self, now: Duration, role: Role) {
        self.link_mut(role).release();
        match role {
            Role::Draft => {
                self.forget_proposals();
                if matches!(self.phase, Phase::Drafting { .. }) {
                    self.verify(now, Draft::default());
                }
            }
            Role::Target => {
                self.phase = Phase::Unassigned;
                self.verifying = Draft::default();
            }
        }
        self.actions.push(Action::Assign(role));
    }

    /// A sequence that may draw nothing is only scored, if requested; any other waits for the lane.
    fn score_or_ready(&mut self, now: Duration) {
        if self.spec.max_len > self.committed.len() {
            self.phase = Phase::Ready;
            self.actions.push(Action::Ready);
        } else if self.wants_prompt_logprobs() {
            self.send_to_target(now, self.config.target_deadline, 0);
        } else {
            self.finish(Some(FinishReason::Length));
        }
    }

    fn begin_round(
        &mut self,
        now: Duration,
        desired: ProposalRequest,
        draft_wait: Duration,
        feed_draft: bool,
    ) {
        if self.phase != Phase::Ready {
            return;
        }
        // Every id of a tree takes a position in the target's KV until it is verified.
        let room = self.spec.max_len.saturating_sub(self.committed.len() + 1);
        let k = desired.num_draft_tokens.min(room).min(MAX_DRAFT_TOKENS as u32);
        let most = if supports_trees(&self.spec) { room.min(MAX_TREE_TOKENS as u32) } else { 0 };
        let request =
            ProposalRequest { num_draft_tokens: k, num_tree_tokens: desired.num_tree_tokens.min(most) };
        if let Some(rest) = self.take_late_remainder(request) {
            return self.verify(now, rest);
        }
        let can_ask = self.draft.assigned && self.try_free_draft(now);
        let draft_lag = self.draft_lag();
        let prefilling = self.committed.len() - self.target.cached_len > FEED_LAG;
        if can_ask && k > 0 && !prefilling && draft_lag <= FEED_LAG {
            let ahead = self.proposal_ahead(request);
            self.request_proposal(now, request, draft_wait);
            if let Some(draft) = ahead {
                return self.verify_proposal_ahead(now, draft);
            }
            if draft_wait.is_zero() {
                self.on_unawaited_request(now);
                return self.verify(now, Draft::default());
            }
            self.phase = Phase::Drafting { until: now + draft_wait };
            return;
        }
        let worth_feeding = match desired.num_draft_tokens {
            0 => feed_draft && draft_lag > 0,
            _ => k > 0 && draft_lag > 1,
        };
        if can_ask && worth_feeding {
            self.feed_draft(now, draft_wait);
        }
        self.verify(now, Draft::default());
    }

    /// Number of committed ids that are not the prompt's.
    fn num_drawn(&self) -> u32 {
        self.committed.len().saturating_sub(self.spec.prompt_len)
    }

    fn on_reply(&mut self, now: Duration, role: Role, reply: Reply) {
        let link = self.link_mut(role);
        if !link.answers(&reply) {
            return self.report_anomaly(Anomaly::StaleReply);
        }
        let Some(step) = link.in_flight.take() else { return self.report_anomaly(Anomaly::StaleReply) };
        let is_target = role == Role::Target;
        // A feed to a target is only half of its work: it could take the feed and lose it again without end.
        let is_progress = match reply.body {
            ReplyBody::NeedContext { .. } => false,
            ReplyBody::Fed { .. } => !is_target,
            _ => true,
        };
        if is_progress {
            link.misses = 0;
        }
        match reply.body {
            ReplyBody::Span(span) if is_target => self.on_span(now, span),
            ReplyBody::Proposal(proposal) if !is_target => self.on_proposal(now, &step, proposal),
            ReplyBody::Fed { prompt_logprobs, .. } if is_target && self.is_feed(&step) => {
                self.on_target_fed(now, &step, prompt_logprobs)
            }
            ReplyBody::Fed { .. } if !is_target && step.requested.is_none() => self.on_draft_fed(now, &step),
            ReplyBody::NeedContext { cached_len, has_spec } => {
                self.on_need_context(now, role, &step, (cached_len, has_spec));
            }
            ReplyBody::Refused(refusal) => self.on_refused(now, role, refusal),
            // Includes `fed` in reply to a request for a span or proposal: asking again could loop forever.
            ReplyBody::Proposal(_) | ReplyBody::Span(_) | ReplyBody::Fed { .. } => {
                self.on_protocol_violation(now, role);
            }
        }
    }

    /// Resends from the worker's cached length; the second time in a row from the start; the third time drops
    /// the worker.
    fn on_need_context(
        &mut self,
        now: Duration,
        role: Role,
        step: &InFlight,
        (cached_len, has_spec): (u32, bool),
    ) {
        let len = self.committed.len();
        let link = self.link_mut(role);
        link.misses += 1;
        if link.misses >= MAX_MISSES {
            return match role {
                Role::Target => self.drop_target(now, TargetFault::ProtocolViolation),
                Role::Draft => self.drop_worker(now, role),
            };
        }
        let first = link.misses == 1;
        link.cached_len = if first { cached_len.min(len) } else { 0 };
        link.spec_sent = first && has_spec;
        match role {
            Role::Target => self.send_to_target(now, step.wait, step.resends),
            Role::Draft => self.draft_needs_context(now, step),
        }
    }

    fn on_refused(&mut self, now: Duration, role: Role, refusal: Refusal) {
        match role {
            Role::Target if !self.verifying.token_ids.is_empty() => self.verify(now, Draft::default()),
            Role::Target => self.drop_target(now, TargetFault::Refused(refusal)),
            Role::Draft => {
                self.actions.push(Action::Close(role, self.draft.epoch));
                self.draft.release();
                self.draft_refusal = Some(refusal.reason);
                if matches!(self.phase, Phase::Drafting { .. }) {
                    self.verify(now, Draft::default());
                }
            }
        }
    }

    fn on_protocol_violation(&mut self, now: Duration, role: Role) {
        self.report_anomaly(Anomaly::MalformedReply);
        match role {
            Role::Target => self.drop_target(now, TargetFault::ProtocolViolation),
            Role::Draft => self.drop_worker(now, role),
        }
    }

    fn drop_target(&mut self, now: Duration, fault: TargetFault) {
        self.actions.push(Action::TargetFault(fault));
        self.drop_worker(now, Role::Target);
    }

    fn drop_worker(&mut self, now: Duration, role: Role) {
        self.actions.push(Action::Close(role, self.link(role).epoch));
        self.on_lost(now, role);
    }

    fn make_step(&mut self, role: Role, base: u32, start: u32, work: Work) -> Step {
        self.step_seq += 1;
        let step_seq = self.step_seq;
        let spec = match role {
            Role::Draft => &self.draft_spec,
            Role::Target => &self.spec,
        };
        let spec = (!self.link(role).spec_sent).then(|| Arc::clone(spec));
        let link = self.link_mut(role);
        link.spec_sent = true;
        let epoch = link.epoch;
        Step {
            sequence_id: self.id,
            epoch,
            step_seq,
            spec,
            base_len: base,
            prefix_hash: self.committed.hash_at(base).expect("base_len is at most the committed length"),
            append_ids: self.committed.ids()[base as usize..start as usize].to_vec(),
            work,
        }
    }

    fn on_tick(&mut self, now: Duration) {
        match &self.phase {
            Phase::Drafting { until } if now >= *until => {
                self.report_anomaly(Anomaly::LateDraft);
                self.on_draft_timeout(now);
                self.verify(now, Draft::default());
            }
            Phase::Target => self.resend_overdue(now),
            _ => {}
        }
    }

    fn finish(&mut self, reason: Option<FinishReason>) {
        self.phase = Phase::Done;
        for role in [Role::Draft, Role::Target] {
            if self.link(role).assigned {
                self.actions.push(Action::Close(role, self.link(role).epoch));
            }
        }
        if let Some(reason) = reason {
            self.actions.push(Action::Finished(reason));
        }
    }

    fn report_anomaly(&mut self, why: Anomaly) {
        self.actions.push(Action::Anomaly(why));
    }

    fn link(&self, role: Role) -> &WorkerLink {
        match role {
            Role::Draft => &self.draft,
            Role::Target => &self.target,
        }
    }

    fn link_mut(&mut self, role: Role) -> &mut WorkerLink {
        match role {
            Role::Draft => &mut self.draft,
            Role::Target => &mut self.target,
        }
    }
}

/// Log probabilities are the target's: a draft worker that was asked for them would compute the logits of
/// every prompt row, and reuse no prefix, for scores that nobody reads.
fn without_logprobs(spec: &Arc<SequenceSpec>) -> Arc<SequenceSpec> {
    if spec.logprobs.is_none() && spec.prompt_logprobs.is_none() {
        return Arc::clone(spec);
    }
    Arc::new(SequenceSpec { logprobs: None, prompt_logprobs: None, ..(**spec).clone() })
}
