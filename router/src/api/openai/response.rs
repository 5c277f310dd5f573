//! What answers look like: whole ones and the chunks of streams.

use std::time::Duration;

use serde::Serialize;

use super::logprobs::{ChatLogprobs, CompletionLogprobs};
use super::tools::{MessageParts, ToolCallBody};
use crate::generation::SpeculationUsage;
use crate::pipeline::text_delta::{ResponseInfo, Times};
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
    /// vLLM's; beside the usage of a request of one choice that was drafted for.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<MetricsBody>,
    /// llama.cpp's, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
    #[serde(skip)]
    is_one_choice: bool,
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
            metrics: None,
            timings: None,
            is_one_choice: info.num_choices == 1,
        }
    }

    /// With usage; `None`: with a null in its place.
    pub fn with_usage(self, usage: Option<&Usage>) -> Self {
        let metrics = usage.filter(|_| self.is_one_choice).and_then(MetricsBody::of);
        Self { usage: Some(usage.map(UsageBody::from)), metrics, ..self }
    }

    /// With how long it took.
    pub fn with_timings(self, usage: &Usage, times: Times) -> Self {
        Self { timings: Some(TimingsBody::of(usage, times)), ..self }
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

/// What a request cost, or has cost so far.
#[derive(Debug, Serialize)]
pub(super) struct UsageBody {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
    speculation: SpeculationBody,
}

#[derive(Debug, Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

/// Tokens of the client's prediction; reasoning is not told apart.
#[derive(Debug, Serialize)]
struct CompletionDetails {
    reasoning_tokens: u64,
    accepted_prediction_tokens: u64,
    rejected_prediction_tokens: u64,
}

/// What speculation did, and why it did not draft.
#[derive(Debug, Serialize)]
pub struct SpeculationBody {
    rounds: u64,
    draft_tokens: u64,
    accepted_tokens: u64,
    acceptance_length: Option<f64>,
    disabled_reason: Option<&'static str>,
}

impl From<&Usage> for UsageBody {
    fn from(usage: &Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens: 0,
                accepted_prediction_tokens: usage.speculation.accepted_prediction_tokens.into(),
                rejected_prediction_tokens: usage.speculation.rejected_prediction_tokens.into(),
            },
            speculation: (&usage.speculation).into(),
        }
    }
}

impl From<&SpeculationUsage> for SpeculationBody {
    fn from(speculation: &SpeculationUsage) -> Self {
        Self {
            rounds: speculation.rounds,
            draft_tokens: speculation.draft_tokens,
            accepted_tokens: speculation.accepted_tokens,
            acceptance_length: speculation.acceptance_length(),
            disabled_reason: speculation.disabled_reason,
        }
    }
}

/// vLLM's `metrics`.
#[derive(Debug, Serialize)]
pub struct MetricsBody {
    speculative_decoding: SpeculativeDecodingBody,
}

/// Of the verify steps that had a draft.
#[derive(Debug, Serialize)]
struct SpeculativeDecodingBody {
    mean_acceptance_length: f64,
    draft_acceptance_rate: f64,
    /// At `j` the steps that accepted `j` drafted tokens.
    acceptance_histogram: Vec<u32>,
    num_spec_steps: u64,
    num_accepted_draft_tokens: u64,
    num_draft_tokens: u64,
    /// The longest draft.
    num_spec_tokens: u32,
}

impl MetricsBody {
    /// `None` where nothing was drafted: `usage.speculation` says why.
    pub fn of(usage: &Usage) -> Option<Self> {
        let SpeculationUsage { draft_tokens, accepted_tokens, .. } = usage.speculation;
        let num_spec_steps = usage.accepted.num_steps();
        (num_spec_steps > 0 && draft_tokens > 0).then(|| Self {
            speculative_decoding: SpeculativeDecodingBody {
                mean_acceptance_length: 1.0 + accepted_tokens as f64 / num_spec_steps as f64,
                draft_acceptance_rate: accepted_tokens as f64 / draft_tokens as f64,
                acceptance_histogram: usage.accepted.histogram().to_vec(),
                num_spec_steps,
                num_accepted_draft_tokens: accepted_tokens,
                num_draft_tokens: draft_tokens,
                num_spec_tokens: usage.accepted.longest_draft(),
            },
        })
    }
}

/// llama.cpp's `timings`, milliseconds and tokens.
#[derive(Debug, Serialize)]
struct TimingsBody {
    cache_n: u64,
    prompt_n: u64,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    predicted_n: u64,
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
    draft_n: u64,
    draft_n_accepted: u64,
}

impl TimingsBody {
    fn of(usage: &Usage, times: Times) -> Self {
        let (prompt_n, predicted_n) = (usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens);
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        // JSON has no infinity: what took no time has no rate.
        let ratio = |of: f64, by: f64| if by > 0.0 { of / by } else { 0.0 };
        let (prompt_ms, predicted_ms) = (milliseconds(times.prompt), milliseconds(times.predicted));
        Self {
            cache_n: usage.cached_tokens,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: ratio(prompt_ms, prompt_n as f64),
            prompt_per_second: ratio(prompt_n as f64 * 1e3, prompt_ms),
            predicted_n,
            predicted_ms,
            predicted_per_token_ms: ratio(predicted_ms, predicted_n as f64),
            predicted_per_second: ratio(predicted_n as f64 * 1e3, predicted_ms),
            draft_n: usage.speculation.draft_tokens,
            draft_n_accepted: usage.speculation.accepted_tokens,
        }
    }
}
