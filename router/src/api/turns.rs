//! [`Turns`]: builds a conversation from items or blocks, which contain a turn's text,
//! reasoning and calls separately, while chat templates expect one message.

use std::collections::HashSet;

use serde_json::{Map, Value, json};
use text::ConversationMessage;

use super::answer::AnswerPart;
use crate::error::RouterError;

const ASSISTANT: &str = "assistant";

/// The messages so far.
#[derive(Debug, Default)]
pub(super) struct Turns {
    messages: Vec<ConversationMessage>,
    /// Ids of all calls so far.
    calls: HashSet<String>,
}

impl Turns {
    /// Continues earlier messages.
    pub(super) fn after(messages: Vec<ConversationMessage>) -> Self {
        let ids = |message: &ConversationMessage| -> Vec<String> {
            message.tool_calls.iter().filter_map(|call| call["id"].as_str().map(str::to_owned)).collect()
        };
        let calls = messages.iter().flat_map(ids).collect();
        Self { messages, calls }
    }

    /// Appends a message. If the assistant's last message has only reasoning so far, the text is added to
    /// that message.
    pub(super) fn say(&mut self, role: &str, text: String) {
        match self.messages.last_mut() {
            Some(last) if role == ASSISTANT && has_only_thought(last) => last.content = text,
            _ => self.messages.push(ConversationMessage::new(role, text)),
        }
    }

    /// Appends reasoning of the assistant, which precedes its text or calls.
    pub(super) fn think(&mut self, text: String) {
        let last = self.messages.last_mut().filter(|last| has_only_thought(last));
        match last.and_then(|last| last.reasoning_content.as_mut()) {
            Some(earlier) => earlier.push_str(&text),
            None => {
                let thought = ConversationMessage::new(ASSISTANT, String::new());
                self.messages.push(ConversationMessage { reasoning_content: Some(text), ..thought });
            }
        }
    }

    /// Appends a tool call to the assistant's current message.
    pub(super) fn call(&mut self, id: &str, name: &str, arguments: Map<String, Value>) {
        if self.messages.last().is_none_or(|last| last.role != ASSISTANT) {
            self.messages.push(ConversationMessage::new(ASSISTANT, String::new()));
        }
        let call =
            json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
        if let Some(last) = self.messages.last_mut() {
            last.tool_calls.push(call);
        }
        self.calls.insert(id.to_owned());
    }

    /// Appends the output of a call; `path` is the path of the call's id.
    pub(super) fn answer(&mut self, path: &str, id: &str, output: String) -> Result<(), RouterError> {
        if !self.calls.contains(id) {
            let message = format!("{path} is `{id}`, which matches no earlier call");
            return Err(RouterError::invalid(path, message));
        }
        let answer = ConversationMessage::new("tool", output);
        self.messages.push(ConversationMessage { tool_call_id: Some(id.to_owned()), ..answer });
        Ok(())
    }

    /// Appends a model's answer; `id_of` returns the ids of its calls. A call with truncated arguments is
    /// left out: no template could render it.
    pub(super) fn answered(&mut self, parts: &[AnswerPart], id_of: impl Fn(u32) -> String) {
        for part in parts {
            match part {
                AnswerPart::Text(text) => self.say(ASSISTANT, text.clone()),
                AnswerPart::Reasoning(text) => self.think(text.clone()),
                AnswerPart::Call { idx, call } => {
                    if let Ok(arguments) = serde_json::from_str(&call.arguments) {
                        self.call(&id_of(*idx), &call.name, arguments);
                    }
                }
            }
        }
    }

    /// Returns the messages.
    pub(super) fn into_messages(self) -> Vec<ConversationMessage> {
        self.messages
    }
}

fn has_only_thought(message: &ConversationMessage) -> bool {
    message.reasoning_content.is_some() && message.content.is_empty() && message.tool_calls.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::ToolCall;

    #[test]
    fn what_one_turn_is_made_of_is_one_message() {
        let mut turns = Turns::default();
        turns.say("user", "hi".to_owned());
        turns.think("hm".to_owned());
        turns.think("m".to_owned());
        turns.say(ASSISTANT, "I look".to_owned());
        turns.call("1", "f", Map::new());
        let call = ToolCall { name: "g".to_owned(), arguments: r#"{"a":1}"#.to_owned() };
        let cut = ToolCall { name: "g".to_owned(), arguments: r#"{"a""#.to_owned() };
        let parts = [AnswerPart::Call { idx: 0, call }, AnswerPart::Call { idx: 1, call: cut }];
        turns.answered(&parts, |idx| format!("id{idx}"));
        turns.answer("x", "1", "one".to_owned()).unwrap();
        turns.answer("x", "id0", "two".to_owned()).unwrap();
        assert!(
            turns
                .answer("input[3].call_id", "id1", "never".to_owned())
                .unwrap_err()
                .to_string()
                .contains("matches no earlier call")
        );
        turns.call("2", "f", Map::new());
        let messages = Turns::after(turns.into_messages());
        assert!(messages.calls.contains("id0"));
        let [user, assistant, one, two, again] = messages.into_messages().try_into().unwrap();
        assert_eq!((user.content.as_str(), assistant.content.as_str()), ("hi", "I look"));
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
}
