//! Events that a driver passes to a sequence, and actions that it must carry out.

use std::fmt;
use std::time::Duration;

use crate::step::{FinishReason, PromptLogprobs, ProposalAhead, Reply, Step, TokenLogprobs};
use crate::tree::DraftOutcome;
use crate::{Refusal, RefusalCause, Role, TokenId};

/// An input of a sequence.
#[derive(Debug, Clone)]
pub enum Event {
    /// A worker was assigned; earlier replies of that role are void.
    Assigned(Role),
    /// The worker was lost.
    Lost(Role),
    /// The worker still exists, but another one must be chosen.
    Reassign(Role),
    /// Begins a round, after [`Action::Ready`].
    BeginRound {
        /// Number of tokens to draft; 0 is an ordinary decode step.
        num_draft_tokens: u32,
        /// Maximum tokens of the draft as a tree; a chain if not above `num_draft_tokens`.
        num_tree_tokens: u32,
        /// How long verification may wait for the proposal, from now. Zero: request a proposal without
        /// waiting; it is used as a late proposal.
        draft_wait: Duration,
        /// In a round without a draft, whether the draft worker is fed the ids that it lacks
        /// ([`Sequence::due_feed`](crate::sequence::Sequence::due_feed)).
        feed_draft: bool,
    },
    /// Begins a round with a lookup draft; no draft worker is asked.
    BeginLookupRound {
        /// The drafted ids.
        token_ids: Vec<TokenId>,
        /// Whether the draft worker is fed the ids that it lacks.
        feed_draft: bool,
    },
    /// A worker replied.
    Reply(Role, Reply),
    /// The draft worker drafted ahead of an outcome of the running verification.
    ProposalAhead(ProposalAhead),
    /// A worker preempted the sequence to free KV.
    Preempted(Role, u32),
    /// Time passed; see [`Sequence::next_deadline`](crate::sequence::Sequence::next_deadline).
    Tick,
    /// The client disconnected, or needs no more tokens.
    Cancel,
}

/// An output of a sequence, for the driver to carry out.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send this step to the assigned worker of that role.
    Send(Role, Step),
    /// Close the sequence at the worker of that role.
    Close(Role, u32),
    /// Choose a worker of that role, then pass [`Event::Assigned`].
    Assign(Role),
    /// A round may begin: pass [`Event::BeginRound`] when the lane schedules it.
    Ready,
    /// Tokens for the client.
    Commit(Commit),
    /// Scored prompt ids, in order and without repeats.
    PromptLogprobs(PromptLogprobs),
    /// The sequence has ended.
    Finished(FinishReason),
    /// The target cannot be relied on for this sequence; [`Action::Assign`] follows. If no other target is
    /// left, pass [`Event::Cancel`] and report the error to the client.
    TargetFault(TargetFault),
    /// The round uses a proposal that was drafted ahead and waited here. The draft worker is asked as well,
    /// but not waited for.
    UsedProposalAhead,
    /// An anomaly to count in the metrics.
    Anomaly(Anomaly),
}

/// Ids committed by one verification.
#[derive(Debug, Clone, PartialEq)]
pub struct Commit {
    /// Position of the first id.
    pub start: u32,
    /// The ids.
    pub token_ids: Vec<TokenId>,
    /// Number of ids that were drafted and sent to verification, all ids of a tree included.
    pub num_draft_tokens: u32,
    /// How many leading ids were drafted.
    pub num_accepted: u32,
    /// The outcome for the draft, as feedback on its source.
    pub draft_outcome: DraftOutcome,
    /// One entry per id, if requested.
    pub logprobs: Vec<TokenLogprobs>,
}

/// Why a target was dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetFault {
    /// It refused the sequence: window or memory too small, invalid logits, or a request that it cannot meet.
    Refused(Refusal),
    /// Its reply violates the contract.
    ProtocolViolation,
    /// It did not answer a step that was sent several times.
    Unanswered,
}

impl TargetFault {
    /// Whether the target failed. Otherwise the cause is the sequence: its grammar, its size, or
    /// what it requests.
    pub fn is_failure(&self) -> bool {
        match self {
            Self::Refused(refusal) => refusal.cause == RefusalCause::Failure,
            Self::ProtocolViolation | Self::Unanswered => true,
        }
    }
}

impl fmt::Display for TargetFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(Refusal { reason, .. }) => {
                write!(f, "the target worker refused the sequence: {reason}")
            }
            Self::ProtocolViolation => f.write_str("the target worker's reply violates the protocol"),
            Self::Unanswered => f.write_str("the target worker does not answer"),
        }
    }
}

/// Something that should not happen often; counted in the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Anomaly {
    /// A reply to a step or epoch that is not the latest.
    StaleReply,
    /// A proposal that does not continue the committed ids.
    UnusableProposal,
    /// A proposal or span that violates the contract.
    MalformedReply,
    /// The draft deadline passed.
    LateDraft,
    /// A target step timed out and was sent again.
    TargetResend,
}

/// Counters for usage and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Verifications that committed something.
    pub rounds: u64,
    /// Drafted ids that were verified.
    pub draft_tokens: u64,
    /// Accepted ones among these.
    pub accepted_tokens: u64,
}
