//! Request body of `/v1/responses`. As for chat completions, unknown fields are refused by name, and so are
//! unsupported fields that would change the answer.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::input::{Input, read_item};
use super::input_items;
use super::reasoning::Reasoning;
use super::references::resolve;
use super::tool_search::loaded_tools;
use super::tools::{ClientTools, as_functions};
use crate::api::conversation::ConversationBuilder;
use crate::api::disabled::{is_disabled, refuse_fields, unsupported};
use crate::api::functions::{ParsedTools, ToolFormat, call_id};
use crate::api::integer;
use crate::api::json::to_json;
use crate::api::object::Object;
use crate::api::openai::shapes::Stops;
use crate::api::openai::structured::TextFormat;
use crate::api::parsed_output::OutputPart;
use crate::api::speculation_settings::SpeculationSettings;
use crate::api::template_variables::set_reasoning_effort;
use crate::error::RouterError;
use crate::pipeline::response_store::{ResponseStore, StoredResponse};
use crate::request::RawRequest;
use crate::request::json_values::ValueCount;
use crate::request::raw::{FieldNames, NO_LIMIT, RawPrompt, RawSampling};
use text::ConversationMessage;

/// A request body.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Body {
    model: Option<String>,
    input: Option<Input>,
    instructions: Option<String>,
    pub(super) previous_response_id: Option<String>,
    store: Option<bool>,
    stream: Option<bool>,
    #[serde(deserialize_with = "integer::optional")]
    max_output_tokens: Option<i64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    metadata: Option<Map<String, Value>>,
    user: Option<String>,

    // vLLM's and Outrider's, as for chat completions.
    #[serde(deserialize_with = "integer::optional")]
    top_k: Option<i64>,
    min_p: Option<f64>,
    #[serde(deserialize_with = "integer::optional")]
    seed: Option<i64>,
    stop: Option<Stops>,
    ignore_eos: Option<bool>,
    #[serde(deserialize_with = "integer::optional")]
    priority: Option<i64>,
    task_type: Option<String>,
    speculation: Option<Object<SpeculationSettings>>,
    cache_salt: Option<String>,

    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<Object<TextConfig>>,
    reasoning: Option<Object<Reasoning>>,
    truncation: Option<String>,
    include: Option<Vec<String>>,
    #[serde(deserialize_with = "integer::optional")]
    top_logprobs: Option<i64>,

    max_tool_calls: Option<Value>,
    background: Option<Value>,
    conversation: Option<Value>,
    prompt: Option<Value>,
    context_management: Option<Value>,
    moderation: Option<Value>,

    #[serde(rename = "stream_options")]
    _stream_options: IgnoredAny,
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
    // The Codex CLI's.
    #[serde(rename = "client_metadata")]
    _client_metadata: IgnoredAny,
}

/// `text`: the format of the output.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct TextConfig {
    format: Option<Value>,
    verbosity: Option<String>,
}

/// Value of `include` that adds log probabilities.
const INCLUDE_LOGPROBS: &str = "message.output_text.logprobs";

/// Values of `include` without effect: reasoning is always sent as plain text, and no response here has the
/// other items.
const INCLUDE_NOTHING: [&str; 7] = [
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
];

/// Properties of the request that the response depends on.
#[derive(Debug)]
pub(super) struct ResponseOptions {
    pub(super) stream: bool,
    pub(super) store: bool,
    pub(super) instructions: Option<String>,
    pub(super) previous_response_id: Option<String>,
    pub(super) max_output_tokens: Option<i64>,
    pub(super) temperature: f64,
    pub(super) top_p: f64,
    pub(super) top_logprobs: i64,
    pub(super) metadata: Map<String, Value>,
    pub(super) user: Option<String>,
    /// As sent, or the default.
    pub(super) tools: Vec<Value>,
    pub(super) client_tools: ClientTools,
    pub(super) tool_choice: Value,
    pub(super) parallel_tool_calls: bool,
    pub(super) text_format: Value,
    pub(super) reasoning_effort: Option<String>,
    pub(super) drop_oldest_items: bool,
    /// Isolation key of the caller.
    isolation_key: u64,
    /// The conversation for later responses, without this response's text; empty if it is not stored.
    conversation: Vec<Arc<ConversationMessage>>,
    /// The items of the input, as JSON; empty if the response is not stored.
    input: Arc<str>,
}

