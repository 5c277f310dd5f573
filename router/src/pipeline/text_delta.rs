//! What a response is made of, whichever protocol it goes out through: what every part repeats, and the pieces of its choices.

use std::time::Duration;

use speculation::FinishReason;

use crate::detokenize::OutputToken;
use crate::output::OutputFormat;

/// What every part of a response repeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResponseInfo {
    /// Names the request.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// The model's id.
    pub model: String,
    /// Names the class of targets whose bits are equal.
    pub system_fingerprint: String,
    /// As asked for, or drawn: send it again for the same text.
    pub seed: u64,
    /// Of all prompts.
    pub num_choices: u32,
    /// Log probabilities were asked for.
    pub logprobs: bool,
    /// The format of the model's answer to a conversation: where it has reasoning and tool calls.
    pub output: OutputFormat,
}

/// How long a response took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Times {
    /// From its start to its first token.
    pub prompt: Duration,
    /// From its first token to its last.
    pub predicted: Duration,
}

/// Where a piece of text stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The echoed prompt; first, where it is wanted at all.
    Prompt,
    /// The model's output.
    Output,
}

/// A piece of one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct TextDelta {
    /// Which choice; choice `c` of prompt `p` is `p * n + c`.
    pub choice: u32,
    /// Prompt or output.
    pub part: Part,
    /// Perhaps empty, where text is held back.
    pub text: String,
    /// The tokens committed since the last piece; of a prompt only where log probabilities are wanted.
    pub tokens: Vec<OutputToken>,
    /// How many of them were drafted.
    pub num_drafted: u32,
    /// Set on the choice's last piece.
    pub finish: Option<FinishReason>,
}
