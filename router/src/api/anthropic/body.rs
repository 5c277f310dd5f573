//! What a client may send to `/v1/messages`. A field that is not known is refused by name, and so is one that would change the answer
//! but is not supported.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use crate::api::exchange::refuse_fields;
use crate::api::openai::body::Speculation;
use crate::api::openai::shapes::Object;
use crate::error::RouterError;
use crate::request::SentRequest;
use crate::request::sent::{FieldNames, SentPrompt, SentSampling};
use text::ConversationMessage;

/// A request's body.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Body {
    model: Option<String>,
    messages: Option<Vec<Object<SentMessage>>>,
    pub(super) max_tokens: Option<i64>,
    system: Option<Content>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,

    // Ours, as for conversations.
    seed: Option<i64>,
    ignore_eos: Option<bool>,
    priority: Option<i64>,
    task_type: Option<String>,
    speculation: Option<Object<Speculation>>,

    tools: Option<Value>,
    tool_choice: Option<Value>,
    thinking: Option<Value>,
    container: Option<Value>,
    mcp_servers: Option<Value>,
    context_management: Option<Value>,
    output_config: Option<Value>,
    output_format: Option<Value>,

    #[serde(rename = "metadata")]
    _metadata: IgnoredAny,
    #[serde(rename = "service_tier")]
    _service_tier: IgnoredAny,
    #[serde(rename = "inference_geo")]
    _inference_geo: IgnoredAny,
    #[serde(rename = "cache_control")]
    _cache_control: IgnoredAny,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SentMessage {
    role: String,
    content: Content,
}

/// A text, or blocks.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a string or a list of text blocks")]
enum Content {
    Text(String),
    Blocks(Vec<Map<String, Value>>),
}

impl Content {
    /// The text of all blocks. Only text is read yet: this is where calls of tools and their results belong.
    fn into_text(self, path: &str) -> Result<String, RouterError> {
        let blocks = match self {
            Self::Text(text) => return Ok(text),
            Self::Blocks(blocks) => blocks,
        };
        let mut texts = Vec::with_capacity(blocks.len());
        for (idx, block) in blocks.iter().enumerate() {
            let kind = block.get("type").and_then(Value::as_str).unwrap_or_default();
            match block.get("text").and_then(Value::as_str) {
                Some(text) if kind == "text" => texts.push(text),
                _ => {
                    let path = format!("{path}[{idx}]");
                    let message = format!("{path} must be a text block, not one of type `{kind}`");
                    return Err(RouterError::invalid(path, message));
                }
            }
        }
        Ok(texts.join("\n"))
    }
}

/// What an answer has to know of its request.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageForm {
    /// As server-sent events.
    pub(super) stream: bool,
}

impl Body {
    /// The request, free of this API's shapes.
    pub(super) fn into_sent(
        self,
        header_task_type: Option<String>,
    ) -> Result<(SentRequest, MessageForm), RouterError> {
        self.refuse_unsupported()?;
        if self.max_tokens.is_none() {
            return Err(RouterError::invalid("max_tokens", "max_tokens is required"));
        }
        let mut messages = Vec::new();
        if let Some(system) = self.system {
            messages.push(ConversationMessage::new("system", system.into_text("system")?));
        }
        let sent = self.messages.ok_or_else(|| RouterError::invalid("messages", "messages is required"))?;
        for (idx, Object(SentMessage { role, content })) in sent.into_iter().enumerate() {
            if !matches!(role.as_str(), "user" | "assistant") {
                let path = format!("messages[{idx}].role");
                let problem = format!("{path} must be user or assistant, not `{role}`");
                return Err(RouterError::invalid(path, problem));
            }
            messages.push(ConversationMessage::new(
                &role,
                content.into_text(&format!("messages[{idx}].content"))?,
            ));
        }
        let sent = SentRequest {
            model: self.model,
            prompts: vec![SentPrompt::Chat { messages, template_kwargs: Map::new() }],
            sampling: SentSampling {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                ..SentSampling::default()
            },
            max_tokens: self.max_tokens,
            seed: self.seed,
            stop: self.stop_sequences.unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            priority: self.priority,
            task_type: self.task_type.or(header_task_type),
            speculation: self.speculation.map(|Object(sent)| sent.into()).unwrap_or_default(),
            names: FieldNames { max_tokens: "max_tokens", logprobs: "logprobs", prompt: "messages" },
            ..SentRequest::default()
        };
        Ok((sent, MessageForm { stream: self.stream == Some(true) }))
    }

    /// Fields that would change the answer, if they were supported.
    fn refuse_unsupported(&self) -> Result<(), RouterError> {
        refuse_fields(
            &[
                ("tools", &self.tools),
                ("tool_choice", &self.tool_choice),
                ("thinking", &self.thinking),
                ("container", &self.container),
                ("mcp_servers", &self.mcp_servers),
                ("context_management", &self.context_management),
                ("output_config", &self.output_config),
                ("output_format", &self.output_format),
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
        ("tool_choice", Value::Object(choice)) => {
            choice.get("type").is_some_and(|kind| kind == "none" || kind == "auto")
        }
        ("thinking", Value::Object(thinking)) => thinking.get("type").is_some_and(|kind| kind == "disabled"),
        _ => false,
    }
}
