//! Response bodies: whole answers and the chunks of streams.

use std::time::Duration;

use serde::Serialize;
use speculation::TokenId;

use super::logprobs::{ChatLogprobs, CompletionLogprobs, PromptScores};
use super::tools::{CallField, FunctionBody, ToolCallBody};
use crate::api::parsed_output::OutputPart;
use crate::generation::SpeculationUsage;
use crate::pipeline::text_delta::{ResponseInfo, StopReason, Timings};
use crate::request::Usage;

/// Fields around the choices of every answer and chunk.
#[derive(Debug, Serialize)]
pub struct Envelope<'a, C: Serialize> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    /// Outrider's: the seed, in a form that can be sent back.
    seed: i64,
    choices: C,
    /// vLLM's, if requested; only in chat completions.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
    /// vLLM's, if requested; only in chat completions.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptScores<'a>>,
    /// Absent, or null if a later chunk reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
    /// vLLM's: next to the usage, for a request with one choice that had drafts.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<MetricsBody>,
    /// llama.cpp's, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
    #[serde(skip)]
    has_single_choice: bool,
}

impl<'a, C: Serialize> Envelope<'a, C> {
    /// Creates an answer or chunk without usage; `choices` is a list.
    pub fn new(info: &'a ResponseInfo, object: &'static str, choices: C) -> Self {
        Self {
            id: &info.id,
            object,
            created: info.created,
            model: &info.model,
            system_fingerprint: &info.system_fingerprint,
            seed: info.seed as i64,
            choices,
            prompt_token_ids: None,
            prompt_logprobs: None,
            usage: None,
            metrics: None,
            timings: None,
            has_single_choice: info.num_choices == 1,
        }
    }

    /// Sets the ids of the prompt.
    pub fn with_prompt_token_ids(self, prompt_token_ids: &'a [TokenId]) -> Self {
        Self { prompt_token_ids: Some(prompt_token_ids), ..self }
    }

    /// Sets the log probabilities of the prompt.
    pub fn with_prompt_logprobs(self, prompt_logprobs: Option<PromptScores<'a>>) -> Self {
        Self { prompt_logprobs, ..self }
    }

    /// Sets the usage; `None` writes null.
    pub fn with_usage(self, usage: Option<&Usage>) -> Self {
        let metrics = usage.filter(|_| self.has_single_choice).and_then(MetricsBody::from_usage);
        Self { usage: Some(usage.map(UsageBody::from)), metrics, ..self }
    }

    /// Sets the timings.
    pub fn with_timings(self, usage: &Usage, timings: Timings) -> Self {
        Self { timings: Some(TimingsBody::new(usage, timings)), ..self }
    }
}

/// A choice of a chat completion.
#[derive(Debug, Serialize)]
pub struct ChatChoice<'a> {
    /// Index from 0.
    pub index: u32,
    /// The model's message.
    pub message: AssistantMessage,
    /// Null unless requested.
    pub logprobs: Option<ChatLogprobs>,
    /// Finish reason.
    pub finish_reason: &'static str,
    /// vLLM's: the client's stop string or stop token that ended the choice, else null.
    pub stop_reason: Option<StopReason<'a>>,
    /// vLLM's, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

/// The model's message.
#[derive(Debug, Serialize)]
pub struct AssistantMessage {
    role: &'static str,
    /// Null if the message has only tool calls.
    content: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCallBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    function_call: Option<FunctionBody>,
    refusal: Option<()>,
}

impl AssistantMessage {
    /// Creates the message with these parts; `id_of` returns the ids of its calls.
    pub(super) fn new(parts: Vec<OutputPart>, call_field: CallField, id_of: impl Fn(u32) -> String) -> Self {
        let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
        for part in parts {
            match part {
                OutputPart::Text(text) => append(&mut content, text),
                OutputPart::Reasoning(text) => append(&mut reasoning, text),
                OutputPart::Call { idx, call } => calls.push(ToolCallBody::whole(id_of(idx), call)),
            }
        }
        let content = (calls.is_empty() || !content.is_empty()).then_some(content);
        let (tool_calls, function_call) = match call_field {
            CallField::ToolCalls => (calls, None),
            CallField::FunctionCall => {
                (Vec::new(), calls.into_iter().next().map(ToolCallBody::into_function))
            }
        };
        Self {
            role: ASSISTANT,
            content,
            reasoning_content: reasoning,
            tool_calls,
            function_call,
            refusal: None,
        }
    }
}