impl ResponseOptions {
    /// Limits the JSON values that are kept until the response repeats them.
    fn check_num_values(&self) -> Result<(), RouterError> {
        let mut count = ValueCount::default();
        count.add("tools", &self.tools)?;
        count.add("tool_choice", [&self.tool_choice])?;
        count.add("text.format", [&self.text_format])?;
        count.add("metadata", self.metadata.values())
    }

    /// Stores a complete response, unless the client opted out; `json` writes it.
    pub(super) fn store(
        &self,
        responses: &ResponseStore,
        id: &str,
        parts: &[OutputPart],
        json: impl FnOnce() -> String,
    ) {
        if !self.store {
            return;
        }
        let mut builder = ConversationBuilder::continuing(self.conversation.clone());
        builder.push_output(parts, |call| function_call_id(id, call));
        let stored = StoredResponse {
            conversation: builder.into_shared(),
            input: Arc::clone(&self.input),
            json: json(),
        };
        responses.put(self.isolation_key, id, stored);
    }
}

/// Returns the id of a response's call.
pub(super) fn function_call_id(response_id: &str, call: u32) -> String {
    call_id("call_", response_id, 0, call)
}

impl Body {
    /// Replaces references to items of stored responses by the items.
    pub(super) fn resolve_references(
        &mut self,
        responses: &ResponseStore,
        isolation_key: u64,
    ) -> Result<(), RouterError> {
        match &mut self.input {
            Some(Input::Items(items)) => resolve(items, |id| responses.get(isolation_key, id)),
            _ => Ok(()),
        }
    }

    /// Converts the body to the common request, which continues the `earlier` messages.
    pub(super) fn into_request(
        self,
        earlier: Vec<Arc<ConversationMessage>>,
        isolation_key: u64,
        header_task_type: Option<String>,
    ) -> Result<(RawRequest, ResponseOptions), RouterError> {
        self.refuse_unsupported()?;
        let store = self.store != Some(false);
        let sampling = self.sampling();
        let logprobs = self.logprobs()?;
        let drop_oldest_items = self.drops_oldest_items()?;
        let input = items_of(self.input)?;
        let conversation = read_conversation(earlier, &input)?;
        let text_format = read_text(self.text)?;
        let grammar = TextFormat::deserialize(&text_format)
            .map_err(|error| RouterError::invalid("text.format", format!("text.format: {error}")))?;
        let tool_choice = self.tool_choice.unwrap_or_else(|| json!("auto"));
        let tools = self.tools.unwrap_or_default();
        let choice = ToolFormat::Flat.parse_choice(Some(&tool_choice))?;
        let (functions, client_tools) = as_functions(&tools, loaded_tools(&input)?, &choice)?;
        let mut parsed_tools = ToolFormat::Flat.parse_at(functions, choice, self.parallel_tool_calls)?;
        let reasoning_effort = self.reasoning.map_or(Ok(None), |Object(it)| it.into_effort())?;
        let template_kwargs = template_kwargs(reasoning_effort.clone(), &mut parsed_tools);
        let kept = if store { conversation.clone() } else { Vec::new() };
        let messages = with_instructions(self.instructions.as_deref(), conversation);
        let raw_request = RawRequest {
            model: self.model,
            prompts: vec![RawPrompt::Chat { messages, template_kwargs }],
            sampling,
            max_tokens: self.max_output_tokens,
            seed: self.seed,
            stop: self.stop.unwrap_or_default().0,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            logprobs,
            priority: self.priority,
            task_type: self.task_type.or(header_task_type),
            speculation: self.speculation.map(|Object(speculation)| speculation.into()).unwrap_or_default(),
            cache_salt: self.cache_salt,
            tools: parsed_tools.raw.clone(),
            grammar: grammar.into_grammar()?,
            drop_oldest_messages: drop_oldest_items,
            exclude_from_log: !store,
            names: field_names(),
            ..RawRequest::default()
        };
        let options = ResponseOptions {
            stream: self.stream == Some(true),
            store,
            instructions: self.instructions,
            previous_response_id: self.previous_response_id,
            max_output_tokens: self.max_output_tokens.filter(|&max_tokens| max_tokens != NO_LIMIT),
            temperature: self.temperature.unwrap_or(1.0),
            top_p: self.top_p.unwrap_or(1.0),
            top_logprobs: logprobs.unwrap_or(0),
            metadata: self.metadata.unwrap_or_default(),
            user: self.user,
            parallel_tool_calls: parsed_tools.raw.parallel,
            tools,
            client_tools,
            tool_choice,
            text_format,
            reasoning_effort,
            drop_oldest_items,
            isolation_key,
            conversation: kept,
            input: if store { to_json(&input).into() } else { Arc::default() },
        };
        options.check_num_values()?;
        Ok((raw_request, options))
    }

