//! What the router believes of one worker's side of a sequence.

use std::time::Duration;

use crate::step::Reply;

/// The proposal that a draft worker is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asked {
    /// k.
    pub(super) num_draft_tokens: u32,
    /// Ids of a tree at most; a chain where it is not above k.
    pub(super) num_tree_tokens: u32,
}

/// A step that was sent and not yet answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InFlight {
    pub(super) step_seq: u64,
    /// Ids held once it ran.
    pub(super) start: u32,
    /// What a draft worker was asked for, if it was asked for a proposal.
    pub(super) asked: Option<Asked>,
    /// When it is overdue.
    pub(super) deadline: Duration,
    /// The wait that led to `deadline`; a resend gets twice as much.
    pub(super) wait: Duration,
    pub(super) resends: u32,
}

/// One assignment of the sequence to a worker.
#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) assigned: bool,
    pub(super) epoch: u32,
    /// KV there is valid up to here.
    pub(super) cached_len: u32,
    pub(super) spec_sent: bool,
    /// `need_context` in a row.
    pub(super) misses: u32,
    /// Only the reply to this step is read.
    pub(super) in_flight: Option<InFlight>,
}

impl Link {
    /// A new worker, which holds nothing.
    pub(super) fn assign(&mut self) {
        *self = Self { assigned: true, epoch: self.epoch + 1, ..Self::default() };
    }

    /// No worker; the epoch is kept, so that the next one is higher.
    pub(super) fn release(&mut self) {
        *self = Self { epoch: self.epoch, ..Self::default() };
    }

    /// Whether a reply is to the latest step of this assignment.
    pub(super) fn answers(&self, reply: &Reply) -> bool {
        self.assigned
            && reply.epoch == self.epoch
            && self.in_flight.as_ref().is_some_and(|step| step.step_seq == reply.step_seq)
    }
}
