//! The items of a response's `input`: messages, tool calls and their outputs, and reasoning, written by the
//! client or copied from an earlier answer.

use std::fmt;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::custom_tools::arguments_of;
use super::tool_search;
use super::tools::{function_name, function_names};
use crate::api::conversation::ConversationBuilder;
use crate::api::exact_arguments::read_fields;
use crate::api::functions::parse_arguments;
use crate::api::json::to_json;
use crate::error::RouterError;

/// Fields of all items, without effect besides the type. The last one is the Codex CLI's.
const COMMON_FIELDS: [&str; 4] = ["type", "id", "status", "internal_chat_message_metadata_passthrough"];

/// `input`: a text, or a list of items.
#[derive(Debug)]
pub(super) enum Input {
    Text(String),
    Items(Vec<Map<String, Value>>),
}

impl<'de> Deserialize<'de> for Input {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InputVisitor;
        impl<'de> Visitor<'de> for InputVisitor {
            type Value = Input;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of items")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Input, E> {
                Ok(Input::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Input, A::Error> {
                let items = Vec::<RawItem>::deserialize(SeqAccessDeserializer::new(items))?;
                Ok(Input::Items(items.into_iter().map(|RawItem(fields)| fields).collect()))
            }
        }
        deserializer.deserialize_any(InputVisitor)
    }
}

/// The fields of an item.
pub(super) struct RawItem(pub(super) Map<String, Value>);

impl<'de> Deserialize<'de> for RawItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_fields(&["arguments"], "an item, which is an object", deserializer).map(Self)
    }
}

/// One item, with its path for messages.
struct Item<'a> {
    path: String,
    fields: &'a Map<String, Value>,
}

/// Appends an item to the conversation.
pub(super) fn read_item(
    idx: usize,
    fields: &Map<String, Value>,
    builder: &mut ConversationBuilder,
) -> Result<(), RouterError> {
    let item = Item { path: format!("input[{idx}]"), fields };
    match fields.get("type").and_then(Value::as_str).unwrap_or("message") {
        "message" => item.message(builder),
        "function_call" => item.call(builder),
        "custom_tool_call" => item.custom_call(builder),
        "function_call_output" | "custom_tool_call_output" => item.output(builder),
        "tool_search_call" => item.search(builder),
        tool_search::OUTPUT => item.search_output(builder),
        // Its tools are read with those of the request.
        tool_search::ADDITIONAL => item.check_fields(&["role", "tools"]),
        "reasoning" => item.reasoning(builder),
        other => {
            let expected = "message, function_call, custom_tool_call, tool_search_call, their outputs \
                            (function_call_output, custom_tool_call_output, tool_search_output), \
                            additional_tools, reasoning or item_reference";
            Err(RouterError::must_be(&item.path, format_args!("of type {expected}, not `{other}`")))
        }
    }
}

