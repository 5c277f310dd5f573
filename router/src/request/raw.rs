//! [`RawRequest`]: one request as the client sent it, independent of the protocol. Must not depend on JSON
//! or protobuf.

use serde_json::Map;

use super::structure::RawGrammar;
use super::tools::RawTools;
use text::{ConversationMessage, Framing};

/// `max_tokens` of a request whose output may fill the window, as vLLM's and llama.cpp's clients send it.
pub const NO_LIMIT: i64 = -1;

/// A request as the client sent it; absent fields take their default.
#[derive(Debug, Clone, Default)]
pub struct RawRequest {
    /// Required.
    pub model: Option<String>,
    /// At least one.
    pub prompts: Vec<RawPrompt>,
    /// Sampling parameters.
    pub sampling: RawSampling,
    /// Maximum number of output tokens; [`NO_LIMIT`]: the rest of the window.
    pub max_tokens: Option<i64>,
    /// Minimum number of output tokens.
    pub min_tokens: Option<i64>,
    /// Choices per prompt.
    pub n: Option<i64>,
    /// Absent or -1: drawn by the router.
    pub seed: Option<i64>,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Stop tokens besides the model's own.
    pub stop_token_ids: Vec<i64>,
    /// Keep what ended a choice in its text.
    pub include_stop: bool,
    /// Spell out special tokens in the text of the output.
    pub keep_special_tokens: bool,
    /// Ignore the model's own stop tokens.
    pub ignore_eos: bool,
    /// Number of top log probabilities to report per position; absent: none.
    pub logprobs: Option<i64>,
    /// Number of top log probabilities to report per position of the prompt; absent: none, or as many as
    /// `logprobs` if the prompt is repeated.
    pub prompt_logprobs: Option<i64>,
    /// Repeat the prompt before the output.
    pub echo: bool,
    /// Tools that may or must be called.
    pub tools: RawTools,
    /// Grammar that the output must match.
    pub grammar: Option<RawGrammar>,
    /// Task type of the request.
    pub task_type: Option<String>,
    /// Settings for speculation.
    pub speculation: RawSpeculation,
    /// Text that the output is expected to repeat in part.
    pub prediction: Option<String>,
    /// Lower is more urgent.
    pub priority: Option<i64>,
    /// Keep only this many tokens at the end of a prompt; -1: as many as leave one position for the output.
    pub truncate_prompt_tokens: Option<i64>,
    /// Leave out the oldest messages of a conversation that does not fit the window.
    pub drop_oldest_messages: bool,
    /// Requests with different salts share no prefix blocks.
    pub cache_salt: Option<String>,
    /// Without `max_tokens`, a completion may fill the window, as a chat may.
    pub fill_context_window: bool,
    /// Keep the request out of the request log.
    pub exclude_from_log: bool,
    /// The protocol's names of fields, for messages.
    pub names: FieldNames,
}

/// One prompt as sent.
#[derive(Debug, Clone)]
pub enum RawPrompt {
    /// Plain text.
    Text {
        /// The text.
        text: String,
        /// Whether the tokenizer adds its special tokens.
        framing: Framing,
    },
    /// Token ids.
    TokenIds(Vec<i64>),
    /// A conversation.
    Chat {
        /// Messages, oldest first.
        messages: Vec<ConversationMessage>,
        /// Further variables for the chat template.
        template_kwargs: Map<String, serde_json::Value>,
    },
}

/// Sampling parameters as sent.
#[derive(Debug, Clone, Default)]
#[expect(missing_docs, reason = "the fields are those of speculation::SamplingParams")]
pub struct RawSampling {
    pub temperature: Option<f64>,
    pub top_k: Option<i64>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub logit_bias: Vec<(i64, f64)>,
    pub allowed_token_ids: Option<Vec<i64>>,
    pub bad_words: Vec<String>,
    /// Bad words as token ids.
    pub bad_word_ids: Vec<Vec<i64>>,
}

/// Settings for speculation as sent.
#[derive(Debug, Clone, Default)]
#[expect(missing_docs, reason = "the fields are those of SpeculationRequest")]
pub struct RawSpeculation {
    pub enabled: Option<bool>,
    pub num_draft_tokens: Option<i64>,
    pub num_tree_tokens: Option<i64>,
    pub acceptance: Option<String>,
}

/// Names of fields that differ between protocols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FieldNames {
    /// `max_tokens` or `max_completion_tokens`.
    pub max_tokens: &'static str,
    /// `logprobs` or `top_logprobs`.
    pub logprobs: &'static str,
    /// `prompt` or `messages`.
    pub prompt: &'static str,
    /// `stop` or `stop_sequences`.
    pub stop: &'static str,
    /// `echo`; `None` if the request cannot have it.
    pub echo: Option<&'static str>,
}

impl Default for FieldNames {
    fn default() -> Self {
        Self { max_tokens: "max_tokens", logprobs: "logprobs", prompt: "prompt", stop: "stop", echo: None }
    }
}
