//! What router and worker say to each other about one sequence (contract part A), as plain values.

use std::sync::Arc;

use crate::{AcceptanceMode, SequenceId, SequenceSpec, TokenId};

/// The most context ids that one step may carry.
pub const MAX_CONTEXT_IDS: usize = 8_192;

/// The most tokens that one proposal may hold.
pub const MAX_DRAFT_TOKENS: usize = 32;

/// Distribution of one drafted position in rejection mode: (id, weight) as rounded on the wire.
pub type DraftDistribution = Vec<(TokenId, f32)>;

/// Drafted tokens that a target is asked to judge.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Draft {
    /// The guesses, in order; those of a tree in order of depth.
    pub token_ids: Vec<TokenId>,
    /// The row that each guess of a tree stands behind ([`crate::tree`]); empty for a chain.
    pub parents: Vec<u32>,
    /// One distribution a guess in rejection mode; else empty.
    pub q: Vec<DraftDistribution>,
}

/// What a step asks for after its context is in place.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// Hold the context, nothing more.
    Feed,
    /// Draft worker: guess up to this many tokens.
    Propose {
        /// k: how many positions to reach.
        num_draft_tokens: u32,
        /// How many tokens a tree may have, siblings included; one that is not above k asks for a chain.
        num_tree_tokens: u32,
    },
    /// Target worker: judge this draft (perhaps empty) and draw one token more.
    Verify {
        /// The guesses.
        draft: Draft,
    },
}

/// Cut what is held to `base_len`, append `append_ids`, then do `work`.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Which sequence.
    pub sequence_id: SequenceId,
    /// Counts the assignments of the sequence to a worker of this role.
    pub epoch: u32,
    /// Raised by every step sent for the sequence to either worker.
    pub step_seq: u64,
    /// Sent with the first step of an epoch, and when asked for.
    pub spec: Option<Arc<SequenceSpec>>,
    /// Ids to keep.
    pub base_len: u32,
    /// [`crate::prefix::Prefix::hash_at`] of `base_len`.
    pub prefix_hash: u64,
    /// Ids to append.
    pub append_ids: Vec<TokenId>,
    /// What then.
    pub work: Work,
}

impl Step {
    /// Where the first returned id stands: `base_len + len(append_ids)`.
    pub fn start(&self) -> u32 {
        self.base_len + self.append_ids.len() as u32
    }

    /// Whether ids of this step are to be scored: prompt ids only, and not the first, which nothing precedes.
    pub fn is_scoring(&self, spec: &SequenceSpec) -> bool {
        spec.prompt_logprobs.is_some() && self.base_len + 1 < spec.prompt_len
    }

    /// Whether a draft worker can say which of the step's context it would have drawn: committed tokens, each
    /// behind another one of the step, of a sequence whose draws do not depend on which ids were drawn before: no penalties,
    /// no grammar.
    pub fn is_comparable(&self, spec: &SequenceSpec) -> bool {
        (2..=COMPARED_MAX).contains(&self.append_ids.len())
            && self.base_len + 1 >= spec.prompt_len
            && spec.acceptance == AcceptanceMode::Coupled
            && !spec.sampling.has_penalties()
            && spec.grammar.is_none()
            && !self.is_scoring(spec)
    }
}

/// Log probabilities of the raw logits at one position.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenLogprobs {
    /// ln p of the token that stands there.
    pub logprob: f32,
    /// The likeliest tokens, likeliest first.
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

/// What a draft worker returns.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Proposal {
    /// Where the first guess stands.
    pub start: u32,
    /// Guesses for at most k positions, perhaps none.
    pub draft: Draft,
}

/// What one verification commits: the accepted ids and the token that the target drew.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenSpan {
    /// Where the first id stands.
    pub start: u32,
    /// How many leading ids were drafted.
    pub num_accepted: u32,
    /// Accepted ids, then the target's draw (absent when the sequence finished on an accepted id).
    pub token_ids: Vec<TokenId>,
    /// One entry an id, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// For the first prompt positions scored by this step, when asked for.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Set on the last span.
    pub finish: Option<FinishReason>,
}

/// Log probabilities of prompt ids `start ..  start + entries.len()`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PromptLogprobs {
    /// Position of the first scored id; position 0 has no logits before it and is never scored.
    pub start: u32,
    /// One entry an id.
    pub entries: Vec<TokenLogprobs>,
}

/// A worker's answer to one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// The step's sequence.
    pub sequence_id: SequenceId,
    /// The step's epoch.
    pub epoch: u32,
    /// The step's sequence number.
    pub step_seq: u64,
    /// The answer.
    pub body: ReplyBody,
    /// From a draft worker: of the last ids of the step's context, oldest first, whether it would have drawn them itself. At most
    /// [`COMPARED_MAX`], and fewer than the context has; a worker need not say anything.
    pub agreed: Vec<bool>,
    /// How many ids of the step's context had their KV because equal ids had been computed for another sequence.
    pub num_cached: u32,
    /// From a draft worker: how many guesses of the proposal it had made before the step came, at a forward pass each.
    pub num_ahead: u32,
}

impl Reply {
    /// The answer to `step`, without a word on agreement, or on what was cached.
    pub fn to(step: &Step, body: ReplyBody) -> Self {
        let Step { sequence_id, epoch, step_seq, .. } = *step;
        Self { sequence_id, epoch, step_seq, body, agreed: Vec::new(), num_cached: 0, num_ahead: 0 }
    }
}

/// Ids of a context of which a reply may say whether the worker would have drawn them.
pub const COMPARED_MAX: usize = 64;

/// See [`Reply`].
#[derive(Debug, Clone, PartialEq)]
pub enum ReplyBody {
    /// The context is held.
    Fed {
        /// Ids held now.
        cached_len: u32,
        /// For prompt positions scored by this step, when asked for.
        prompt_logprobs: Option<PromptLogprobs>,
    },
    /// The step does not fit what is held; nothing was touched.
    NeedContext {
        /// From where to resend.
        cached_len: u32,
        /// Whether the spec is held.
        has_spec: bool,
    },
    /// The step is malformed or cannot be honoured.
    Refused {
        /// What was wrong and what to do.
        reason: String,
    },
    /// From a draft worker.
    Proposal(Proposal),
    /// From a target worker.
    Span(TokenSpan),
}
