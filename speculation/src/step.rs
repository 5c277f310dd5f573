//! The messages between router and worker about one sequence (contract part A), as plain values.

use std::sync::Arc;

use crate::{AcceptanceMode, SequenceId, SequenceSpec, TokenId};

/// Maximum context ids in one step.
pub const MAX_CONTEXT_IDS: usize = 8_192;

/// Maximum tokens in one proposal.
pub const MAX_DRAFT_TOKENS: usize = 32;

/// Distribution of one drafted position in rejection mode: (id, weight) as rounded on the wire.
pub type DraftDistribution = Vec<(TokenId, f32)>;

/// Drafted tokens to be verified by a target.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Draft {
    /// The guesses in order; those of a tree by depth.
    pub token_ids: Vec<TokenId>,
    /// For each guess of a tree, the row of its parent ([`crate::tree`]); empty for a chain.
    pub parents: Vec<u32>,
    /// One distribution per guess in rejection mode; otherwise empty.
    pub q: Vec<DraftDistribution>,
}

/// The work of a step, after its context is in place.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// Cache the context only.
    Feed,
    /// Draft worker: guess up to this many tokens.
    Propose {
        /// k: the number of positions.
        num_draft_tokens: u32,
        /// Maximum tokens of a tree, siblings included; a chain if not above k.
        num_tree_tokens: u32,
    },
    /// Target worker: verify this draft, which may be empty, and draw one more token.
    Verify {
        /// The draft.
        draft: Draft,
    },
}

/// Cut the cached sequence to `base_len`, append `append_ids`, then do `work`.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The sequence.
    pub sequence_id: SequenceId,
    /// Number of the sequence's assignment to a worker of this role.
    pub epoch: u32,
    /// Increased by every step sent for the sequence to either worker.
    pub step_seq: u64,
    /// Sent with the first step of an epoch, and when requested.
    pub spec: Option<Arc<SequenceSpec>>,
    /// Number of ids to keep.
    pub base_len: u32,
    /// [`crate::prefix::Prefix::hash_at`] of `base_len`.
    pub prefix_hash: u64,
    /// Ids to append.
    pub append_ids: Vec<TokenId>,
    /// The work after that.
    pub work: Work,
}

impl Step {
    /// Position of the first returned id: `base_len + len(append_ids)`.
    pub fn start(&self) -> u32 {
        self.base_len + self.append_ids.len() as u32
    }

    /// Whether prompt ids of this step must be scored. The first prompt id never is, because nothing precedes
    /// it.
    pub fn is_scoring(&self, spec: &SequenceSpec) -> bool {
        spec.prompt_logprobs.is_some() && self.base_len + 1 < spec.prompt_len
    }

    /// Whether a draft worker can tell which ids of the step's context it would have drawn. These are
    /// committed tokens that follow another id of the step, in a sequence whose draws do not depend on
    /// earlier drawn ids: no penalties, no bad words, no grammar.
    pub fn is_comparable(&self, spec: &SequenceSpec) -> bool {
        (2..=MAX_COMPARED_IDS).contains(&self.append_ids.len())
            && self.base_len + 1 >= spec.prompt_len
            && spec.acceptance == AcceptanceMode::Coupled
            && !spec.sampling.depends_on_context()
            && spec.grammar.is_none()
            && !self.is_scoring(spec)
    }
}

/// Log probabilities of the raw logits at one position.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenLogprobs {
    /// ln p of the token at that position.
    pub logprob: f32,
    /// The top tokens, most likely first.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token (or, at the router, a stop string).
    Stop,
    /// `max_len` was reached.
    Length,
}

impl FinishReason {
    /// Its name in OpenAI's API, in logs and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// The reply of a draft worker to a request for guesses.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Proposal {
    /// Position of the first guess.
    pub start: u32,
    /// Guesses for at most k positions; may be empty.
    pub draft: Draft,
}

