//! The draft worker's part of a round: requests proposals, feeds the worker, and uses proposals that arrive
//! in time or late.

use super::*;
use crate::acceptance::check_draft;

/// Minimum wait for the reply to a feed before the draft worker is asked again.
const FEED_WAIT: Duration = Duration::from_secs(1);

/// A draft worker that is not being asked but may be soon is fed when it lags this far.
const IDLE_FEED_LAG: u32 = 8;

/// One that will hardly be asked is fed this many ids at once, to compare them with its own draws. A feed that
/// is too long for a comparison leaves out as many of the latest drawn ids; the next step compares them.
const COMPARED_FEED: u32 = 32;

/// A feed that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DueFeed {
    /// Committed ids that the draft worker lacks.
    pub num_ids: u32,
    /// Whether the draft worker has no ids of the sequence.
    pub is_first: bool,
}

impl Sequence {
    pub(super) fn request_proposal(&mut self, now: Duration, request: ProposalRequest, wait: Duration) {
        let len = self.committed.len();
        let base = self.draft_cached_len().min(len - 1);
        self.send_to_draft(now, (base, len), Some(request), wait);
    }

    /// The feed of a draft worker that is not asked for a draft; `None`: it is not assigned, has not answered
    /// its last step, or lacks too few ids. One that may be asked soon is fed early; any other gets the prompt
    /// once a few ids were drawn.
    pub fn due_feed(&self, now: Duration, may_be_asked: bool) -> Option<DueFeed> {
        let lag = self.draft_lag();
        let is_due = match may_be_asked {
            true => lag >= IDLE_FEED_LAG,
            false => lag >= COMPARED_FEED && self.num_drawn() >= IDLE_FEED_LAG,
        };
        let feed = DueFeed { num_ids: lag, is_first: self.draft_cached_len() == 0 };
        (is_due && self.can_request_proposal(now)).then_some(feed)
    }

    /// Number of committed ids that the draft worker lacks.
    pub fn draft_lag(&self) -> u32 {
        self.committed.len() - self.draft_cached_len()
    }

    pub(super) fn feed_draft(&mut self, now: Duration, wait: Duration) {
        let base = self.draft_cached_len();
        let start = self.feed_end(base).min(base + MAX_CONTEXT_IDS as u32);
        let wait = wait.max(FEED_WAIT);
        self.send_to_draft(now, (base, start), None, wait);
        self.draft_retry_at = now + wait.max(self.draft_retry_wait);
    }

    /// Where a feed from `base` ends: at the last committed id if the worker can compare all ids with its own
    /// draws, else before the latest drawn ids, which it compares in the next step.
    fn feed_end(&self, base: u32) -> u32 {
        let len = self.committed.len();
        let is_comparable = base + 1 >= self.spec.prompt_len && (len - base) as usize <= MAX_COMPARED_IDS;
        if is_comparable { len } else { len - COMPARED_FEED.min(self.num_drawn()) }
    }

    fn send_to_draft(
        &mut self,
        now: Duration,
        (base, start): (u32, u32),
        requested: Option<ProposalRequest>,
        wait: Duration,
    ) {
        let work = match requested {
            None => Work::Feed,
            Some(ProposalRequest { num_draft_tokens, num_tree_tokens }) => {
                Work::Propose { num_draft_tokens, num_tree_tokens }
            }
        };
        let step = self.make_step(Role::Draft, base, start, work);
        self.draft.cached_len = base;
        self.last_proposal = None;
        self.draft.in_flight = Some(InFlight {
            step_seq: step.step_seq,
            start,
            requested,
            deadline: now + wait,
            wait,
            resends: 0,
        });
        self.actions.push(Action::Send(Role::Draft, step));
    }

    /// Number of ids whose KV is valid at the draft worker. Of the path of first children, k' ids long, it
    /// caches the first k' - 1.
    pub(super) fn draft_cached_len(&self) -> u32 {
        let Some(LastProposal { start, path, .. }) = &self.last_proposal else {
            return self.draft.cached_len;
        };
        let since = &self.committed.ids()[*start as usize..];
        let leading = path.iter().zip(since).take_while(|(a, b)| a == b).count();
        start + leading.min(path.len().saturating_sub(1)) as u32
    }

    /// Whether the draft worker may receive a step: it answered the last one, or its retry wait has passed.
    pub(super) fn try_free_draft(&mut self, now: Duration) -> bool {
        let Some(step) = &self.draft.in_flight else { return true };
        if now < self.draft_retry_at {
            return false;
        }
        // The reply is lost; the step may have run.
        self.draft.cached_len = step.start.min(self.committed.len());
        self.draft.in_flight = None;
        self.draft_retry_wait = (self.draft_retry_wait * 2).min(MAX_RETRY_WAIT);
        true
    }

