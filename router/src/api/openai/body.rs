//! [`Body`]: request body of `/v1/chat/completions` and `/v1/completions`. They share most fields, so they
//! share one type; a field that belongs to the other endpoint is refused by name.
//!
//! There are three kinds of fields: those that are honoured; those that have no effect here and are ignored
//! (named `_...`); and unsupported ones that would change the answer (`refused`), which are refused unless
//! their value means "off". Any other field is refused as unknown, so that a misspelt field cannot go
//! unnoticed.

mod refused;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::functions::parse_choice;
use super::message::{Message, conversation};
use super::shapes::{Content, LogitBias, Logprobs, Prompts, Stops};
use super::structured::{GrammarFields, ResponseFormat, StructuredOutputs};
use super::tools::CallField;
use crate::api::functions::{ParsedTools, ToolFormat};
use crate::api::integer;
use crate::api::object::Object;
use crate::api::speculation_settings::SpeculationSettings;
use crate::api::template_variables::{PromptEnd, checked_variables, set_reasoning_effort};
use crate::error::RouterError;
use crate::request::Operation;
use crate::request::raw::{FieldNames, RawRequest, RawSampling, RawSpeculation};
use crate::request::structure::RawGrammar;
use crate::request::tools::ToolChoice;

/// A request body.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(
    missing_docs,
    reason = "the fields are OpenAI's, vLLM's where it extends them, and ours by the same names"
)]
pub struct Body {
    pub model: Option<String>,
    pub messages: Option<Vec<Object<Message>>>,
    pub prompt: Option<Prompts>,
    pub stream: Option<bool>,
    pub stream_options: Option<Object<StreamOptions>>,

    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    #[serde(deserialize_with = "integer::optional")]
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub logit_bias: Option<LogitBias>,
    #[serde(deserialize_with = "integer::optional_list")]
    pub allowed_token_ids: Option<Vec<i64>>,
    pub bad_words: Option<Vec<String>>,
    #[serde(deserialize_with = "integer::optional")]
    pub max_tokens: Option<i64>,
    #[serde(deserialize_with = "integer::optional")]
    pub max_completion_tokens: Option<i64>,
    #[serde(deserialize_with = "integer::optional")]
    pub min_tokens: Option<i64>,
    #[serde(deserialize_with = "integer::optional")]
    pub n: Option<i64>,
    #[serde(deserialize_with = "integer::optional")]
    pub best_of: Option<i64>,
    #[serde(deserialize_with = "integer::optional")]
    pub seed: Option<i64>,
    pub stop: Option<Stops>,
    #[serde(deserialize_with = "integer::optional_list")]
    pub stop_token_ids: Option<Vec<i64>>,
    pub include_stop_str_in_output: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub ignore_eos: Option<bool>,
    pub logprobs: Option<Logprobs>,
    #[serde(deserialize_with = "integer::optional")]
    pub top_logprobs: Option<i64>,
    #[serde(deserialize_with = "integer::optional")]
    pub prompt_logprobs: Option<i64>,
    pub echo: Option<bool>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    pub reasoning_effort: Option<String>,
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,

    pub task_type: Option<String>,
    pub speculation: Option<Object<SpeculationSettings>>,
    #[serde(deserialize_with = "integer::optional")]
    pub priority: Option<i64>,
    pub disable_spec_decode: Option<bool>,
    pub disable_speculative_decoding: Option<bool>,
    pub add_special_tokens: Option<bool>,
    #[serde(deserialize_with = "integer::optional")]
    pub truncate_prompt_tokens: Option<i64>,
    pub cache_salt: Option<String>,
    pub timings_per_token: Option<bool>,
    pub return_token_ids: Option<bool>,
    pub store: Option<bool>,

    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub functions: Option<Vec<Value>>,
    pub function_call: Option<Value>,
    pub response_format: Option<Object<ResponseFormat>>,
    pub structured_outputs: Option<Object<StructuredOutputs>>,
    pub guided_json: Option<Value>,
    pub guided_regex: Option<String>,
    pub guided_choice: Option<Vec<String>>,
    pub guided_grammar: Option<String>,
    pub suffix: Option<Value>,
    pub modalities: Option<Value>,
    pub audio: Option<Value>,
    pub prediction: Option<Object<Prediction>>,
    pub verbosity: Option<Value>,
    pub web_search_options: Option<Value>,
    pub moderation: Option<Value>,
    pub include_reasoning: Option<Value>,
    pub chat_template: Option<Value>,
    pub documents: Option<Value>,
    pub use_beam_search: Option<Value>,
    pub length_penalty: Option<Value>,
    pub logits_processors: Option<Value>,
    pub return_tokens_as_token_ids: Option<Value>,
    pub mm_processor_kwargs: Option<Value>,
    pub kv_transfer_params: Option<Value>,