/// A proposal that a draft worker drafted ahead: the answer to the step that would follow one outcome of the
/// verification of its latest proposal.
#[derive(Debug, Clone, PartialEq)]
pub struct ProposalAhead {
    /// The sequence.
    pub sequence_id: SequenceId,
    /// Epoch of the step that the latest proposal answered.
    pub epoch: u32,
    /// Sequence number of that step.
    pub step_seq: u64,
    /// The outcome: ids from the start of the latest proposal.
    pub committed_ids: Vec<TokenId>,
    /// The guesses after them.
    pub draft: Draft,
}

/// The result of one verification: the accepted ids and the token that the target drew.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenSpan {
    /// Position of the first id.
    pub start: u32,
    /// Number of leading ids that were drafted.
    pub num_accepted: u32,
    /// Accepted ids, then the target's draw (absent if the sequence finished on an accepted id).
    pub token_ids: Vec<TokenId>,
    /// One entry per id, if requested.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log probabilities of the prompt positions scored by this step, if requested.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Set on the last span.
    pub finish: Option<FinishReason>,
}

/// Log probabilities of prompt ids `start ..  start + entries.len()`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PromptLogprobs {
    /// Position of the first scored id; position 0 has no logits before it and is never scored.
    pub start: u32,
    /// One entry per id.
    pub entries: Vec<TokenLogprobs>,
}

/// A worker's reply to one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// The step's sequence.
    pub sequence_id: SequenceId,
    /// The step's epoch.
    pub epoch: u32,
    /// The step's sequence number.
    pub step_seq: u64,
    /// The result.
    pub body: ReplyBody,
    /// From a draft worker: for the last ids of the step's context, oldest first, whether it would have drawn
    /// them itself. At most [`MAX_COMPARED_IDS`] entries, and fewer than the context has; may be empty.
    pub agreed: Vec<bool>,
    /// Number of context ids whose KV came from the prefix cache.
    pub num_cached: u32,
    /// From a draft worker: number of guesses in the proposal that were made before the step arrived, each
    /// saving a forward pass.
    pub num_ahead: u32,
}

impl Reply {
    /// A reply to `step` without agreement and counts.
    pub fn to(step: &Step, body: ReplyBody) -> Self {
        let Step { sequence_id, epoch, step_seq, .. } = *step;
        Self { sequence_id, epoch, step_seq, body, agreed: Vec::new(), num_cached: 0, num_ahead: 0 }
    }
}

/// Maximum number of context ids for which a reply reports agreement.
pub const MAX_COMPARED_IDS: usize = 64;

/// Why a worker refused a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// What the cause is.
    pub cause: RefusalCause,
    /// What is wrong and what to do.
    pub reason: String,
}

/// What the cause of a refusal is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalCause {
    /// A failure of the worker, or a malformed step.
    Failure,
    /// The sequence's grammar, which this worker cannot apply there. Another worker may.
    Grammar,
    /// The sequence is too large for this worker, or the worker has too many sequences.
    Capacity,
    /// The sequence requests something that the worker's engine cannot do.
    Unsupported,
}

impl Refusal {
    /// Creates a refusal because of a failure or a malformed step.
    pub fn failure(reason: impl Into<String>) -> Self {
        Self { cause: RefusalCause::Failure, reason: reason.into() }
    }
}

/// The result of a step; see [`Reply`].
#[derive(Debug, Clone, PartialEq)]
pub enum ReplyBody {
    /// The context is cached.
    Fed {
        /// Number of ids cached now.
        cached_len: u32,
        /// Log probabilities of the prompt positions scored by this step, if requested.
        prompt_logprobs: Option<PromptLogprobs>,
    },
    /// The step does not match the cached state, which is unchanged.
    NeedContext {
        /// Position to resend from.
        cached_len: u32,
        /// Whether the spec is cached.
        has_spec: bool,
    },
    /// The step is malformed or cannot be run.
    Refused(Refusal),
    /// From a draft worker.
    Proposal(Proposal),
    /// From a target worker.
    Span(TokenSpan),
}
