//! The router's view of one worker's side of a sequence.

use std::time::Duration;

use crate::TokenId;
use crate::step::{Draft, Reply};

/// A requested proposal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProposalRequest {
    /// k, the number of tokens.
    pub(super) num_draft_tokens: u32,
    /// Maximum ids of a tree; a chain if not above k.
    pub(super) num_tree_tokens: u32,
}

impl ProposalRequest {
    /// What is left of an earlier proposal after `ids`, as far as it answers this request.
    pub(super) fn remainder(self, proposed: &Draft, ids: &[TokenId]) -> Option<Draft> {
        let Self { num_draft_tokens: k, num_tree_tokens } = self;
        let mut rest = proposed.after_path(ids).filter(|rest| !rest.token_ids.is_empty() && k > 0)?;
        if num_tree_tokens <= k {
            rest = Draft::chain(rest.first_path());
        }
        rest.truncate(k, k.max(num_tree_tokens) as usize);
        Some(rest)
    }
}

/// A step that was sent and not yet answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InFlight {
    pub(super) step_seq: u64,
    /// Number of ids cached after it ran.
    pub(super) start: u32,
    /// The requested proposal, if this is a request to a draft worker.
    pub(super) requested: Option<ProposalRequest>,
    /// When the step is overdue.
    pub(super) deadline: Duration,
    /// The wait that led to `deadline`; it doubles for a resend.
    pub(super) wait: Duration,
    pub(super) resends: u32,
}

/// One assignment of the sequence to a worker.
#[derive(Debug, Default)]
pub(super) struct WorkerLink {
    pub(super) assigned: bool,
    pub(super) epoch: u32,
    /// Length up to which the worker's KV is valid.
    pub(super) cached_len: u32,
    pub(super) spec_sent: bool,
    /// Consecutive `need_context` replies.
    pub(super) misses: u32,
    /// The latest step; only its reply is accepted.
    pub(super) in_flight: Option<InFlight>,
}

impl WorkerLink {
    /// Assigns a new worker, which has nothing cached.
    pub(super) fn assign(&mut self) {
        *self = Self { assigned: true, epoch: self.epoch + 1, ..Self::default() };
    }

    /// Removes the worker; the epoch is kept, so that the next one is higher.
    pub(super) fn release(&mut self) {
        *self = Self { epoch: self.epoch, ..Self::default() };
    }

    /// Whether a reply answers the latest step of this assignment.
    pub(super) fn answers(&self, reply: &Reply) -> bool {
        self.assigned
            && reply.epoch == self.epoch
            && self.in_flight.as_ref().is_some_and(|step| step.step_seq == reply.step_seq)
    }
}
