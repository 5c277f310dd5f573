//! Arguments of calls with integers beyond 64 bits, as templates see them: objects in which such an integer
//! keeps its digits. All other values are those of Python's `json.loads`, as everywhere.

use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr, Serde};

use super::ConversationMessage;
use crate::arguments::{arguments_as_json, is_large_integer, tokens};

/// An integer beyond 64 bits. Templates can only write it.
#[derive(Debug)]
pub(super) struct LargeInteger(pub(super) String);

impl Object for LargeInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The messages with all arguments as objects, unless a client sent a text that is none.
pub(super) fn with_objects(messages: &[ConversationMessage]) -> Value {
    if messages.iter().any(has_json_arguments) {
        messages.iter().map(message_with_objects).collect()
    } else {
        as_they_are(messages)
    }
}

/// The messages with arguments as they are.
pub(super) fn as_they_are(messages: &[ConversationMessage]) -> Value {
    Value::from(Serde(messages))
}

fn has_json_arguments(message: &ConversationMessage) -> bool {
    message.tool_calls.iter().any(|call| arguments_as_json(call).is_some())
}

fn message_with_objects(message: &ConversationMessage) -> Value {
    if !has_json_arguments(message) {
        return Value::from(Serde(message));
    }
    let fields = serde_json::to_value(message).unwrap_or_default();
    with_field(&fields, "tool_calls", &message.tool_calls.iter().map(call_with_objects).collect())
}

fn call_with_objects(call: &serde_json::Value) -> Value {
    match arguments_as_json(call).and_then(object_from_json) {
        Some(arguments) => {
            let function = with_field(&call["function"], "arguments", &arguments);
            with_field(call, "function", &function)
        }
        None => Value::from(Serde(call)),
    }
}

/// An object with another value for one of its fields.
fn with_field(object: &serde_json::Value, name: &str, replacement: &Value) -> Value {
    let fields = object.as_object().into_iter().flatten();
    let field = |(field, value): (&String, &serde_json::Value)| {
        let value = if field == name { replacement.clone() } else { Value::from(Serde(value)) };
        (field.clone(), value)
    };
    Value::from_pairs(fields.map(field))
}

/// Reads valid JSON.
fn object_from_json(json: &str) -> Option<Value> {
    let mut tokens = tokens(json);
    let first = tokens.next()?;
    read_value(first, &mut tokens)
}

/// Reads the value that begins with a token. Parsing the same text has limited how deeply values nest.
fn read_value<'a>(first: &'a str, rest: &mut dyn Iterator<Item = &'a str>) -> Option<Value> {
    match first {
        "{" => {
            let mut fields = Vec::new();
            loop {
                match rest.next()? {
                    "}" => return Some(Value::from_pairs(fields)),
                    "," => {}
                    key => {
                        let key: String = serde_json::from_str(key).ok()?;
                        // The colon, then the first token of the value.
                        let first = rest.nth(1)?;
                        fields.push((key, read_value(first, rest)?));
                    }
                }
            }
        }
        "[" => {
            let mut items = Vec::new();
            loop {
                match rest.next()? {
                    "]" => return Some(items.into_iter().collect()),
                    "," => {}
                    first => items.push(read_value(first, rest)?),
                }
            }
        }
        integer if is_large_integer(integer) => Some(Value::from_object(LargeInteger(integer.to_owned()))),
        scalar => {
            serde_json::from_str::<serde_json::Value>(scalar).ok().map(|scalar| Value::from(Serde(scalar)))
        }
    }
}
