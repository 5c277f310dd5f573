//! What a client may send to `/v1/responses`. As with conversations, a field that is not known is refused by name, and so is one that
//! would change the answer but is not supported.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use crate::api::exchange::refuse_fields;
use crate::api::openai::body::Speculation;
use crate::api::openai::shapes::{Object, Stops};
use crate::error::RouterError;
use crate::pipeline::response_store::{ResponseStore, StoredResponse};
use crate::request::SentRequest;
use crate::request::sent::{FieldNames, SentPrompt, SentSampling};
use text::ConversationMessage;

/// A request's body.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Body {
    model: Option<String>,
    input: Option<Input>,
    instructions: Option<String>,
    pub(super) previous_response_id: Option<String>,
    store: Option<bool>,
    stream: Option<bool>,
    max_output_tokens: Option<i64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    metadata: Option<Map<String, Value>>,
    user: Option<String>,

    // vLLM's and ours, as for conversations.
    top_k: Option<i64>,
    min_p: Option<f64>,
    seed: Option<i64>,
    stop: Option<Stops>,
    ignore_eos: Option<bool>,
    priority: Option<i64>,
    task_type: Option<String>,
    speculation: Option<Object<Speculation>>,

    tools: Option<Value>,
    tool_choice: Option<Value>,
    max_tool_calls: Option<Value>,
    text: Option<Value>,
    reasoning: Option<Value>,
    include: Option<Value>,
    background: Option<Value>,
    conversation: Option<Value>,
    prompt: Option<Value>,
    truncation: Option<Value>,
    top_logprobs: Option<Value>,
    context_management: Option<Value>,
    moderation: Option<Value>,

    #[serde(rename = "stream_options")]
    _stream_options: IgnoredAny,
    #[serde(rename = "parallel_tool_calls")]
    _parallel_tool_calls: IgnoredAny,
    #[serde(rename = "service_tier")]
    _service_tier: IgnoredAny,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: IgnoredAny,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: IgnoredAny,
    #[serde(rename = "prompt_cache_retention")]
    _prompt_cache_retention: IgnoredAny,
}

/// `input`: a text, or items.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "input must be a string or a list of items")]
enum Input {
    Text(String),
    Items(Vec<Map<String, Value>>),
}

/// What an answer has to know of its request.
#[derive(Debug)]
pub(super) struct ResponseForm {
    pub(super) stream: bool,
    pub(super) store: bool,
    pub(super) instructions: Option<String>,
    pub(super) previous_response_id: Option<String>,
    pub(super) max_output_tokens: Option<i64>,
    pub(super) temperature: f64,
    pub(super) top_p: f64,
    pub(super) metadata: Map<String, Value>,
    pub(super) user: Option<String>,
    /// Whose it is.
    isolation_key: u64,
    /// What a later response goes on from, this one's text left out.
    conversation: Vec<ConversationMessage>,
}

impl ResponseForm {
    /// Keeps a response that is complete, unless its client does not want that.
    pub(super) fn store(&self, responses: &ResponseStore, id: &str, said: &str, json: &str) {
        if !self.store {
            return;
        }
        let mut conversation = self.conversation.clone();
        conversation.push(ConversationMessage::new("assistant", said.to_owned()));
        let stored = StoredResponse { conversation, json: json.to_owned() };
        responses.put(self.isolation_key, id, stored);
    }
}

impl Body {
    /// The request, free of this API's shapes; it goes on from `earlier` messages.
    pub(super) fn into_sent(
        self,
        earlier: Vec<ConversationMessage>,
        isolation_key: u64,
        header_task_type: Option<String>,
    ) -> Result<(SentRequest, ResponseForm), RouterError> {
        self.refuse_unsupported()?;
        let mut conversation = earlier;
        match self.input {
            None => return Err(RouterError::invalid("input", "input is required")),
            Some(Input::Text(text)) => conversation.push(ConversationMessage::new("user", text)),
            Some(Input::Items(items)) => {
                for (idx, item) in items.into_iter().enumerate() {
                    conversation.push(read_item(idx, item)?);
                }
            }
        }
        // Instructions are this response's own: a later one does not inherit them.
        let mut messages: Vec<ConversationMessage> =
            self.instructions.iter().map(|text| ConversationMessage::new("system", text.clone())).collect();
        messages.extend_from_slice(&conversation);
        let sent = SentRequest {
            model: self.model,
            prompts: vec![SentPrompt::Chat { messages, template_kwargs: Map::new() }],
            sampling: SentSampling {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                min_p: self.min_p,
                ..SentSampling::default()
            },
            max_tokens: self.max_output_tokens,
            seed: self.seed,
            stop: self.stop.unwrap_or_default().0,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            priority: self.priority,
            task_type: self.task_type.or(header_task_type),
            speculation: self.speculation.map(|Object(sent)| sent.into()).unwrap_or_default(),
            names: FieldNames { max_tokens: "max_output_tokens", logprobs: "top_logprobs", prompt: "input" },
            ..SentRequest::default()
        };
        let form = ResponseForm {
            stream: self.stream == Some(true),
            store: self.store != Some(false),
            instructions: self.instructions,
            previous_response_id: self.previous_response_id,
            max_output_tokens: self.max_output_tokens,
            temperature: self.temperature.unwrap_or(1.0),
            top_p: self.top_p.unwrap_or(1.0),
            metadata: self.metadata.unwrap_or_default(),
            user: self.user,
            isolation_key,
            conversation,
        };
        Ok((sent, form))
    }

