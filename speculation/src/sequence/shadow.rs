//! A draft worker on trial. It is fed a sequence's committed ids and asked for proposals, like the sequence's
//! own draft worker. Its proposals are compared with the target's commits and never sent to a target, so they
//! do not affect the sequence.
//!
//! With shared noise (contract B4) the comparison is exact: a target would have accepted the proposal as far
//! as it matches the committed ids.

use super::*;

/// Number of tokens requested from a shadow draft. Deeper positions are rarely reached and cost a forward
/// pass each.
pub const SHADOW_TOKENS: u32 = 4;

/// Timeout after which a shadow draft is dropped for the sequence.
const SHADOW_TIMEOUT: Duration = Duration::from_secs(5);

/// Bit that marks the ids of shadow sequences, so that one worker may hold both a sequence and its shadow.
const SHADOW_BIT: u64 = 1 << 63;

/// The state of one shadow draft for one sequence.
#[derive(Debug)]
pub struct Shadow {
    id: SequenceId,
    spec: Arc<SequenceSpec>,
    step_seq: u64,
    link: WorkerLink,
    proposal: Option<UncheckedProposal>,
    /// Position of the latest request: one per position, even if an empty proposal returns early.
    last_requested_at: Option<u32>,
}

#[derive(Debug)]
struct UncheckedProposal {
    start: u32,
    asked: u32,
    token_ids: Vec<TokenId>,
}

/// Comparison of one shadow proposal with the committed ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShadowScore {
    /// Position of its first guess.
    pub start: u32,
    /// Number of requested tokens.
    pub asked: u32,
    /// Number of positions that the comparison decides: the accepted ones and the first rejected one.
    pub judged: u32,
    /// Number of leading guesses that were committed.
    pub accepted: u32,
}

/// Why a shadow draft is dropped early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShadowFault {
    /// The worker did not answer in time.
    Timeout,
    /// The worker refused the sequence.
    Refused,
    /// The worker's reply violates the contract, or it repeatedly lost the sequence.
    ProtocolViolation,
}

impl Shadow {
    /// Creates the shadow of `sequence` at a worker that has nothing cached.
    pub fn new(sequence: &Sequence) -> Self {
        let mut link = WorkerLink::default();
        link.assign();
        let spec = SequenceSpec {
            // Lowest priority, so that it yields to all served sequences; no spans in the request's trace.
            priority: u8::MAX,
            traceparent: String::new(),
            ..(*sequence.draft_spec).clone()
        };
        let id = SequenceId(sequence.id.0 | SHADOW_BIT);
        Self { id, spec: Arc::new(spec), step_seq: 0, link, proposal: None, last_requested_at: None }
    }

    /// The sequence of this shadow id; `None` for ids of ordinary sequences.
    pub fn sequence_of(id: SequenceId) -> Option<SequenceId> {
        (id.0 & SHADOW_BIT != 0).then_some(SequenceId(id.0 & !SHADOW_BIT))
    }

    /// Whether proposals for a sequence can be compared: other acceptance modes use different acceptance
    /// rules.
    pub fn can_score(spec: &SequenceSpec) -> bool {
        spec.acceptance == AcceptanceMode::Coupled
    }

    /// The id and epoch at the worker, for closing it there.
    pub fn key(&self) -> (SequenceId, u32) {
        (self.id, self.link.epoch)
    }

    /// The step to send now, if one is due: a feed of ids that the worker lacks, or a request for a proposal.
    pub fn next_step(&mut self, now: Duration, sequence: &Sequence) -> Option<Step> {
        if self.link.in_flight.is_some() || self.proposal.is_some() {
            return None;
        }
        let committed = &sequence.committed;
        let (have, len) = (self.link.cached_len, committed.len());
        let k = SHADOW_TOKENS.min(self.spec.max_len.saturating_sub(len + 1));
        if k == 0 || self.last_requested_at == Some(len) {
            return None;
        }
        let is_behind = len - have > FEED_LAG;
        let (base, start) =
            if is_behind { (have, len.min(have + MAX_CONTEXT_IDS as u32)) } else { (have.min(len - 1), len) };
        self.last_requested_at = (!is_behind).then_some(len);
        let requested = (!is_behind).then_some(ProposalRequest { num_draft_tokens: k, num_tree_tokens: 0 });
        self.step_seq += 1;
        let step_seq = self.step_seq;
        let deadline = now + SHADOW_TIMEOUT;
        self.link.cached_len = base;
        self.link.in_flight =
            Some(InFlight { step_seq, start, requested, deadline, wait: SHADOW_TIMEOUT, resends: 0 });
        Some(Step {
            sequence_id: self.id,
            epoch: self.link.epoch,
            step_seq,
            spec: (!std::mem::replace(&mut self.link.spec_sent, true)).then(|| Arc::clone(&self.spec)),
            base_len: base,
            prefix_hash: committed.hash_at(base).expect("base_len is at most the committed length"),
            append_ids: committed.ids()[base as usize..start as usize].to_vec(),
            work: match is_behind {
                true => Work::Feed,
                false => Work::Propose { num_draft_tokens: k, num_tree_tokens: 0 },
            },
        })
    }

