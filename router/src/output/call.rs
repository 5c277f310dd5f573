//! [`ToolCall`], and parsing it from JSON.

use serde_json::{Map, Value};

/// A tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// JSON, truncated if the text ended within it.
    pub arguments: String,
}

impl ToolCall {
    /// Parses a call as models write it: an object with a name, and arguments under one of two names. With
    /// `tools`, only calls of these tools are accepted.
    pub(super) fn from_json(value: &Value, tools: Option<&[String]>) -> Option<Self> {
        let name = value.get("name")?.as_str()?;
        if tools.is_some_and(|tools| !tools.iter().any(|tool| tool == name)) {
            return None;
        }
        let arguments = match value.get("arguments").or_else(|| value.get("parameters")) {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(Value::Object(arguments)) => Value::Object(arguments.clone()),
            // Some models write the arguments as a JSON string.
            Some(Value::String(text)) => serde_json::from_str(text).ok().filter(Value::is_object)?,
            Some(_) => return None,
        };
        Some(Self { name: name.to_owned(), arguments: arguments.to_string() })
    }

    /// Parses one call or a non-empty list of calls; `None` if any of them is not a call.
    pub(super) fn list_from_json(value: &Value, tools: &[String]) -> Option<Vec<Self>> {
        match value {
            Value::Array(items) if !items.is_empty() => {
                items.iter().map(|item| Self::from_json(item, Some(tools))).collect()
            }
            item => Some(vec![Self::from_json(item, Some(tools))?]),
        }
    }
}