    /// Fields that would change the answer, if they were supported.
    fn refuse_unsupported(&self) -> Result<(), RouterError> {
        refuse_fields(
            &[
                ("tools", &self.tools),
                ("tool_choice", &self.tool_choice),
                ("max_tool_calls", &self.max_tool_calls),
                ("text", &self.text),
                ("reasoning", &self.reasoning),
                ("include", &self.include),
                ("background", &self.background),
                ("conversation", &self.conversation),
                ("prompt", &self.prompt),
                ("truncation", &self.truncation),
                ("top_logprobs", &self.top_logprobs),
                ("context_management", &self.context_management),
                ("moderation", &self.moderation),
            ],
            says_off,
        )
    }
}

/// Whether an unsupported field asks for nothing.
fn says_off(field: &str, value: &Value) -> bool {
    match (field, value) {
        (_, Value::Null | Value::Bool(false)) => true,
        (_, Value::Array(items)) => items.is_empty(),
        ("tool_choice", Value::String(choice)) => matches!(choice.as_str(), "auto" | "none"),
        ("truncation", Value::String(truncation)) => truncation == "disabled",
        ("top_logprobs", Value::Number(count)) => count.as_u64() == Some(0),
        // `{"format": {"type": "text"}}` is plain text.
        ("text", Value::Object(fields)) => fields
            .iter()
            .all(|(name, value)| value.is_null() || (name == "format" && value["type"] == "text")),
        ("reasoning", Value::Object(fields)) => fields.values().all(Value::is_null),
        _ => false,
    }
}

/// One item of the input. Only messages are read yet: this is where calls of tools and their outputs belong.
fn read_item(idx: usize, item: Map<String, Value>) -> Result<ConversationMessage, RouterError> {
    let path = format!("input[{idx}]");
    let kind = item.get("type").and_then(Value::as_str).unwrap_or("message");
    if kind != "message" {
        let message = format!("{path} is of type `{kind}`, only `message` is supported");
        return Err(RouterError::invalid(path, message));
    }
    let known = ["type", "role", "content", "id", "status", "phase"];
    if let Some(unknown) = item.keys().find(|name| !known.contains(&name.as_str())) {
        let path = format!("{path}.{unknown}");
        return Err(RouterError::invalid(
            path.clone(),
            format!("{path} is not a field that this endpoint knows"),
        ));
    }
    let role = item.get("role").and_then(Value::as_str);
    let role =
        role.ok_or_else(|| RouterError::invalid(format!("{path}.role"), format!("{path}.role is required")))?;
    if !["system", "developer", "user", "assistant"].contains(&role) {
        let path = format!("{path}.role");
        let problem = format!("{path} must be one of system, developer, user, assistant, not `{role}`");
        return Err(RouterError::invalid(path, problem));
    }
    // Templates know OpenAI's newer word by its older name.
    let role = if role == "developer" { "system" } else { role };
    let content = match item.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => read_parts(&path, parts)?,
        _ => {
            let path = format!("{path}.content");
            return Err(RouterError::invalid(
                path.clone(),
                format!("{path} must be a string or a list of text parts"),
            ));
        }
    };
    Ok(ConversationMessage::new(role, content))
}

fn read_parts(path: &str, parts: &[Value]) -> Result<String, RouterError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (idx, part) in parts.iter().enumerate() {
        let kind = part["type"].as_str().unwrap_or_default();
        match part["text"].as_str() {
            Some(text) if matches!(kind, "input_text" | "output_text" | "text") => texts.push(text),
            _ => {
                let path = format!("{path}.content[{idx}]");
                let message = format!("{path} must be a text part, not one of type `{kind}`");
                return Err(RouterError::invalid(path, message));
            }
        }
    }
    Ok(texts.join("\n"))
}
