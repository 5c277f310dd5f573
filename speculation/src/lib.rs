//! The rules of speculative decoding that determine which tokens a sequence gets. Pure: time is passed in,
//! randomness is keyed, nothing blocks or spawns. Router, workers and simulator call the same functions, so
//! each rule exists once. Rules that only affect speed are in the crate `scheduling`.
//!
//! Reading order: the sequence ([`spec`], [`prefix`]), the messages about it ([`step`]), how a token is drawn
//! ([`noise`], [`logits`], [`acceptance`]), and the two ends of the protocol ([`sequence`] at the router,
//! [`cached_sequence`] at a worker).

#![forbid(unsafe_code)]

pub mod acceptance;
pub mod cached_sequence;
pub mod fingerprint;
pub mod logits;
pub mod lookup;
pub mod math;
pub mod ngram;
pub mod noise;
pub mod prefix;
pub mod sequence;
pub mod spec;
pub mod step;
pub mod tree;

pub use spec::{AcceptanceMode, SamplingParams, SequenceSpec};
pub use step::{
    Draft, FinishReason, Proposal, ProposalAhead, Refusal, RefusalCause, Reply, ReplyBody, Step,
    TokenLogprobs, TokenSpan, Work,
};

/// The id of a vocabulary entry.
pub type TokenId = u32;

/// Identifies one sequence (one choice of one request) at the router that owns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// The pool that a worker belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Proposes drafts.
    Draft,
    /// Verifies drafts and draws every committed token.
    Target,
}

impl Role {
    /// The name used in logs, metrics and configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Draft => "draft",
            Self::Target => "target",
        }
    }
}
