//! What answers look like: whole ones and the chunks of streams.

use serde::Serialize;

use super::logprobs::{ChatLogprobs, CompletionLogprobs};
use super::tools::{MessageParts, ToolCallBody};
use crate::pipeline::text_stream::ResponseInfo;
use crate::request::Usage;

/// What surrounds the choices of every answer and chunk.
#[derive(Debug, Serialize)]
pub struct Envelope<'a, C: Serialize> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    /// Ours: the seed in the form in which it can be sent again.
    seed: i64,
    choices: C,
    /// Absent, or null where a later chunk will say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

impl<'a, C: Serialize> Envelope<'a, C> {
    /// An answer or chunk without usage; `choices` is a list.
    pub fn new(info: &'a ResponseInfo, object: &'static str, choices: C) -> Self {
        Self {
            id: &info.id,
            object,
            created: info.created,
            model: &info.model,
            system_fingerprint: &info.system_fingerprint,
            seed: info.seed as i64,
            choices,
            usage: None,
        }
    }

    /// With usage; `None`: with a null in its place.
    pub fn with_usage(self, usage: Option<&Usage>) -> Self {
        Self { usage: Some(usage.map(UsageBody::from)), ..self }
    }
}

/// A conversation's choice.
#[derive(Debug, Serialize)]
pub struct ChatChoice {
    /// From 0.
    pub index: u32,
    /// What the model says.
    pub message: AssistantMessage,
    /// Null unless asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: &'static str,
}

/// What the model says.
#[derive(Debug, Serialize)]
pub struct AssistantMessage {
    role: &'static str,
    /// Null where the model says nothing but calls.
    content: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCallBody>,
    refusal: Option<()>,
}

impl AssistantMessage {
    pub(super) fn new(parts: MessageParts) -> Self {
        let MessageParts { content, reasoning, calls } = parts;
        Self {
            role: ASSISTANT,
            content: (calls.is_empty() || !content.is_empty()).then_some(content),
            reasoning_content: reasoning,
            tool_calls: calls,
            refusal: None,
        }
    }
}

/// The role that models answer in.
pub const ASSISTANT: &str = "assistant";

/// A piece of a conversation's choice.
#[derive(Debug, Serialize)]
pub struct ChatChunkChoice {
    /// From 0.
    pub index: u32,
    /// What is new.
    pub delta: ChatDelta,
    /// Null unless asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Null but on the last piece.
    pub finish_reason: Option<&'static str>,
    /// Ours, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<ChunkSpeculation>,
}

/// What is new in a conversation's choice.
#[derive(Debug, Default, Serialize)]
pub struct ChatDelta {
    /// On the first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Absent where nothing is new.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// The same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Empty where no call begins or goes on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallBody>,
}

/// A completion's choice, or a piece of one.
#[derive(Debug, Serialize)]
pub struct CompletionChoice {
    /// From 0; choice `c` of prompt `p` is `p * n + c`.
    pub index: u32,
    /// The text.
    pub text: String,
    /// Null unless asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// Null but on the last piece.
    pub finish_reason: Option<&'static str>,
    /// Ours, where asked for, on pieces only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<ChunkSpeculation>,
}

/// How a piece came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ChunkSpeculation {
    /// Tokens committed since the last piece.
    pub num_tokens: u32,
    /// How many of them were drafted.
    pub num_drafted: u32,
}

#[derive(Debug, Serialize)]
struct UsageBody {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    speculation: SpeculationBody,
}

#[derive(Debug, Serialize)]
struct SpeculationBody {
    rounds: u64,
    draft_tokens: u64,
    accepted_tokens: u64,
    acceptance_length: Option<f64>,
    disabled_reason: Option<&'static str>,
}

impl From<&Usage> for UsageBody {
    fn from(usage: &Usage) -> Self {
        let speculation = &usage.speculation;
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            speculation: SpeculationBody {
                rounds: speculation.rounds,
                draft_tokens: speculation.draft_tokens,
                accepted_tokens: speculation.accepted_tokens,
                acceptance_length: speculation.acceptance_length(),
                disabled_reason: speculation.disabled_reason,
            },
        }
    }
}