    fn sampling(&self) -> RawSampling {
        RawSampling {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            ..RawSampling::default()
        }
    }

    /// Returns the number of top log probabilities to report per position, if any are requested.
    fn logprobs(&self) -> Result<Option<i64>, RouterError> {
        let include = self.include.as_deref().unwrap_or_default();
        let is_known = |value: &str| value == INCLUDE_LOGPROBS || INCLUDE_NOTHING.contains(&value);
        if let Some((idx, other)) = include.iter().enumerate().find(|(_, value)| !is_known(value)) {
            let path = format!("include[{idx}]");
            let message = format!("{path}: `{other}` is not supported: leave it out");
            return Err(RouterError::invalid(path, message));
        }
        let is_requested = include.iter().any(|value| value == INCLUDE_LOGPROBS);
        match self.top_logprobs {
            Some(count) if !is_requested && count != 0 => {
                let field = "top_logprobs";
                let message = format!("{field} is only allowed when include has {INCLUDE_LOGPROBS}");
                Err(RouterError::invalid(field, message))
            }
            count => Ok(is_requested.then(|| count.unwrap_or(0))),
        }
    }

    /// Whether the oldest items may be left out of a conversation that does not fit the window.
    fn drops_oldest_items(&self) -> Result<bool, RouterError> {
        match self.truncation.as_deref() {
            None | Some("" | "disabled") => Ok(false),
            Some("auto") => Ok(true),
            Some(other) => Err(RouterError::not_one_of("truncation", &["auto", "disabled"], other)),
        }
    }

    /// Refuses unsupported fields that would change the answer.
    fn refuse_unsupported(&self) -> Result<(), RouterError> {
        refuse_fields(
            "",
            &[
                ("max_tool_calls", &self.max_tool_calls),
                ("background", &self.background),
                ("conversation", &self.conversation),
                ("prompt", &self.prompt),
                ("context_management", &self.context_management),
                ("moderation", &self.moderation),
            ],
            is_disabled,
        )
    }
}

/// The conversation behind the instructions. These apply to one response: later ones do not inherit them.
fn with_instructions(
    instructions: Option<&str>,
    conversation: Vec<Arc<ConversationMessage>>,
) -> Vec<ConversationMessage> {
    let instructions = instructions.map(|text| ConversationMessage::new("system", text.to_owned()));
    instructions.into_iter().chain(conversation.into_iter().map(Arc::unwrap_or_clone)).collect()
}

/// Returns the variables of the chat template.
fn template_kwargs(reasoning_effort: Option<String>, tools: &mut ParsedTools) -> Map<String, Value> {
    let mut variables = Map::new();
    set_reasoning_effort(&mut variables, reasoning_effort);
    tools.set_template_tools(&mut variables);
    variables
}

fn field_names() -> FieldNames {
    FieldNames {
        max_tokens: "max_output_tokens",
        logprobs: "top_logprobs",
        prompt: "input",
        ..FieldNames::default()
    }
}

/// Returns the items of `input`.
fn items_of(input: Option<Input>) -> Result<Vec<Map<String, Value>>, RouterError> {
    match input {
        None => Err(RouterError::invalid("input", "input is required")),
        Some(Input::Text(text)) => Ok(vec![input_items::from_text(text)]),
        Some(Input::Items(items)) => Ok(items),
    }
}

/// Reads the conversation: the earlier messages, then this request's items.
fn read_conversation(
    earlier: Vec<Arc<ConversationMessage>>,
    items: &[Map<String, Value>],
) -> Result<Vec<Arc<ConversationMessage>>, RouterError> {
    let mut builder = ConversationBuilder::continuing(earlier);
    for (idx, item) in items.iter().enumerate() {
        read_item(idx, item, &mut builder)?;
    }
    Ok(builder.into_shared())
}

/// Returns the format requested by `text`.
fn read_text(text: Option<Object<TextConfig>>) -> Result<Value, RouterError> {
    let TextConfig { format, verbosity } = text.map(|Object(text)| text).unwrap_or_default();
    if verbosity.is_some_and(|verbosity| verbosity != "medium") {
        return Err(unsupported("text.verbosity"));
    }
    Ok(format.unwrap_or_else(|| json!({ "type": "text" })))
}