    /// Position of the requested proposal, or of the one waiting to be compared.
    pub fn start(&self) -> Option<u32> {
        let asked =
            self.link.in_flight.as_ref().filter(|step| step.requested.is_some()).map(|step| step.start);
        asked.or(self.proposal.as_ref().map(|proposal| proposal.start))
    }

    /// Handles a reply of the worker; stale replies are ignored.
    pub fn on_reply(&mut self, reply: Reply) -> Result<(), ShadowFault> {
        if !self.link.answers(&reply) {
            return Ok(());
        }
        let Some(step) = self.link.in_flight.take() else { return Ok(()) };
        match (reply.body, step.requested) {
            (ReplyBody::NeedContext { cached_len, has_spec }, _) => {
                self.link.misses += 1;
                let is_first = self.link.misses == 1;
                self.last_requested_at = None;
                self.link.cached_len = if is_first { cached_len.min(step.start) } else { 0 };
                self.link.spec_sent = is_first && has_spec;
                if self.link.misses >= MAX_MISSES { Err(ShadowFault::ProtocolViolation) } else { Ok(()) }
            }
            (ReplyBody::Fed { .. }, None) => {
                (self.link.misses, self.link.cached_len) = (0, step.start);
                Ok(())
            }
            (ReplyBody::Proposal(proposal), Some(ProposalRequest { num_draft_tokens, .. }))
                if proposal.start == step.start
                    && !proposal.draft.is_tree()
                    && proposal.draft.token_ids.len() <= num_draft_tokens as usize =>
            {
                (self.link.misses, self.link.cached_len) = (0, step.start);
                let (start, token_ids) = (proposal.start, proposal.draft.token_ids);
                self.proposal = Some(UncheckedProposal { start, asked: num_draft_tokens, token_ids });
                Ok(())
            }
            (ReplyBody::Refused(_), _) => Err(ShadowFault::Refused),
            _ => Err(ShadowFault::ProtocolViolation),
        }
    }

    /// Compares the proposal with the ids committed since; `None` while they do not decide it.
    pub fn score(&mut self, ids: &[TokenId]) -> Option<ShadowScore> {
        let UncheckedProposal { start, asked, token_ids } = self.proposal.as_ref()?;
        let (start, asked, proposed) = (*start, *asked, token_ids.len());
        let since = ids.get(start as usize..)?;
        let accepted = token_ids.iter().zip(since).take_while(|(a, b)| a == b).count();
        if accepted < proposed && accepted == since.len() {
            return None;
        }
        // The worker caches all of its guesses but the last.
        self.link.cached_len = start + accepted.min(proposed.saturating_sub(1)) as u32;
        self.proposal = None;
        let judged = proposed.min(accepted + 1) as u32;
        Some(ShadowScore { start, asked, judged, accepted: accepted as u32 })
    }

