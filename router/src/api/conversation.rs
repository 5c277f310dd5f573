//! [`ConversationBuilder`]: builds a conversation from items or blocks, which contain a turn's text,
//! reasoning and calls separately, while chat templates expect one message.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::{Value, json};
use text::{ConversationMessage, parse_arguments};

use super::parsed_output::OutputPart;
use crate::error::RouterError;

const ASSISTANT: &str = "assistant";

/// The messages so far. Earlier ones are shared with the stored response that is continued.
#[derive(Debug, Default)]
pub(super) struct ConversationBuilder {
    messages: Vec<Arc<ConversationMessage>>,
    /// Ids of all calls so far.
    calls: HashSet<String>,
}

impl ConversationBuilder {
    /// Continues earlier messages.
    pub(super) fn continuing(messages: Vec<Arc<ConversationMessage>>) -> Self {
        let ids = |message: &Arc<ConversationMessage>| -> Vec<String> {
            message.tool_calls.iter().filter_map(|call| call["id"].as_str().map(str::to_owned)).collect()
        };
        let calls = messages.iter().flat_map(ids).collect();
        Self { messages, calls }
    }

    /// Appends a message. If the assistant's last message has only reasoning so far, the text is added to
    /// that message.
    pub(super) fn push_message(&mut self, role: &str, text: String) {
        match self.messages.last_mut() {
            Some(last) if role == ASSISTANT && has_only_reasoning(last) => {
                Arc::make_mut(last).content = Some(text);
            }
            _ => self.push(ConversationMessage::new(role, text)),
        }
    }

    /// Appends reasoning of the assistant, which precedes its text or calls.
    pub(super) fn push_reasoning(&mut self, text: String) {
        let last = self.messages.last_mut().filter(|last| has_only_reasoning(last));
        match last.and_then(|last| Arc::make_mut(last).reasoning_content.as_mut()) {
            Some(earlier) => earlier.push_str(&text),
            None => {
                let message = ConversationMessage::new(ASSISTANT, String::new());
                self.push(ConversationMessage { reasoning_content: Some(text), ..message });
            }
        }
    }

    /// Appends a tool call to the assistant's current message; `arguments` are as [`parse_arguments`] returns
    /// them.
    pub(super) fn push_tool_call(&mut self, id: &str, name: &str, arguments: Value) {
        if self.messages.last().is_none_or(|last| last.role != ASSISTANT) {
            self.push(ConversationMessage::new(ASSISTANT, String::new()));
        }
        let call =
            json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
        if let Some(last) = self.messages.last_mut() {
            Arc::make_mut(last).tool_calls.push(call);
        }
        self.calls.insert(id.to_owned());
    }

    /// Appends the output of a call; `path` is the path of the call's id.
    pub(super) fn push_tool_result(
        &mut self,
        path: &str,
        id: &str,
        output: String,
    ) -> Result<(), RouterError> {
        if !self.calls.contains(id) {
            let message = format!("{path} is `{id}`, which matches no earlier call");
            return Err(RouterError::invalid(path, message));
        }
        let result = ConversationMessage::new("tool", output);
        self.push(ConversationMessage { tool_call_id: Some(id.to_owned()), ..result });
        Ok(())
    }

    /// Appends a model's answer; `id_of` returns the ids of its calls. A call with truncated arguments is
    /// left out: no template could render it.
    pub(super) fn push_output(&mut self, parts: &[OutputPart], id_of: impl Fn(u32) -> String) {
        for part in parts {
            match part {
                OutputPart::Text(text) => self.push_message(ASSISTANT, text.clone()),
                OutputPart::Reasoning(text) => self.push_reasoning(text.clone()),
                OutputPart::Call { idx, call } => {
                    if let Ok(arguments) = parse_arguments(&call.arguments) {
                        self.push_tool_call(&id_of(*idx), &call.name, arguments);
                    }
                }
            }
        }
    }

    fn push(&mut self, message: ConversationMessage) {
        self.messages.push(Arc::new(message));
    }

    /// Returns the messages. Earlier ones that did not change are shared.
    pub(super) fn into_shared(self) -> Vec<Arc<ConversationMessage>> {
        self.messages
    }

    /// Returns the messages.
    pub(super) fn into_messages(self) -> Vec<ConversationMessage> {
        self.messages.into_iter().map(Arc::unwrap_or_clone).collect()
    }
}

fn has_only_reasoning(message: &ConversationMessage) -> bool {
    message.reasoning_content.is_some() && message.text().is_empty() && message.tool_calls.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::ToolCall;

    #[test]
    fn the_parts_of_one_turn_become_one_message() {
        let mut builder = ConversationBuilder::default();
        builder.push_message("user", "hi".to_owned());
        builder.push_reasoning("hm".to_owned());
        builder.push_reasoning("m".to_owned());
        builder.push_message(ASSISTANT, "I look".to_owned());
        builder.push_tool_call("1", "f", json!({}));
        let call = ToolCall { name: "g".to_owned(), arguments: r#"{"a":1}"#.to_owned() };
        let truncated = ToolCall { name: "g".to_owned(), arguments: r#"{"a""#.to_owned() };
        let parts = [OutputPart::Call { idx: 0, call }, OutputPart::Call { idx: 1, call: truncated }];
        builder.push_output(&parts, |idx| format!("id{idx}"));
        builder.push_tool_result("x", "1", "one".to_owned()).unwrap();
        builder.push_tool_result("x", "id0", "two".to_owned()).unwrap();
        assert!(
            builder
                .push_tool_result("input[3].call_id", "id1", "never".to_owned())
                .unwrap_err()
                .to_string()
                .contains("matches no earlier call")
        );
        builder.push_tool_call("2", "f", json!({}));
        let messages = ConversationBuilder::continuing(builder.into_shared());
        assert!(messages.calls.contains("id0"));
        let [user, assistant, one, two, again] = messages.into_messages().try_into().unwrap();
        assert_eq!((user.text(), assistant.text()), ("hi", "I look"));
        assert_eq!(assistant.reasoning_content.as_deref(), Some("hmm"));
        let names: Vec<_> =
            assistant.tool_calls.iter().map(|call| call["function"]["name"].clone()).collect();
        assert_eq!(
            (names, &assistant.tool_calls[1]["function"]["arguments"]),
            (vec![json!("f"), json!("g")], &json!({ "a": 1 }))
        );
        assert_eq!((one.role.as_str(), two.tool_call_id.as_deref()), ("tool", Some("id0")));
        assert_eq!((again.role.as_str(), again.tool_calls.len()), (ASSISTANT, 1));
    }

    #[test]
    fn earlier_messages_are_shared_and_stay_as_they_are() {
        let mut builder = ConversationBuilder::default();
        builder.push_message("user", "hi".to_owned());
        builder.push_reasoning("hm".to_owned());
        let earlier = builder.into_shared();
        let mut later = ConversationBuilder::continuing(earlier.clone());
        later.push_message(ASSISTANT, "fine".to_owned());
        later.push_tool_call("1", "f", json!({}));
        let later = later.into_shared();
        assert!(Arc::ptr_eq(&earlier[0], &later[0]) && later.len() == 2);
        assert_eq!((earlier[1].text(), earlier[1].tool_calls.len()), ("", 0));
        assert_eq!((later[1].text(), later[1].tool_calls.len()), ("fine", 1));
    }
}
