//! [`SentRequest`]: one request as a client wrote it, free of the protocol it came through. Must never know JSON or protobuf.

use serde_json::Map;

use super::structure::SentGrammar;
use super::tools::SentTools;
use text::ConversationMessage;

/// What a client wrote; absent means default.
#[derive(Debug, Clone, Default)]
pub struct SentRequest {
    /// Required.
    pub model: Option<String>,
    /// At least one.
    pub prompts: Vec<SentPrompt>,
    /// How tokens are drawn.
    pub sampling: SentSampling,
    /// Output tokens at most.
    pub max_tokens: Option<i64>,
    /// Output tokens at least.
    pub min_tokens: Option<i64>,
    /// Choices of each prompt.
    pub n: Option<i64>,
    /// Absent: one is drawn.
    pub seed: Option<i64>,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Stop tokens besides the model's own.
    pub stop_token_ids: Vec<i64>,
    /// The model's own stop tokens do not stop.
    pub ignore_eos: bool,
    /// How many likeliest tokens to report at each position; absent: report nothing.
    pub logprobs: Option<i64>,
    /// Repeat the prompt before the output.
    pub echo: bool,
    /// What may or must be called.
    pub tools: SentTools,
    /// What the output must match.
    pub grammar: Option<SentGrammar>,
    /// What kind of work this is.
    pub task_type: Option<String>,
    /// What is asked of speculation.
    pub speculation: SentSpeculation,
    /// What the output is expected to repeat in part.
    pub prediction: Option<String>,
    /// Lower is more urgent.
    pub priority: Option<i64>,
    /// Only this many tokens at the end of a prompt are kept; -1: as many as leave room for one output token.
    pub truncate_prompt_tokens: Option<i64>,
    /// Requests with different salts share no prefix.
    pub cache_salt: Option<String>,
    /// A completion that does not say how long it may be may be as long as the window allows, as a conversation is.
    pub wants_whole_window: bool,
    /// The client does not want the request in a log of requests.
    pub keep_out_of_log: bool,
    /// What the protocol calls those fields that protocols call differently.
    pub names: FieldNames,
}

/// One prompt as sent.
#[derive(Debug, Clone)]
pub enum SentPrompt {
    /// Plain text.
    Text(String),
    /// Ids.
    TokenIds(Vec<i64>),
    /// A conversation.
    Chat {
        /// Oldest first.
        messages: Vec<ConversationMessage>,
        /// Further variables for the template.
        template_kwargs: Map<String, serde_json::Value>,
    },
}

/// Sampling as sent.
#[derive(Debug, Clone, Default)]
#[expect(missing_docs, reason = "the fields are those of speculation::SamplingParams")]
pub struct SentSampling {
    pub temperature: Option<f64>,
    pub top_k: Option<i64>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub logit_bias: Vec<(i64, f64)>,
}

/// Wishes for speculation as sent.
#[derive(Debug, Clone, Default)]
#[expect(missing_docs, reason = "the fields are those of SpeculationRequest")]
pub struct SentSpeculation {
    pub enabled: Option<bool>,
    pub num_draft_tokens: Option<i64>,
    pub num_tree_tokens: Option<i64>,
    pub acceptance: Option<String>,
}

/// What a protocol calls fields that have several names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FieldNames {
    /// `max_tokens` or `max_completion_tokens`.
    pub max_tokens: &'static str,
    /// `logprobs` or `top_logprobs`.
    pub logprobs: &'static str,
    /// `prompt` or `messages`.
    pub prompt: &'static str,
    /// Where a tool's name stands in the tool.
    pub tool_name: &'static str,
}

impl Default for FieldNames {
    fn default() -> Self {
        Self { max_tokens: "max_tokens", logprobs: "logprobs", prompt: "prompt", tool_name: ".function.name" }
    }
}