    /// Whether a reply is overdue.
    pub fn is_overdue(&self, now: Duration) -> bool {
        self.link.in_flight.as_ref().is_some_and(|step| step.deadline <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: SequenceConfig =
        SequenceConfig { vocab_size: 1_000, target_deadline: Duration::from_secs(1) };

    fn sequence(prompt_len: u32) -> Sequence {
        let prompt: Vec<TokenId> = (0..prompt_len).collect();
        let spec = SequenceSpec { prompt_len, max_len: prompt_len + 100, ..SequenceSpec::default() };
        Sequence::new(SequenceId(7), Arc::new(spec), &prompt, LIMITS)
    }

    fn proposes(step: &Step, token_ids: &[TokenId]) -> Reply {
        let proposal = Proposal { start: step.start(), draft: Draft::chain(token_ids.to_vec()) };
        Reply::to(step, ReplyBody::Proposal(proposal))
    }

    fn fed(step: &Step) -> Reply {
        Reply::to(step, ReplyBody::Fed { cached_len: step.start(), prompt_logprobs: None })
    }

    #[test]
    fn a_proposal_is_compared_with_what_is_committed_in_its_place() {
        // Committed ids after a prompt of 10 ids, with the proposal 50, 51, 52, 53 at position 10, and the
        // expected result.
        for (committed, expected) in [
            (&[50][..], None),
            (&[50, 51, 52][..], None),
            (&[9][..], Some((1, 0))),
            (&[50, 51, 9][..], Some((3, 2))),
            (&[50, 51, 52, 53][..], Some((4, 4))),
            (&[50, 51, 52, 53, 54][..], Some((4, 4))),
        ] {
            let mut sequence = sequence(10);
            let mut shadow = Shadow::new(&sequence);
            let step = shadow.next_step(Duration::ZERO, &sequence).unwrap();
            assert_eq!((step.base_len, step.append_ids.len(), shadow.start()), (0, 10, Some(10)));
            assert!(shadow.next_step(Duration::ZERO, &sequence).is_none(), "one at a time");
            shadow.on_reply(proposes(&step, &[50, 51, 52, 53])).unwrap();
            sequence.committed.extend(committed);
            let scored = shadow.score(sequence.ids());
            assert_eq!(scored.map(|scored| (scored.judged, scored.accepted)), expected, "{committed:?}");
            let Some((_, accepted)) = expected else { continue };
            let next = shadow.next_step(Duration::ZERO, &sequence).unwrap();
            assert_eq!(next.base_len, (10 + accepted.min(3)).min(sequence.committed.len() - 1), "valid KV");
            assert_eq!(Some(next.prefix_hash), sequence.committed.hash_at(next.base_len));
            assert!(next.spec.is_none(), "the worker has it");
        }
    }

    #[test]
    fn an_empty_proposal_judges_no_position_and_is_no_hit() {
        let sequence = sequence(3);
        let mut shadow = Shadow::new(&sequence);
        let step = shadow.next_step(Duration::ZERO, &sequence).unwrap();
        shadow.on_reply(proposes(&step, &[])).unwrap();
        let scored = shadow.score(sequence.ids()).unwrap();
        assert_eq!(scored, ShadowScore { start: 3, asked: SHADOW_TOKENS, judged: 0, accepted: 0 });
        assert!(shadow.next_step(Duration::ZERO, &sequence).is_none(), "nothing was committed since");
    }

    #[test]
    fn a_long_prompt_is_fed_in_parts_before_anything_is_asked() {
        let sequence = sequence(MAX_CONTEXT_IDS as u32 + 100);
        let mut shadow = Shadow::new(&sequence);
        let mut sizes = Vec::new();
        loop {
            let step = shadow.next_step(Duration::ZERO, &sequence).unwrap();
            sizes.push(step.append_ids.len());
            if step.work != Work::Feed {
                break;
            }
            assert_eq!(shadow.start(), None);
            shadow.on_reply(fed(&step)).unwrap();
        }
        assert_eq!(sizes, [MAX_CONTEXT_IDS, 100, 1]);
    }

    #[test]
    fn what_a_worker_forgot_is_sent_again_and_a_faulty_worker_is_left() {
        let sequence = sequence(20);
        let mut shadow = Shadow::new(&sequence);
        let forgets = |shadow: &mut Shadow, cached_len| {
            let step = shadow.next_step(Duration::ZERO, &sequence).unwrap();
            let body = ReplyBody::NeedContext { cached_len, has_spec: false };
            (step.base_len, shadow.on_reply(Reply::to(&step, body)))
        };
        assert_eq!(forgets(&mut shadow, 4), (0, Ok(())));
        assert_eq!(forgets(&mut shadow, 9), (4, Ok(())));
        assert_eq!(forgets(&mut shadow, 0), (0, Err(ShadowFault::ProtocolViolation)));

        for (answer, fault) in [
            (proposes as fn(&Step, &[TokenId]) -> Reply, ShadowFault::ProtocolViolation),
            (|step, _| Reply::to(step, ReplyBody::Refused(Refusal::failure("no"))), ShadowFault::Refused),
            (|step, _| fed(step), ShadowFault::ProtocolViolation),
        ] {
            let mut shadow = Shadow::new(&sequence);
            let step = shadow.next_step(Duration::ZERO, &sequence).unwrap();
            assert_eq!(
                shadow.on_reply(answer(&step, &[1, 2, 3, 4, 5])),
                Err(fault),
                "more than was asked for"
            );
            assert_eq!(shadow.on_reply(answer(&step, &[1])), Ok(()), "stale");
        }
    }

    #[test]
    fn a_silent_worker_is_late_and_the_last_position_is_not_drafted_for() {
        let mut sequence = sequence(20);
        let mut shadow = Shadow::new(&sequence);
        let step = shadow.next_step(Duration::ZERO, &sequence).unwrap();
        assert_eq!(Shadow::sequence_of(step.sequence_id), Some(SequenceId(7)));
        assert_eq!(Shadow::sequence_of(SequenceId(7)), None);
        assert!(!shadow.is_overdue(SHADOW_TIMEOUT / 2) && shadow.is_overdue(SHADOW_TIMEOUT));
        shadow.on_reply(proposes(&step, &[])).unwrap();
        shadow.score(sequence.ids()).unwrap();
        sequence.committed.extend(&[5; 97]);
        let step = shadow.next_step(SHADOW_TIMEOUT, &sequence).unwrap();
        shadow.on_reply(fed(&step)).unwrap();
        let step = shadow.next_step(SHADOW_TIMEOUT, &sequence).unwrap();
        assert_eq!(step.work, Work::Propose { num_draft_tokens: 2, num_tree_tokens: 0 }, "117 of 120 ids");
        shadow.on_reply(proposes(&step, &[])).unwrap();
        shadow.score(sequence.ids()).unwrap();
        sequence.committed.extend(&[5; 2]);
        assert!(shadow.next_step(SHADOW_TIMEOUT, &sequence).is_none());
    }
}
