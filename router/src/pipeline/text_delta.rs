//! Parts of a response, independent of the protocol: the fields that every chunk repeats, and the deltas of
//! its choices.

use std::time::Duration;

use serde::Serialize;
use speculation::{FinishReason, TokenId};

use crate::detokenize::OutputToken;
use crate::output::OutputFormat;

/// Fields that every chunk of a response repeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResponseInfo {
    /// Identifier of the request.
    pub id: String,
    /// Creation time, in Unix seconds.
    pub created: u64,
    /// The model's id.
    pub model: String,
    /// Numerics id: names the class of targets whose results are equal bit for bit.
    pub system_fingerprint: String,
    /// As requested, or drawn by the router; sending it again gives the same text.
    pub seed: u64,
    /// Number of choices of all prompts together.
    pub num_choices: u32,
    /// Whether log probabilities were requested.
    pub logprobs: bool,
    /// Format of the model's output: where reasoning and tool calls begin and end.
    pub output: OutputFormat,
}

/// Duration of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timings {
    /// From the start of the response to its first token.
    pub prompt: Duration,
    /// From the first token to the last.
    pub predicted: Duration,
}

/// What the client asked to end a choice, and did; written as in vLLM's `stop_reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason<'a> {
    /// One of the stop strings.
    Text(&'a str),
    /// One of the stop tokens.
    Token(TokenId),
}

/// Which part of a choice a delta belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The echoed prompt; precedes the output.
    Prompt,
    /// The model's output.
    Output,
}

/// Next piece of one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct TextDelta {
    /// Index of the choice: choice `c` of prompt `p` is `p * n + c`.
    pub choice: u32,
    /// Prompt or output.
    pub part: Part,
    /// May be empty while text is withheld.
    pub text: String,
    /// Tokens committed since the last delta; for a prompt only if log probabilities were requested.
    pub tokens: Vec<OutputToken>,
    /// Number of these tokens that were drafted.
    pub num_drafted: u32,
    /// Set on the choice's last delta.
    pub finish: Option<FinishReason>,
}
