//! A draft worker on trial: it is fed a sequence's committed ids and asked for proposals, as the sequence's own draft worker is. Its
//! proposals are compared with what the target commits and are sent to nobody, so nothing about the sequence depends on it.
//!
//! With shared noise (contract B4) that comparison is exact: a target would have accepted the proposal as far as it leads the committed ids.

use super::*;

/// Tokens that a shadow draft is asked for. Deeper positions are seldom reached and cost a forward pass each.
pub const SHADOW_TOKENS: u32 = 4;

/// A shadow draft that has not answered for this long is given up for the sequence.
const PATIENCE: Duration = Duration::from_secs(5);

/// Marks the ids of shadow conversations, so that a worker may hold both a sequence and its shadow.
const SHADOW_BIT: u64 = 1 << 63;

/// The conversation with one shadow draft about one sequence.
#[derive(Debug)]
pub struct Shadow {
    id: SequenceId,
    spec: Arc<SequenceSpec>,
    step_seq: u64,
    link: Link,
    proposal: Option<Proposed>,
    /// Where the latest proposal was asked for: once a place, however soon an empty one comes back.
    asked_at: Option<u32>,
}

#[derive(Debug)]
struct Proposed {
    start: u32,
    asked: u32,
    token_ids: Vec<TokenId>,
}

/// How one proposal of a shadow draft compares with what was committed in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scored {
    /// Where its first guess stood.
    pub start: u32,
    /// Tokens that it was asked for.
    pub asked: u32,
    /// Positions that the comparison says something about: those accepted and the first that was not.
    pub judged: u32,
    /// Leading guesses that were committed.
    pub accepted: u32,
}

/// Why a shadow conversation ends early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShadowFault {
    /// The worker did not answer in time.
    Late,
    /// The worker refused the sequence.
    Refused,
    /// The worker's reply breaks the contract, or it forgets the sequence again and again.
    BrokeContract,
}

impl Shadow {
    /// A conversation about `sequence` with a worker that holds nothing of it.
    pub fn new(sequence: &Sequence) -> Self {
        let mut link = Link::default();
        link.assign();
        let spec = SequenceSpec {
            // It gives way to every sequence that is served there, and leaves no spans in the request's trace.
            priority: u8::MAX,
            traceparent: String::new(),
            logprobs: None,
            prompt_logprobs: None,
            ..(**sequence.spec()).clone()
        };
        let id = SequenceId(sequence.id.0 | SHADOW_BIT);
        Self { id, spec: Arc::new(spec), step_seq: 0, link, proposal: None, asked_at: None }
    }

    /// The sequence whose shadow conversation this id names, if it names one.
    pub fn sequence_of(id: SequenceId) -> Option<SequenceId> {
        (id.0 & SHADOW_BIT != 0).then_some(SequenceId(id.0 & !SHADOW_BIT))
    }

    /// Whether proposals for a sequence can be compared at all: in the other acceptance modes a target accepts by other rules.
    pub fn can_score(spec: &SequenceSpec) -> bool {
        spec.acceptance == AcceptanceMode::Coupled
    }

    /// What it is called at the worker, and the assignment, for closing it there.
    pub fn name(&self) -> (SequenceId, u32) {
        (self.id, self.link.epoch)
    }