    #[serde(rename = "user")]
    _user: IgnoredAny,
    #[serde(rename = "metadata")]
    _metadata: IgnoredAny,
    #[serde(rename = "service_tier")]
    _service_tier: IgnoredAny,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: IgnoredAny,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: IgnoredAny,
    #[serde(rename = "prompt_cache_retention")]
    _prompt_cache_retention: IgnoredAny,
    #[serde(rename = "prompt_cache_options")]
    _prompt_cache_options: IgnoredAny,
    #[serde(rename = "spaces_between_special_tokens")]
    _spaces_between_special_tokens: IgnoredAny,
    #[serde(rename = "request_id")]
    _request_id: IgnoredAny,
}

/// `stream_options`.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StreamOptions {
    /// Adds a last chunk with the usage and without choices.
    pub include_usage: Option<bool>,
    /// Adds the number of drafted tokens to each chunk.
    pub include_speculation: Option<bool>,
    /// vLLM's: together with `include_usage`, adds the usage so far to every chunk.
    pub continuous_usage_stats: Option<bool>,
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: IgnoredAny,
}

/// `prediction`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are OpenAI's")]
pub struct Prediction {
    #[serde(rename = "type")]
    pub kind: String,
    pub content: Content,
}

impl Prediction {
    fn into_text(self) -> Result<String, RouterError> {
        let Self { kind, content: Content(text) } = self;
        if kind != "content" {
            return Err(RouterError::must_be("prediction.type", format_args!("content, not `{kind}`")));
        }
        Ok(text)
    }
}

/// Response options of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompletionOptions {
    /// Stream the response as server-sent events.
    pub stream: Option<StreamingOptions>,
    /// Add llama.cpp's `timings` next to the usage.
    pub timings: bool,
    /// Add vLLM's `prompt_token_ids` and `token_ids`.
    pub token_ids: bool,
    /// Add vLLM's `prompt_logprobs`.
    pub prompt_logprobs: bool,
    /// The choices begin with the prompt; only read where the response is not streamed.
    pub echo: bool,
    /// The field that contains calls.
    pub call_field: CallField,
}

/// Options of a streamed response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamingOptions {
    /// See [`StreamOptions::include_usage`].
    pub include_usage: bool,
    /// See [`StreamOptions::continuous_usage_stats`].
    pub continuous_usage: bool,
    /// See [`StreamOptions::include_speculation`].
    pub include_speculation: bool,
}

