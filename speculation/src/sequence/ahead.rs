//! Proposals that were drafted ahead. While the target verifies a proposal, the draft worker sends the
//! proposals that would follow its likeliest outcomes. They wait here, nearer to the target: after one of
//! these outcomes the next verification begins without the draft worker's round trip.

use super::*;
use crate::acceptance::check_draft;

/// Maximum number of proposals that wait, more than any draft worker sends.
const MAX_PROPOSALS_AHEAD: usize = 64;

/// The latest proposal of the draft worker.
#[derive(Debug)]
pub(super) struct LastProposal {
    /// The step that it answered.
    pub(super) step_seq: u64,
    /// Position of its first id.
    pub(super) start: u32,
    /// Its first children.
    pub(super) path: Vec<TokenId>,
    /// What was drafted ahead of its outcomes.
    pub(super) ahead: Vec<ProposalAhead>,
}

impl Sequence {
    /// Keeps a proposal for an outcome of the latest proposal. Others come too late.
    pub(super) fn on_proposal_ahead(&mut self, ahead: ProposalAhead) {
        let is_usable = self.is_usable(&ahead);
        let is_assigned = self.draft.assigned && self.draft.epoch == ahead.epoch;
        let has_room = |last: &&mut LastProposal| {
            is_assigned && last.step_seq == ahead.step_seq && last.ahead.len() < MAX_PROPOSALS_AHEAD
        };
        match self.last_proposal.as_mut().filter(has_room) {
            Some(last) if is_usable => last.ahead.push(ahead),
            Some(_) => self.report_anomaly(Anomaly::MalformedReply),
            None => {}
        }
    }

    /// Whether a target may get these guesses, and whether there are no more ids than outcomes have.
    fn is_usable(&self, ahead: &ProposalAhead) -> bool {
        let ProposalAhead { committed_ids, draft, .. } = ahead;
        let mut ids = committed_ids.iter().chain(&draft.token_ids);
        committed_ids.len() <= MAX_DRAFT_TOKENS + 1
            && draft.token_ids.len() <= MAX_TREE_TOKENS
            && ids.all(|id| *id < self.config.vocab_size)
            && supports_trees(&self.spec)
            && check_draft(&self.spec, self.committed.len(), draft).is_ok()
    }

    /// Returns the proposal that was drafted ahead of the ids that were committed since the latest proposal.
    pub(super) fn proposal_ahead(&self, request: ProposalRequest) -> Option<Draft> {
        let last = self.last_proposal.as_ref()?;
        let since = &self.committed.ids()[last.start as usize..];
        last.ahead.iter().find_map(|ahead| {
            let rest = since.strip_prefix(ahead.committed_ids.as_slice())?;
            request.remainder(&ahead.draft, rest)
        })
    }

    /// Verifies a proposal that was drafted ahead. The draft worker was asked for the same one: its answer
    /// tells how much of the text it has cached.
    pub(super) fn verify_proposal_ahead(&mut self, now: Duration, draft: Draft) {
        self.on_unawaited_request(now);
        self.replaced_step = self.draft.in_flight.as_ref().map(|step| step.step_seq);
        self.actions.push(Action::UsedProposalAhead);
        self.verify(now, draft);
    }

    /// Forgets all proposals of a draft worker that left.
    pub(super) fn forget_proposals(&mut self) {
        self.late_proposal = None;
        self.last_proposal = None;
    }
}
