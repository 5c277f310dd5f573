//! The draft worker's half of a round: ask it, feed it, and make the best of what comes back, and when.

use super::*;

/// A draft worker that is fed gets at least this long before it is asked again.
const FEED_WAIT: Duration = Duration::from_secs(1);

/// A silent draft worker is asked again after twice its wait, twice that, and so on, up to this.
const MAX_RETRY_WAIT: Duration = Duration::from_secs(5);

/// The most entries of a shipped distribution (rejection mode).
const MAX_Q_ENTRIES: usize = 64;

impl Sequence {
    pub(super) fn ask_draft(&mut self, now: Duration, num_draft_tokens: u32, wait: Duration) {
        let len = self.committed.len();
        let base = self.draft_have().min(len - 1);
        self.send_to_draft(now, (base, len), Some(num_draft_tokens), wait);
    }

    pub(super) fn feed_draft(&mut self, now: Duration, wait: Duration) {
        let base = self.draft_have();
        let start = self.committed.len().min(base + MAX_CONTEXT_IDS as u32);
        let wait = wait.max(FEED_WAIT);
        self.send_to_draft(now, (base, start), None, wait);
        self.draft_retry_at = now + wait.max(self.draft_retry_wait);
    }

    fn send_to_draft(&mut self, now: Duration, (base, start): (u32, u32), k: Option<u32>, wait: Duration) {
        let work = k.map_or(Work::Feed, |num_draft_tokens| Work::Propose { num_draft_tokens });
        let step = self.make_step(Role::Draft, base, start, work);
        self.draft.cached_len = base;
        self.last_proposal = None;
        self.draft.in_flight = Some(InFlight {
            step_seq: step.step_seq,
            start,
            num_draft_tokens: k,
            deadline: now + wait,
            wait,
            resends: 0,
        });
        self.actions.push(Action::Send(Role::Draft, step));
    }

    /// How much of the draft worker's KV is valid: of k' proposed ids it holds the first k' - 1.
    pub(super) fn draft_have(&self) -> u32 {
        let Some((start, proposed)) = &self.last_proposal else { return self.draft.cached_len };
        let since = &self.committed.ids()[*start as usize..];
        let leading = proposed.iter().zip(since).take_while(|(a, b)| a == b).count();
        start + leading.min(proposed.len().saturating_sub(1)) as u32
    }

    /// Whether the draft worker may be sent a step: it answered the last one, or was silent long enough.
    pub(super) fn draft_is_free(&mut self, now: Duration) -> bool {
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

    /// A proposal was asked for that nobody waits for: it may take as long as a feed before the worker is asked again.
    pub(super) fn draft_unwaited(&mut self, now: Duration) {
        self.draft_retry_at = now + FEED_WAIT.max(self.draft_retry_wait);
    }

    /// The deadline of a proposal passed without it.
    pub(super) fn draft_missed(&mut self, now: Duration) {
        let Some(step) = &self.draft.in_flight else { return };
        self.draft_retry_wait = (step.wait * 2).max(self.draft_retry_wait).min(MAX_RETRY_WAIT);
        self.draft_retry_at = now + self.draft_retry_wait;
    }

    pub(super) fn draft_fed(&mut self, now: Duration, step: &InFlight) {
        self.draft.cached_len = step.start;
        self.draft_retry_wait = Duration::ZERO;
        if self.committed.len() - step.start > FEED_LAG {
            self.feed_draft(now, step.wait);
        }
    }

    pub(super) fn proposal(&mut self, now: Duration, step: &InFlight, proposal: Proposal) {
        self.draft_retry_wait = Duration::ZERO;
        self.draft.cached_len = step.start;
        let proposal = match self.sound_proposal(step, proposal) {
            Some(proposal) => {
                self.last_proposal = Some((proposal.start, proposal.draft.token_ids.clone()));
                proposal
            }
            None => Proposal { start: step.start, ..Proposal::default() },
        };
        if matches!(self.phase, Phase::Drafting { .. }) {
            self.verify(now, proposal.draft);
        } else if self.spec.acceptance == AcceptanceMode::Rejection {
            self.ignore(Ignored::UnusableProposal);
        } else {
            self.late = Some(proposal);
        }
    }

    /// What may be sent to a target of a proposal; `None` where it breaks the contract as a whole.
    fn sound_proposal(&mut self, step: &InFlight, mut proposal: Proposal) -> Option<Proposal> {
        let k = step.num_draft_tokens.unwrap_or(0) as usize;
        let draft = &mut proposal.draft;
        let vocab_size = self.limits.vocab_size;
        let q_is_sound = match self.spec.acceptance {
            AcceptanceMode::Rejection => {
                // Dropping single ids for their own value would bias the text: all or nothing.
                draft.q.len() == draft.token_ids.len()
                    && draft.token_ids.iter().zip(&draft.q).all(|(id, q)| {
                        q.len() <= MAX_Q_ENTRIES
                            && q.iter().any(|(other, _)| other == id)
                            && q.iter().all(|(id, w)| *id < vocab_size && w.is_finite() && *w >= 0.0)
                    })
            }
            AcceptanceMode::Coupled | AcceptanceMode::Typical => {
                draft.q.clear();
                true
            }
        };
        if proposal.start != step.start || draft.token_ids.len() > k || !q_is_sound {
            self.ignore(Ignored::MalformedReply);
            return None;
        }
        if let Some(first_bad) = draft.token_ids.iter().position(|id| *id >= vocab_size) {
            draft.token_ids.truncate(first_bad);
            self.ignore(Ignored::MalformedReply);
        }
        Some(proposal)
    }

    /// What a late proposal still says about the ids that come next.
    pub(super) fn take_late_rest(&mut self, num_draft_tokens: u32) -> Option<Draft> {
        let proposal = self.late.take()?;
        let since = &self.committed.ids()[proposal.start as usize..];
        match proposal.draft.token_ids.strip_prefix(since) {
            Some(rest) if !rest.is_empty() && num_draft_tokens > 0 => {
                let rest = &rest[..rest.len().min(num_draft_tokens as usize)];
                Some(Draft { token_ids: rest.to_vec(), q: Vec::new() })
            }
            _ => {
                self.ignore(Ignored::UnusableProposal);
                None
            }
        }
    }

    /// The draft worker holds less than was believed.
    pub(super) fn draft_needs_context(&mut self, now: Duration, step: &InFlight) {
        let Phase::Drafting { until } = self.phase else { return };
        let wait = until.saturating_sub(now);
        match step.num_draft_tokens {
            Some(k) if self.committed.len() - self.draft.cached_len <= FEED_LAG => {
                self.ask_draft(now, k, wait)
            }
            _ => {
                self.feed_draft(now, wait);
                self.verify(now, Draft::default());
            }
        }
    }
}