impl Body {
    /// Converts the body to the common request; `header_task_type` applies if the body has no task type.
    pub fn into_request(
        mut self,
        operation: Operation,
        header_task_type: Option<String>,
    ) -> Result<(RawRequest, CompletionOptions), RouterError> {
        self.refuse_unsupported()?;
        self.refuse_other_endpoint(operation)?;
        let options = self.response_options()?;
        let grammar = self.take_grammar()?;
        let sampling = self.take_sampling();
        let is_speculation_disabled = self.speculation_is_disabled()?;
        let (logprobs, logprobs_name) = self.logprobs(operation)?;
        let (max_tokens, max_tokens_name) = self.max_tokens()?;
        let (mut tools, call_field) = self.take_tools()?;
        let prompt_end = self.prompt_end();
        let (prompts, prompt_name) = match operation {
            Operation::Chat => {
                let mut variables = checked_variables(self.chat_template_kwargs)?;
                set_reasoning_effort(&mut variables, self.reasoning_effort);
                prompt_end.set(&mut variables)?;
                tools.set_template_tools(&mut variables);
                (conversation(self.messages, variables)?, "messages")
            }
            Operation::Completion => {
                (self.prompt.unwrap_or_default().into_raw(self.add_special_tokens), "prompt")
            }
        };
        let speculation = self.speculation.map(|Object(speculation)| speculation).unwrap_or_default();
        let prediction = self.prediction.map(|Object(prediction)| prediction.into_text()).transpose()?;
        let raw_request = RawRequest {
            model: self.model,
            prompts,
            sampling,
            max_tokens,
            min_tokens: self.min_tokens,
            n: self.n,
            seed: self.seed,
            stop: self.stop.unwrap_or_default().0,
            stop_token_ids: self.stop_token_ids.unwrap_or_default(),
            include_stop: self.include_stop_str_in_output.unwrap_or(false),
            keep_special_tokens: self.skip_special_tokens == Some(false),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            logprobs,
            prompt_logprobs: self.prompt_logprobs,
            echo: self.echo.unwrap_or(false),
            tools: tools.raw,
            grammar,
            task_type: self.task_type.or(header_task_type),
            speculation: RawSpeculation {
                enabled: if is_speculation_disabled { Some(false) } else { speculation.enabled },
                ..speculation.into()
            },
            prediction,
            priority: self.priority,
            truncate_prompt_tokens: self.truncate_prompt_tokens,
            cache_salt: self.cache_salt,
            exclude_from_log: self.store == Some(false),
            names: FieldNames {
                max_tokens: max_tokens_name,
                logprobs: logprobs_name,
                prompt: prompt_name,
                echo: (operation == Operation::Completion).then_some("echo"),
                ..FieldNames::default()
            },
            ..RawRequest::default()
        };
        Ok((raw_request, CompletionOptions { call_field, ..options }))
    }

    fn prompt_end(&self) -> PromptEnd {
        PromptEnd {
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
        }
    }

