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
}

impl Sequence {
    /// Keeps a proposal for an outcome of the latest proposal. Others come too late.
    pub(super) fn on_proposal_ahead(&mut self, ahead: ProposalAhead) {
        let is_current = self.draft.assigned
            && self.draft.epoch == ahead.epoch
            && self.last_proposal.as_ref().is_some_and(|last| last.step_seq == ahead.step_seq);
        if !is_current || self.proposals_ahead.len() == MAX_PROPOSALS_AHEAD {
            return;
        }
        match self.is_usable(&ahead) {
            true => self.proposals_ahead.push(ahead),
            false => self.report_anomaly(Anomaly::MalformedReply),
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
    pub(super) fn take_proposal_ahead(&mut self, request: ProposalRequest) -> Option<Draft> {
        let proposals = std::mem::take(&mut self.proposals_ahead);
        let start = self.last_proposal.as_ref()?.start;
        let since = &self.committed.ids()[start as usize..];
        proposals.iter().find_map(|ahead| {
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

    /// Forgets proposals that no longer apply because the draft worker gets another step.
    pub(super) fn forget_drafted_ahead(&mut self) {
        self.last_proposal = None;
        self.proposals_ahead.clear();
    }

    /// Forgets all proposals of a draft worker that left.
    pub(super) fn forget_proposals(&mut self) {
        self.late_proposal = None;
        self.forget_drafted_ahead();
    }
}
