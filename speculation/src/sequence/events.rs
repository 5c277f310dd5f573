//! What a driver tells a sequence, and what it is told to do.

use std::fmt;
use std::time::Duration;

use crate::step::{FinishReason, PromptLogprobs, Reply, Step, TokenLogprobs};
use crate::tree::Judged;
use crate::{Role, TokenId};

/// What happens to a sequence.
#[derive(Debug, Clone)]
pub enum Event {
    /// A worker was chosen; earlier replies of that role are void.
    Assigned(Role),
    /// The worker is gone.
    Lost(Role),
    /// The worker is there, and another one is to be chosen.
    GiveUp(Role),
    /// The lane lets a round begin, after [`Action::Ready`].
    BeginRound {
        /// How many tokens to have drafted; 0 is an ordinary decode step.
        num_draft_tokens: u32,
        /// How many tokens the draft may have as a tree; a chain where that is not above `num_draft_tokens`.
        num_tree_tokens: u32,
        /// How long verification may wait for the proposal, from now. Zero: the draft worker is asked and not waited for; what it
        /// proposes is late, and used as such.
        draft_wait: Duration,
    },
    /// The same, with a draft that was looked up: no draft worker is asked.
    BeginWith(Vec<TokenId>),
    /// A worker answered.
    Reply(Role, Reply),
    /// A worker dropped the sequence to make room.
    Preempted(Role, u32),
    /// Time passed; see [`Sequence::next_deadline`](crate::sequence::Sequence::next_deadline).
    Tick,
    /// The client left, or has all it wants.
    Cancel,
}

/// What the driver is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send this to the assigned worker of that role.
    Send(Role, Step),
    /// Tell the worker of that role to forget the sequence.
    Close(Role, u32),
    /// Choose a worker of that role, then say [`Event::Assigned`].
    Assign(Role),
    /// A round may begin: say [`Event::BeginRound`] when the lane wants it.
    Ready,
    /// Tokens for the client.
    Commit(Commit),
    /// Scored prompt ids, in order and each once.
    PromptLogprobs(PromptLogprobs),
    /// Nothing more will happen.
    Finished(FinishReason),
    /// The target is not to be relied on with this sequence; [`Action::Assign`] follows. Where no other target is left, say
    /// [`Event::Cancel`] and tell the client.
    TargetFault(TargetFault),
    /// Something was ignored, for the counters.
    Ignored(Ignored),
}

/// Ids that the target committed in one verification.
#[derive(Debug, Clone, PartialEq)]
pub struct Commit {
    /// Position of the first.
    pub start: u32,
    /// The ids.
    pub token_ids: Vec<TokenId>,
    /// How many were drafted and sent to verification, all ids of a tree among them.
    pub num_draft_tokens: u32,
    /// How many leading ids were drafted.
    pub num_accepted: u32,
    /// What that tells of the proposer.
    pub judged: Judged,
    /// One an id, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
}

/// Why a target was left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetFault {
    /// It refused the sequence: no such window, no memory, no sound logits.
    Refused(String),
    /// What it replied breaks the contract.
    BrokeContract,
    /// It did not answer a step that was sent several times.
    Unanswered,
}

impl fmt::Display for TargetFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(reason) => write!(f, "the target worker refused the sequence: {reason}"),
            Self::BrokeContract => f.write_str("the target worker's reply breaks the contract"),
            Self::Unanswered => f.write_str("the target worker does not answer"),
        }
    }
}

/// Why something was ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ignored {
    /// A reply to another step or epoch than the latest.
    StaleReply,
    /// A proposal that does not continue the committed ids.
    UnusableProposal,
    /// A proposal or span that breaks the contract.
    MalformedReply,
    /// The draft deadline passed.
    LateDraft,
    /// A target step was not answered in time and was sent again.
    TargetResend,
}

/// Counts for usage and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Verifications that committed something.
    pub rounds: u64,
    /// Drafted ids that were verified.
    pub draft_tokens: u64,
    /// Of these, accepted.
    pub accepted_tokens: u64,
}