/// Appends a text, which may be long: the first one is not copied.
fn append(to: &mut String, text: String) {
    if to.is_empty() {
        *to = text;
    } else {
        to.push_str(&text);
    }
}

/// Role of the model.
pub const ASSISTANT: &str = "assistant";

/// A choice in a chunk of a chat completion.
#[derive(Debug, Serialize)]
pub struct ChatChunkChoice<'a> {
    /// Index from 0.
    pub index: u32,
    /// New content.
    pub delta: ChatDelta,
    /// Null unless requested.
    pub logprobs: Option<ChatLogprobs>,
    /// Null except in the last chunk.
    pub finish_reason: Option<&'static str>,
    /// vLLM's, as in whole answers; only in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<Option<StopReason<'a>>>,
    /// vLLM's, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
    /// Outrider's, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<ChunkSpeculation>,
}

/// New content of a chat completion's choice.
#[derive(Debug, Default, Serialize)]
pub struct ChatDelta {
    /// Only in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Absent if there is no new content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Absent if there is no new reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Empty if no call begins or continues.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallBody>,
    /// The same for requests with `functions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionBody>,
}

/// A choice of a completion, whole or in a chunk.
#[derive(Debug, Serialize)]
pub struct CompletionChoice<'a> {
    /// Index from 0; choice `c` of prompt `p` is `p * n + c`.
    pub index: u32,
    /// The text.
    pub text: String,
    /// Null unless requested.
    pub logprobs: Option<CompletionLogprobs>,
    /// Null except in the last chunk.
    pub finish_reason: Option<&'static str>,
    /// vLLM's: the client's stop string or stop token that ended the choice, else null.
    pub stop_reason: Option<StopReason<'a>>,
    /// vLLM's, if requested; without the echoed prompt's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
    /// vLLM's, if requested; in streams only in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [TokenId]>,
    /// vLLM's, if requested; only in whole answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptScores<'a>>,
    /// Outrider's, if requested; only in chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<ChunkSpeculation>,
}

/// Origin of the tokens in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ChunkSpeculation {
    /// Tokens committed since the last chunk.
    pub num_tokens: u32,
    /// Number of these tokens that were drafted.
    pub num_drafted: u32,
}

/// Usage of a request, so far or in total.
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

/// Tokens of the client's prediction; reasoning tokens are not counted separately.
#[derive(Debug, Serialize)]
struct CompletionDetails {
    reasoning_tokens: u64,
    accepted_prediction_tokens: u64,
    rejected_prediction_tokens: u64,
}

/// Speculation statistics, and why it was disabled.
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

/// Statistics over the verify steps that had a draft.
#[derive(Debug, Serialize)]
struct SpeculativeDecodingBody {
    mean_acceptance_length: f64,
    draft_acceptance_rate: f64,
    /// Entry `j` counts the steps that accepted `j` drafted tokens.
    acceptance_histogram: Vec<u32>,
    num_spec_steps: u64,
    num_accepted_draft_tokens: u64,
    num_draft_tokens: u64,
    /// Length of the longest draft.
    num_spec_tokens: u32,
}

impl MetricsBody {
    /// Returns `None` if nothing was drafted; `usage.speculation` has the reason.
    pub fn from_usage(usage: &Usage) -> Option<Self> {
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

/// llama.cpp's `timings`, in milliseconds and tokens.
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
    fn new(usage: &Usage, timings: Timings) -> Self {
        let (prompt_n, predicted_n) = (usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens);
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        // JSON has no infinity: a rate over zero time is 0.
        let ratio = |of: f64, by: f64| if by > 0.0 { of / by } else { 0.0 };
        let (prompt_ms, predicted_ms) = (milliseconds(timings.prompt), milliseconds(timings.predicted));
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