    /// Called after a request whose proposal the round does not wait for. It may take as long as a feed
    /// before the worker is asked again.
    pub(super) fn on_unawaited_request(&mut self, now: Duration) {
        self.draft_retry_at = now + FEED_WAIT.max(self.draft_retry_wait);
    }

    /// Called when a proposal missed its deadline.
    pub(super) fn on_draft_timeout(&mut self, now: Duration) {
        let Some(step) = &self.draft.in_flight else { return };
        self.draft_retry_wait = (step.wait * 2).max(self.draft_retry_wait).min(MAX_RETRY_WAIT);
        self.draft_retry_at = now + self.draft_retry_wait;
    }

    pub(super) fn on_draft_fed(&mut self, now: Duration, step: &InFlight) {
        self.draft.cached_len = step.start;
        self.draft_retry_wait = Duration::ZERO;
        if self.committed.len() - step.start > FEED_LAG {
            self.feed_draft(now, step.wait);
        }
    }

    pub(super) fn on_proposal(&mut self, now: Duration, step: &InFlight, proposal: Proposal) {
        self.draft_retry_wait = Duration::ZERO;
        self.draft.cached_len = step.start;
        let proposal = match self.validated_proposal(step, proposal) {
            Some(proposal) => {
                let (step_seq, start) = (step.step_seq, proposal.start);
                let (path, ahead) = (proposal.draft.first_path(), Vec::new());
                self.last_proposal = Some(LastProposal { step_seq, start, path, ahead });
                proposal
            }
            None => Proposal { start: step.start, ..Proposal::default() },
        };
        if matches!(self.phase, Phase::Drafting { .. }) {
            self.verify(now, proposal.draft);
        } else if effective_mode(&self.spec) == AcceptanceMode::Rejection {
            self.report_anomaly(Anomaly::UnusableProposal);
        } else if self.replaced_step != Some(step.step_seq) {
            self.late_proposal = Some(proposal);
        }
    }

    /// Reduces a proposal to what a target does not refuse; `None` if it violates the contract as a whole.
    fn validated_proposal(&mut self, step: &InFlight, mut proposal: Proposal) -> Option<Proposal> {
        let ProposalRequest { num_draft_tokens: k, num_tree_tokens } =
            step.requested.unwrap_or(ProposalRequest { num_draft_tokens: 0, num_tree_tokens: 0 });
        let draft = &mut proposal.draft;
        let vocab_size = self.config.vocab_size;
        if effective_mode(&self.spec) != AcceptanceMode::Rejection {
            draft.q.clear();
        }
        let is_bounded = draft.token_ids.len() <= k.max(num_tree_tokens) as usize && draft.depth() <= k;
        // All or nothing: in rejection mode, dropping single ids because of their value would bias the text.
        let is_q_in_vocabulary = draft.q.iter().flatten().all(|(id, _)| *id < vocab_size);
        let is_verifiable = is_bounded && check_draft(&self.spec, step.start, draft).is_ok();
        if proposal.start != step.start || !is_verifiable || !is_q_in_vocabulary {
            self.report_anomaly(Anomaly::MalformedReply);
            return None;
        }
        if let Some(first_bad) = draft.token_ids.iter().position(|id| *id >= vocab_size) {
            draft.truncate(k, first_bad);
            self.report_anomaly(Anomaly::MalformedReply);
        }
        Some(proposal)
    }

    /// Returns the part of a late proposal that still applies to the next ids.
    pub(super) fn take_late_remainder(&mut self, request: ProposalRequest) -> Option<Draft> {
        let proposal = self.late_proposal.take()?;
        let since = &self.committed.ids()[proposal.start as usize..];
        let rest = request.remainder(&proposal.draft, since);
        if rest.is_none() {
            self.report_anomaly(Anomaly::UnusableProposal);
        }
        rest
    }

    /// Handles a draft worker with less cached than assumed.
    pub(super) fn draft_needs_context(&mut self, now: Duration, step: &InFlight) {
        let Phase::Drafting { until } = self.phase else { return };
        let wait = until.saturating_sub(now);
        match step.requested {
            Some(request) if self.committed.len() - self.draft.cached_len <= FEED_LAG => {
                self.request_proposal(now, request, wait)
            }
            _ => {
                self.feed_draft(now, wait);
                self.verify(now, Draft::default());
            }
        }
    }
}
