//! Settings that are fixed for the lifetime of a sequence: seed, sampling, limits, acceptance mode.

use crate::TokenId;

/// Sampling parameters; [`crate::logits`] defines the order of operations.
///
/// The default is a plain draw at temperature 1 with every filter and penalty off.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Temperature; below 1e-5 the draw is greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the shortest prefix with at least this total probability; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this probability relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides (or multiplies, when negative) logits of tokens seen in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once per occurrence of a token in the output.
    pub frequency_penalty: f32,
    /// Subtracted once if a token occurs in the output.
    pub presence_penalty: f32,
    /// Values added to single logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Stop tokens cannot be drawn before this many output tokens.
    pub min_tokens: u32,
    /// Only these tokens can be drawn, in ascending order; empty: all.
    pub allowed_token_ids: Vec<TokenId>,
    /// The last token of each of these sequences cannot be drawn where the output ends with the others. None
    /// is empty.
    pub bad_words: Vec<Vec<TokenId>>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            min_tokens: 0,
            allowed_token_ids: Vec::new(),
            bad_words: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// Whether the draw is an argmax (contract B1).
    pub fn is_greedy(&self) -> bool {
        self.temperature < 1e-5
    }

    /// Whether a filter limits which tokens may be drawn; irrelevant for greedy sequences.
    pub fn has_filters(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0
    }

    /// Whether tokens that occurred are penalized.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// Whether tokens are excluded by [`Self::allowed_token_ids`] or [`Self::bad_words`].
    pub fn has_exclusions(&self) -> bool {
        !self.allowed_token_ids.is_empty() || !self.bad_words.is_empty()
    }

    /// Whether logits depend on the tokens before the position.
    pub fn depends_on_context(&self) -> bool {
        self.has_penalties() || !self.bad_words.is_empty()
    }
}

/// The acceptance rule for drafted tokens; the same for both workers of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AcceptanceMode {
    /// Accepted iff equal to the target's own draw with shared noise: exact and reproducible.
    #[default]
    Coupled,
    /// Classic rejection sampling against the draft's top-64 distribution: exact, but depends on the draft.
    Rejection,
    /// Accepts tokens that are typical under the target: lossy.
    Typical,
}

impl AcceptanceMode {
    /// The name used in requests and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Coupled => "coupled",
            Self::Rejection => "rejection",
            Self::Typical => "typical",
        }
    }
}

/// The number of a task type at workers ([`SequenceSpec::lane`]): the folded FNV-1a hash of its name.
///
/// A hash instead of a counter, so that all routers of a worker use the same number without coordination.
pub fn lane_number(task_type: &str) -> u32 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let hash = task_type.bytes().fold(OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    (hash >> 32) as u32 ^ hash as u32
}

/// Everything a worker needs to know about a sequence besides its ids.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SequenceSpec {
    /// Key of the noise.
    pub seed: u64,
    /// Index among the n choices of a request's prompt; also a key of the noise.
    pub choice: u32,
    /// Number of leading ids that are the prompt.
    pub prompt_len: u32,
    /// The sampling parameters.
    pub sampling: SamplingParams,
    /// Drawing one of these ends the sequence; the id is part of the span.
    pub stop_token_ids: Vec<TokenId>,
    /// The sequence ends when prompt and output together have this many ids.
    pub max_len: u32,
    /// The acceptance mode of drafts.
    pub acceptance: AcceptanceMode,
    /// Number of top tokens to report with each drawn one; `None` reports nothing.
    pub logprobs: Option<u32>,
    /// The same for the prompt's ids.
    pub prompt_logprobs: Option<u32>,
    /// A grammar that masks tokens (contract B8). A worker that does not support it refuses the sequence.
    pub grammar: Option<String>,
    /// [`lane_number`] of the task type, for homogeneous batches.
    pub lane: u32,
    /// Lower values are scheduled first.
    pub priority: u8,
    /// Sequences with different keys never share prefix blocks.
    pub isolation_key: u64,
    /// W3C trace context of the request, for the workers' spans; empty if the request is not traced.
    pub traceparent: String,
}
