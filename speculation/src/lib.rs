//! The rules of speculative decoding that decide which tokens a sequence gets, pure: time is passed in, randomness is
//! keyed, nothing blocks and nothing is spawned. Router, workers and simulator call the same functions, so that a rule
//! is decided once. What only decides how soon tokens come is in the crate `scheduling`.
//!
//! Reading order: what a sequence is ([`spec`], [`prefix`]), what is said about it ([`step`]), how a token is drawn
//! ([`noise`], [`logits`], [`acceptance`]), and the two ends of the conversation ([`sequence`] at the router,
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
pub use step::{Draft, FinishReason, Proposal, Reply, ReplyBody, Step, TokenLogprobs, TokenSpan, Work};

/// An entry of the vocabulary, as the model numbers it.
pub type TokenId = u32;

/// Names one sequence (one choice of one request) at the router that owns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// Which pool a worker belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Guesses.
    Draft,
    /// Checks, and draws every committed token.
    Target,
}

impl Role {
    /// The word used in logs, metrics and configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Draft => "draft",
            Self::Target => "target",
        }
    }
}