impl Item<'_> {
    fn message(&self, builder: &mut ConversationBuilder) -> Result<(), RouterError> {
        self.check_fields(&["role", "content", "phase", "end_turn"])?;
        let role = self.text("role")?;
        let known = ["system", "developer", "user", "assistant"];
        if !known.contains(&role) {
            return Err(RouterError::not_one_of(&format!("{}.role", self.path), &known, role));
        }
        let content = self.content("content", &["input_text", "output_text", "text"])?;
        builder.push_message(role, content);
        Ok(())
    }

    fn call(&self, builder: &mut ConversationBuilder) -> Result<(), RouterError> {
        // openai-python adds the parsed arguments to the calls of an answer.
        self.check_fields(&["call_id", "namespace", "name", "arguments", "parsed_arguments"])?;
        let arguments = self.fields.get("arguments").unwrap_or(&Value::Null);
        let arguments = parse_arguments(&format!("{}.arguments", self.path), arguments)?;
        builder.push_tool_call(self.text("call_id")?, &self.function()?, arguments);
        Ok(())
    }

    fn custom_call(&self, builder: &mut ConversationBuilder) -> Result<(), RouterError> {
        self.check_fields(&["call_id", "namespace", "name", "input"])?;
        let arguments = arguments_of(self.text("input")?).into();
        builder.push_tool_call(self.text("call_id")?, &self.function()?, arguments);
        Ok(())
    }

    /// Name of the function that stands for the called tool.
    fn function(&self) -> Result<String, RouterError> {
        let name = self.text("name")?;
        let is_in_namespace = self.fields.get("namespace").is_some_and(|namespace| !namespace.is_null());
        if is_in_namespace { Ok(function_name(self.text("namespace")?, name)) } else { Ok(name.to_owned()) }
    }

    fn output(&self, builder: &mut ConversationBuilder) -> Result<(), RouterError> {
        // The Codex CLI repeats the name of some tools.
        self.check_fields(&["call_id", "namespace", "name", "output"])?;
        let output = self.content("output", &["input_text", "output_text", "text"])?;
        builder.push_tool_result(&format!("{}.call_id", self.path), self.text("call_id")?, output)
    }

    fn search(&self, builder: &mut ConversationBuilder) -> Result<(), RouterError> {
        self.check_fields(&["call_id", "execution", "arguments"])?;
        let arguments = self.fields.get("arguments").unwrap_or(&Value::Null);
        let arguments = parse_arguments(&format!("{}.arguments", self.path), arguments)?;
        builder.push_tool_call(self.text("call_id")?, tool_search::TYPE, arguments);
        Ok(())
    }

    /// Appends the names of the tools found: the model sees their definitions with those of all other tools.
    fn search_output(&self, builder: &mut ConversationBuilder) -> Result<(), RouterError> {
        self.check_fields(&["call_id", "execution", "tools"])?;
        let Some(Value::Array(tools)) = self.fields.get("tools") else {
            return Err(self.invalid("tools", "a list of tools"));
        };
        let names = to_json(&function_names(tools));
        builder.push_tool_result(&format!("{}.call_id", self.path), self.text("call_id")?, names)
    }

    /// Appends reasoning. The summary is ignored, because it is not the model's own reasoning.
    fn reasoning(&self, builder: &mut ConversationBuilder) -> Result<(), RouterError> {
        self.check_fields(&["content", "summary", "encrypted_content"])?;
        if self.fields.get("content").is_some_and(|content| !content.is_null()) {
            builder.push_reasoning(self.content("content", &["reasoning_text", "text"])?);
        }
        Ok(())
    }

    /// Refuses fields that are neither in `allowed`, nor common to all items, nor null.
    fn check_fields(&self, allowed: &[&str]) -> Result<(), RouterError> {
        let is_allowed = |name: &str| allowed.contains(&name) || COMMON_FIELDS.contains(&name);
        let unknown = self.fields.iter().find(|(name, value)| !is_allowed(name) && !value.is_null());
        let Some((name, _)) = unknown else { return Ok(()) };
        let path = format!("{}.{name}", self.path);
        Err(RouterError::invalid(&path, format!("{path} is not a field of this endpoint")))
    }

    fn invalid(&self, field: &str, expected: &str) -> RouterError {
        RouterError::must_be(&format!("{}.{field}", self.path), expected)
    }

    fn text(&self, field: &str) -> Result<&str, RouterError> {
        let path = || format!("{}.{field}", self.path);
        match self.fields.get(field) {
            Some(Value::String(text)) => Ok(text),
            None | Some(Value::Null) => Err(RouterError::invalid(path(), format!("{} is required", path()))),
            Some(_) => Err(self.invalid(field, "a string")),
        }
    }

    /// Reads a text, or parts of these kinds.
    fn content(&self, field: &str, kinds: &[&str]) -> Result<String, RouterError> {
        let parts = match self.fields.get(field) {
            Some(Value::String(text)) => return Ok(text.clone()),
            Some(Value::Array(parts)) => parts,
            _ => return Err(self.invalid(field, "a string or a list of text parts")),
        };
        let mut texts = Vec::with_capacity(parts.len());
        for (idx, part) in parts.iter().enumerate() {
            let kind = part["type"].as_str().unwrap_or_default();
            match part["text"].as_str() {
                Some(text) if kinds.contains(&kind) => texts.push(text),
                _ => {
                    let expected = format!("a text part, not one of type `{kind}`");
                    return Err(self.invalid(&format!("{field}[{idx}]"), &expected));
                }
            }
        }
        Ok(texts.join("\n"))
    }
}
