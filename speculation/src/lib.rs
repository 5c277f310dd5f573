//! The rules of speculative decoding, pure: time is passed in, randomness is keyed, nothing blocks and nothing is spawned.
//! Router, workers and simulations call the same functions, so that a rule is decided once.
//!
//! Reading order: what a sequence is ([`spec`], [`prefix`]), what is said about it ([`step`]), how a token is drawn
//! ([`noise`], [`logits`], [`acceptance`]), the two ends of the conversation ([`sequence`] at the router,
//! [`holding`] at a worker), how far to draft ([`agreement`], [`survival`], [`cost`], [`draft_length`]),
//! when to leave ([`gather`]) and how long to wait for whom ([`draft_health`]). Who goes where and when, before all
//! that: [`placement`], [`turns`], [`output_length`]; what goes through a target together: [`mod@batch`]. What a pool of
//! workers is like comes from a file ([`profile`]); [`simulation`] plays it on a virtual clock.

#![forbid(unsafe_code)]

pub mod acceptance;
pub mod agreement;
pub mod batch;
pub mod cost;
pub mod draft_health;
pub mod draft_length;
pub mod fingerprint;
pub mod gather;
pub mod holding;
pub mod logits;
pub mod math;
pub mod ngram;
pub mod noise;
pub mod output_length;
pub mod placement;
pub mod prefix;
pub mod profile;
pub mod sequence;
pub mod simulation;
pub mod spec;
pub mod step;
pub mod survival;
pub mod turns;

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
