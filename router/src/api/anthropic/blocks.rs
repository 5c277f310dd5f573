//! The blocks of a message's `content`: text, tool calls, tool results and reasoning.

use std::fmt;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Map, Value};
use text::parse_arguments;

use crate::api::conversation::ConversationBuilder;
use crate::api::exact_arguments::read_fields;
use crate::error::RouterError;

/// A text, or a list of blocks.
#[derive(Debug)]
pub(super) enum Content {
    Text(String),
    Blocks(Vec<Fields>),
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;
        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of blocks")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, blocks: A) -> Result<Content, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(blocks)).map(Content::Blocks)
            }
        }
        deserializer.deserialize_any(ContentVisitor)
    }
}

/// The fields of a block.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_fields(&["input"], "a block, which is an object", deserializer).map(Self)
    }
}

/// One block of a message.
struct Block<'a> {
    path: String,
    fields: &'a Fields,
}

impl Content {
    /// Joins the text of all blocks, for fields that allow only text.
    pub(super) fn into_text(self, path: &str) -> Result<String, RouterError> {
        self.join(path, |block| block.only_text())
    }

    /// Joins what `text_of` returns of each block.
    fn join(
        self,
        path: &str,
        text_of: impl Fn(&Block<'_>) -> Result<String, RouterError>,
    ) -> Result<String, RouterError> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Blocks(blocks) => {
                let text = |(idx, fields)| text_of(&Block { path: format!("{path}[{idx}]"), fields });
                Ok(blocks.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
            }
        }
    }

    /// Appends a message with this role to the conversation. Tool results precede the user's text, as
    /// templates expect.
    pub(super) fn read(
        self,
        path: &str,
        role: &str,
        builder: &mut ConversationBuilder,
    ) -> Result<(), RouterError> {
        let blocks = match self {
            Self::Text(text) => {
                builder.push_message(role, text);
                return Ok(());
            }
            Self::Blocks(blocks) => blocks,
        };
        let (mut texts, mut calls, mut has_results) = (Vec::new(), Vec::new(), false);
        for (idx, fields) in blocks.iter().enumerate() {
            let block = Block { path: format!("{path}[{idx}]"), fields };
            match (block.kind(), role) {
                ("tool_use", "assistant") => calls.push(block),
                ("thinking", "assistant") => builder.push_reasoning(block.text("thinking")?.to_owned()),
                // Encrypted by another provider, so useless to the models here.
                ("redacted_thinking", "assistant") => {}
                ("tool_result", "user") => {
                    has_results = true;
                    block.result(builder)?;
                }
                ("tool_use" | "thinking" | "redacted_thinking", _) => {
                    return Err(block.misplaced("assistant"));
                }
                ("tool_result", _) => return Err(block.misplaced("user")),
                _ => texts.push(block.only_text()?),
            }
        }
        if !texts.is_empty() || (calls.is_empty() && !has_results) {
            builder.push_message(role, texts.join("\n"));
        } else if !calls.is_empty() {
            builder.push_message(role, String::new());
        }
        calls.iter().try_for_each(|call| call.call(builder))
    }
}

impl Block<'_> {
    fn kind(&self) -> &str {
        self.fields.0.get("type").and_then(Value::as_str).unwrap_or_default()
    }

    fn only_text(&self) -> Result<String, RouterError> {
        match self.fields.0.get("text").and_then(Value::as_str) {
            Some(text) if self.kind() == "text" => Ok(text.to_owned()),
            _ => {
                let expected = format!("a text block, not one of type `{}`", self.kind());
                Err(RouterError::must_be(&self.path, expected))
            }
        }
    }

    /// The text of a block of a tool's result. A reference to a tool becomes the tool's name: the prompt
    /// describes the tool with all others of the request.
    fn result_text(&self) -> Result<String, RouterError> {
        if self.kind() == "tool_reference" {
            self.text("tool_name").map(str::to_owned)
        } else {
            self.only_text()
        }
    }

    fn misplaced(&self, role: &str) -> RouterError {
        let message =
            format!("{} of type `{}` is only allowed in messages of role {role}", self.path, self.kind());
        RouterError::invalid(&self.path, message)
    }

    fn text(&self, field: &str) -> Result<&str, RouterError> {
        let text = self.fields.0.get(field).and_then(Value::as_str);
        text.ok_or_else(|| RouterError::must_be(&format!("{}.{field}", self.path), "a string"))
    }

    fn call(&self, builder: &mut ConversationBuilder) -> Result<(), RouterError> {
        let path = format!("{}.input", self.path);
        let arguments = match self.fields.0.get("input") {
            Some(Value::Object(fields)) => Some(fields.clone().into()),
            // An object with an integer beyond 64 bits, which was read as text.
            Some(Value::String(json)) => parse_arguments(json).ok().filter(Value::is_string),
            _ => None,
        };
        let invalid = || RouterError::must_be(&path, "an object");
        builder.push_tool_call(self.text("id")?, self.text("name")?, arguments.ok_or_else(invalid)?);
        Ok(())
    }

    /// Appends a tool result. `is_error` is ignored: templates do not support it, so the text has to
    /// report the error.
    fn result(&self, builder: &mut ConversationBuilder) -> Result<(), RouterError> {
        let path = format!("{}.content", self.path);
        let content = self.fields.0.get("content").filter(|content| !content.is_null());
        let output = match content.map(Content::deserialize) {
            None => String::new(),
            Some(Ok(content)) => content.join(&path, |block| block.result_text())?,
            Some(Err(_)) => {
                return Err(RouterError::must_be(&path, "a string or a list of text blocks"));
            }
        };
        builder.push_tool_result(&format!("{}.tool_use_id", self.path), self.text("tool_use_id")?, output)
    }
}
