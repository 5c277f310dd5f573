//! [`ToolCall`], and parsing it from JSON. Arguments stay as the model wrote them but for the spaces between
//! their tokens: a number that is parsed and written again may become another one.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde_json::Deserializer;
use serde_json::value::RawValue;

/// A tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// JSON, truncated if the text ended within it.
    pub arguments: String,
}

impl ToolCall {
    /// Creates a call with these arguments, as JSON. With `tools`, only calls of these tools are accepted.
    pub(super) fn new(name: &str, arguments: Option<&str>, tools: Option<&[String]>) -> Option<Self> {
        if tools.is_some_and(|tools| !tools.iter().any(|tool| tool == name)) {
            return None;
        }
        let arguments = match arguments {
            None | Some("null") => "{}".to_owned(),
            // Some models write the arguments as a JSON string.
            Some(text) if text.starts_with('"') => {
                compact_object(&serde_json::from_str::<String>(text).ok()?)?
            }
            Some(text) => compact_object(text)?,
        };
        Some(Self { name: name.to_owned(), arguments })
    }

    /// Parses a call as models write it: an object with a name, and arguments under one of two names. Of
    /// equal fields the last one counts.
    pub(super) fn from_json(json: &str, tools: Option<&[String]>) -> Option<Self> {
        let fields: BTreeMap<String, &RawValue> = serde_json::from_str(json).ok()?;
        let name: String = serde_json::from_str(fields.get("name")?.get()).ok()?;
        let arguments = fields.get("arguments").or_else(|| fields.get("parameters"));
        Self::new(&name, arguments.map(|value| value.get()), tools)
    }

    /// Parses one call or a non-empty list of calls; `None` if any of them is not a call.
    pub(super) fn list_from_json(json: &str, tools: &[String]) -> Option<Vec<Self>> {
        if !json.starts_with('[') {
            return Some(vec![Self::from_json(json, Some(tools))?]);
        }
        let items: Vec<&RawValue> = serde_json::from_str(json).ok()?;
        let calls = items.iter().map(|item| Self::from_json(item.get(), Some(tools)));
        calls.collect::<Option<Vec<_>>>().filter(|calls| !calls.is_empty())
    }
}

/// Returns the first JSON value of a text, and what follows it.
pub(super) fn first_value(text: &str) -> Option<(&str, &str)> {
    let mut values = Deserializer::from_str(text).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    Some(text.split_at(values.byte_offset()))
}

/// Returns an object without the spaces between its tokens; `None` if the JSON is something else.
fn compact_object(json: &str) -> Option<String> {
    serde_json::from_str::<BTreeMap<String, IgnoredAny>>(json).ok()?;
    let mut strings = Strings::default();
    let is_kept = |character: &char| !strings.is_outside(*character) || !character.is_ascii_whitespace();
    Some(json.chars().filter(is_kept).collect())
}

/// Tells strings from the rest of a valid JSON text, character by character.
#[derive(Debug, Default)]
pub(super) struct Strings {
    is_in_string: bool,
    is_escaped: bool,
}

impl Strings {
    /// Whether the next character is outside of strings; their quotes are inside.
    pub(super) fn is_outside(&mut self, character: char) -> bool {
        let was_in_string = self.is_in_string;
        match character {
            _ if self.is_escaped => self.is_escaped = false,
            '\\' => self.is_escaped = true,
            '"' => self.is_in_string = !self.is_in_string,
            _ => {}
        }
        !was_in_string && !self.is_in_string
    }
}