    fn take_sampling(&mut self) -> RawSampling {
        RawSampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            logit_bias: self.logit_bias.take().unwrap_or_default().0,
            allowed_token_ids: self.allowed_token_ids.take(),
            bad_words: self.bad_words.take().unwrap_or_default(),
            bad_word_ids: Vec::new(),
        }
    }

    /// Takes the tools, in their newer or older form.
    fn take_tools(&mut self) -> Result<(ParsedTools, CallField), RouterError> {
        let tools = self.tools.take().unwrap_or_default();
        let choice = ToolFormat::Nested.parse_choice(self.tool_choice.as_ref())?;
        let functions = self.functions.take().unwrap_or_default();
        let function_choice = parse_choice(self.function_call.as_ref())?;
        if functions.is_empty() && !matches!(function_choice, ToolChoice::Named(_)) {
            let parsed = ToolFormat::Nested.parse(tools, choice, self.parallel_tool_calls)?;
            return Ok((parsed, CallField::ToolCalls));
        }
        if !tools.is_empty() || choice != ToolChoice::default() {
            let field = if functions.is_empty() { "function_call" } else { "functions" };
            let message = format!(
                "{field} cannot be combined with tools or tool_choice: send only these, which are newer"
            );
            return Err(RouterError::invalid(field, message));
        }
        let parsed = ToolFormat::Function.parse(functions, function_choice, Some(false))?;
        Ok((parsed, CallField::FunctionCall))
    }

    /// Takes the grammar from whichever field defines it.
    fn take_grammar(&mut self) -> Result<Option<RawGrammar>, RouterError> {
        let fields = GrammarFields {
            response_format: self.response_format.take().map(|Object(format)| format),
            structured_outputs: self.structured_outputs.take().map(|Object(outputs)| outputs),
            guided_json: self.guided_json.take(),
            guided_regex: self.guided_regex.take(),
            guided_choice: self.guided_choice.take(),
            guided_grammar: self.guided_grammar.take(),
        };
        fields.into_grammar()
    }

    /// Whether a field by which other servers disable speculation is set.
    fn speculation_is_disabled(&self) -> Result<bool, RouterError> {
        let enabled = self.speculation.as_ref().and_then(|Object(speculation)| speculation.enabled);
        for (field, value) in [
            ("disable_spec_decode", self.disable_spec_decode),
            ("disable_speculative_decoding", self.disable_speculative_decoding),
        ] {
            if value == Some(true) && enabled == Some(true) {
                let message = format!("{field} is true but speculation.enabled is true: send one of them");
                return Err(RouterError::invalid(field, message));
            }
        }
        Ok(self.disable_spec_decode == Some(true) || self.disable_speculative_decoding == Some(true))
    }

    fn response_options(&self) -> Result<CompletionOptions, RouterError> {
        let timings = self.timings_per_token == Some(true);
        let token_ids = self.return_token_ids == Some(true);
        let (prompt_logprobs, echo) = (self.prompt_logprobs.is_some(), self.echo == Some(true));
        if self.stream != Some(true) {
            return match self.stream_options {
                Some(_) => Err(RouterError::invalid(
                    "stream_options",
                    "stream_options is only allowed when stream is true",
                )),
                None => Ok(CompletionOptions {
                    timings,
                    token_ids,
                    prompt_logprobs,
                    echo,
                    ..CompletionOptions::default()
                }),
            };
        }
        if prompt_logprobs {
            return Err(RouterError::invalid(
                "prompt_logprobs",
                "prompt_logprobs is not supported in streams: leave out stream, or use echo with logprobs at \
                 /v1/completions",
            ));
        }
        let options = self.stream_options.as_ref().map(|Object(options)| *options).unwrap_or_default();
        let include_usage = options.include_usage.unwrap_or(false);
        let stream = StreamingOptions {
            include_usage,
            continuous_usage: include_usage && options.continuous_usage_stats == Some(true),
            include_speculation: options.include_speculation.unwrap_or(false),
        };
        Ok(CompletionOptions { stream: Some(stream), timings, token_ids, ..CompletionOptions::default() })
    }

    /// Returns the number of top log probabilities to report, and the field that sets it.
    fn logprobs(&self, operation: Operation) -> Result<(Option<i64>, &'static str), RouterError> {
        let wrong_type = |expected: &str| RouterError::must_be("logprobs", expected);
        match (operation, self.logprobs) {
            (Operation::Chat, Some(Logprobs::Switch(true))) => {
                Ok((Some(self.top_logprobs.unwrap_or(0)), "top_logprobs"))
            }
            (Operation::Chat, Some(Logprobs::Count(_))) => {
                Err(wrong_type("a boolean for a chat completion: send the number as top_logprobs"))
            }
            (Operation::Chat, _) if self.top_logprobs.is_some_and(|count| count != 0) => Err(
                RouterError::invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true"),
            ),
            (Operation::Chat, _) => Ok((None, "top_logprobs")),
            (Operation::Completion, Some(Logprobs::Count(count))) => Ok((Some(count), "logprobs")),
            (Operation::Completion, Some(Logprobs::Switch(true))) => {
                Err(wrong_type("a whole number for a completion"))
            }
            (Operation::Completion, _) => Ok((None, "logprobs")),
        }
    }

    fn max_tokens(&self) -> Result<(Option<i64>, &'static str), RouterError> {
        match (self.max_tokens, self.max_completion_tokens) {
            (Some(old), Some(new)) if old != new => {
                let message =
                    format!("max_completion_tokens is {new} but max_tokens is {old}: send one of them");
                Err(RouterError::invalid("max_completion_tokens", message))
            }
            (_, Some(new)) => Ok((Some(new), "max_completion_tokens")),
            (old, None) => Ok((old, "max_tokens")),
        }
    }
}
