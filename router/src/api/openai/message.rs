//! [`Message`]: one message of a chat completion's conversation, and [`conversation`], which makes the prompt
//! of them.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::functions::FunctionCalls;
use super::shapes::Content;
use super::tools::parse_earlier_calls;
use crate::api::disabled::{is_disabled, refuse_fields};
use crate::api::exact_arguments::{FlatCall, NestedCall};
use crate::api::object::Object;
use crate::error::RouterError;
use crate::request::raw::RawPrompt;
use text::ConversationMessage;

/// One message of a conversation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are OpenAI's")]
pub struct Message {
    pub role: String,
    #[serde(default)]
    pub content: Option<Content>,
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub tool_calls: Option<Vec<NestedCall>>,
    #[serde(default)]
    pub tool_call_id: Option<String>,
    #[serde(default)]
    pub reasoning_content: Option<String>,
    #[serde(default)]
    pub reasoning: Option<String>,
    #[serde(default)]
    pub function_call: Option<FlatCall>,
    #[serde(default)]
    pub audio: Option<Value>,
    #[serde(default)]
    pub refusal: Option<Value>,
    // Client libraries, gateways and other servers add these to an answer; clients send them back unchanged.
    #[serde(default)]
    annotations: Option<IgnoredAny>,
    #[serde(default)]
    parsed: Option<IgnoredAny>,
    #[serde(default)]
    provider_specific_fields: Option<IgnoredAny>,
    #[serde(default)]
    reasoning_details: Option<IgnoredAny>,
    #[serde(default)]
    thinking_blocks: Option<IgnoredAny>,
    // lm-eval's, with the value `text`.
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
    // Prefixes are matched by content.
    #[serde(default, rename = "cache_control")]
    _cache_control: IgnoredAny,
}

/// Builds the prompt of a conversation; empty if `messages` is missing.
pub fn conversation(
    messages: Option<Vec<Object<Message>>>,
    template_kwargs: Map<String, Value>,
) -> Result<Vec<RawPrompt>, RouterError> {
    let Some(messages) = messages else { return Ok(Vec::new()) };
    let mut functions = FunctionCalls::default();
    let convert = |(idx, Object(mut message)): (usize, Object<Message>)| {
        functions.rewrite(idx, &mut message)?;
        message.into_conversation(idx)
    };
    let messages = messages.into_iter().enumerate().map(convert).collect::<Result<_, RouterError>>()?;
    Ok(vec![RawPrompt::Chat { messages, template_kwargs }])
}

impl Message {
    fn into_conversation(self, idx: usize) -> Result<ConversationMessage, RouterError> {
        let unsupported = [("audio", &self.audio), ("refusal", &self.refusal)];
        refuse_fields(&format!("messages[{idx}]."), &unsupported, is_disabled)?;
        let only = |field: &str, role: &str, is_set: bool| {
            let path = format!("messages[{idx}].{field}");
            let message = format!("{path} is only allowed in messages of role {role}");
            if is_set && self.role != role { Err(RouterError::invalid(path, message)) } else { Ok(()) }
        };
        let tool_calls = self.tool_calls.unwrap_or_default();
        only("tool_calls", "assistant", !tool_calls.is_empty())?;
        only("reasoning_content", "assistant", self.reasoning_content.is_some())?;
        only("reasoning", "assistant", self.reasoning.is_some())?;
        only("annotations", "assistant", self.annotations.is_some())?;
        only("parsed", "assistant", self.parsed.is_some())?;
        only("provider_specific_fields", "assistant", self.provider_specific_fields.is_some())?;
        only("reasoning_details", "assistant", self.reasoning_details.is_some())?;
        only("thinking_blocks", "assistant", self.thinking_blocks.is_some())?;
        only("tool_call_id", "tool", self.tool_call_id.is_some())?;
        let content = match self.content {
            Some(Content(content)) => Some(content),
            // An answer with only tool calls or only reasoning has no content. Templates get null with calls.
            None if self.role == "assistant" => tool_calls.is_empty().then(String::new),
            None => {
                let path = format!("messages[{idx}].content");
                let message = format!("{path} is required: a string or a list of text parts");
                return Err(RouterError::invalid(path, message));
            }
        };
        let tool_calls = parse_earlier_calls(&format!("messages[{idx}].tool_calls"), tool_calls)?;
        Ok(ConversationMessage {
            role: self.role,
            content,
            name: self.name,
            reasoning_content: self.reasoning_content.or(self.reasoning),
            tool_calls,
            tool_call_id: self.tool_call_id,
        })
    }
}