    /// The step to send now, if one is due: ids that the worker lacks, or a request for a proposal.
    pub fn next_step(&mut self, now: Duration, sequence: &Sequence) -> Option<Step> {
        if self.link.in_flight.is_some() || self.proposal.is_some() {
            return None;
        }
        let committed = &sequence.committed;
        let (have, len) = (self.link.cached_len, committed.len());
        let k = SHADOW_TOKENS.min(self.spec.max_len.saturating_sub(len + 1));
        if k == 0 || self.asked_at == Some(len) {
            return None;
        }
        let is_behind = len - have > FEED_LAG;
        let (base, start) =
            if is_behind { (have, len.min(have + MAX_CONTEXT_IDS as u32)) } else { (have.min(len - 1), len) };
        self.asked_at = (!is_behind).then_some(len);
        let asked = (!is_behind).then_some(Asked { num_draft_tokens: k, num_tree_tokens: 0 });
        self.step_seq += 1;
        let step_seq = self.step_seq;
        let deadline = now + PATIENCE;
        self.link.cached_len = base;
        self.link.in_flight = Some(InFlight { step_seq, start, asked, deadline, wait: PATIENCE, resends: 0 });
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

    /// Where the proposal stands that is asked for, or that waits to be compared.
    pub fn start(&self) -> Option<u32> {
        let asked = self.link.in_flight.as_ref().filter(|step| step.asked.is_some()).map(|step| step.start);
        asked.or(self.proposal.as_ref().map(|proposal| proposal.start))
    }

    /// The worker answered. Stale replies are passed over.
    pub fn on_reply(&mut self, reply: Reply) -> Result<(), ShadowFault> {
        if !self.link.answers(&reply) {
            return Ok(());
        }
        let Some(step) = self.link.in_flight.take() else { return Ok(()) };
        match (reply.body, step.asked) {
            (ReplyBody::NeedContext { cached_len, has_spec }, _) => {
                self.link.misses += 1;
                let is_first = self.link.misses == 1;
                self.asked_at = None;
                self.link.cached_len = if is_first { cached_len.min(step.start) } else { 0 };
                self.link.spec_sent = is_first && has_spec;
                if self.link.misses >= MAX_MISSES { Err(ShadowFault::BrokeContract) } else { Ok(()) }
            }
            (ReplyBody::Fed { .. }, None) => {
                (self.link.misses, self.link.cached_len) = (0, step.start);
                Ok(())
            }
            (ReplyBody::Proposal(proposal), Some(Asked { num_draft_tokens, .. }))
                if proposal.start == step.start
                    && !proposal.draft.is_tree()
                    && proposal.draft.token_ids.len() <= num_draft_tokens as usize =>
            {
                (self.link.misses, self.link.cached_len) = (0, step.start);
                let (start, token_ids) = (proposal.start, proposal.draft.token_ids);
                self.proposal = Some(Proposed { start, asked: num_draft_tokens, token_ids });
                Ok(())
            }
            (ReplyBody::Refused { .. }, _) => Err(ShadowFault::Refused),
            _ => Err(ShadowFault::BrokeContract),
        }
    }

    /// Compares the proposal with what was committed since; `None` while that does not decide it.
    pub fn score(&mut self, ids: &[TokenId]) -> Option<Scored> {
        let Proposed { start, asked, token_ids } = self.proposal.as_ref()?;
        let (start, asked, proposed) = (*start, *asked, token_ids.len());
        let since = ids.get(start as usize..)?;
        let accepted = token_ids.iter().zip(since).take_while(|(a, b)| a == b).count();
        if accepted < proposed && accepted == since.len() {
            return None;
        }
        // Of its own guesses the worker holds all but the last.
        self.link.cached_len = start + accepted.min(proposed.saturating_sub(1)) as u32;
        self.proposal = None;
        let judged = proposed.min(accepted + 1) as u32;
        Some(Scored { start, asked, judged, accepted: accepted as u32 })
    }

    /// Whether the worker has owed an answer for too long.
    pub fn is_late(&self, now: Duration) -> bool {
        self.link.in_flight.as_ref().is_some_and(|step| step.deadline <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { vocab_size: 1_000, target_deadline: Duration::from_secs(1) };

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
        // Committed behind a prompt of 10 ids, the proposal 50, 51, 52, 53 at 10, and what follows.
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
        assert_eq!(scored, Scored { start: 3, asked: SHADOW_TOKENS, judged: 0, accepted: 0 });
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
        assert_eq!(forgets(&mut shadow, 0), (0, Err(ShadowFault::BrokeContract)));

        for (answer, fault) in [
            (proposes as fn(&Step, &[TokenId]) -> Reply, ShadowFault::BrokeContract),
            (|step, _| Reply::to(step, ReplyBody::Refused { reason: "no".to_owned() }), ShadowFault::Refused),
            (|step, _| fed(step), ShadowFault::BrokeContract),
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
        assert!(!shadow.is_late(PATIENCE / 2) && shadow.is_late(PATIENCE));
        shadow.on_reply(proposes(&step, &[])).unwrap();
        shadow.score(sequence.ids()).unwrap();
        sequence.committed.extend(&[5; 97]);
        let step = shadow.next_step(PATIENCE, &sequence).unwrap();
        shadow.on_reply(fed(&step)).unwrap();
        let step = shadow.next_step(PATIENCE, &sequence).unwrap();
        assert_eq!(step.work, Work::Propose { num_draft_tokens: 2, num_tree_tokens: 0 }, "117 of 120 ids");
        shadow.on_reply(proposes(&step, &[])).unwrap();
        shadow.score(sequence.ids()).unwrap();
        sequence.committed.extend(&[5; 2]);
        assert!(shadow.next_step(PATIENCE, &sequence).is_none());
    }
}
