//! Tool calls in chat completions: those that a client sends back, and those in answers.

use serde::Serialize;
use serde_json::{Value, json};

use crate::api::functions::{call_id, parse_arguments};
use crate::error::RouterError;
use crate::output::{OutputFormat, OutputParser, Piece, ToolCall};
use crate::pipeline::text_delta::ResponseInfo;

/// Reads an assistant's earlier calls for the template, with their arguments as objects.
pub(super) fn parse_earlier_calls(path: &str, calls: Vec<Value>) -> Result<Vec<Value>, RouterError> {
    let parse = |(idx, mut call): (usize, Value)| {
        if !call["function"]["name"].is_string() {
            let path = format!("{path}[{idx}].function.name");
            return Err(RouterError::invalid(&path, format!("{path} must be a string")));
        }
        let arguments =
            parse_arguments(&format!("{path}[{idx}].function.arguments"), &call["function"]["arguments"])?;
        call["function"]["arguments"] = Value::Object(arguments);
        // Added by openai-python's parser; templates that write the whole function would show it.
        if let Value::Object(function) = &mut call["function"] {
            function.shift_remove("parsed_arguments");
        }
        if call.get("type").is_none() {
            call["type"] = json!("function");
        }
        Ok(call)
    };
    calls.into_iter().enumerate().map(parse).collect()
}

/// A call in an answer, or part of one in a chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolCallBody {
    /// Only in chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    /// Only in a call's first chunk, and in whole answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionBody,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct FunctionBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// Parses the output of one choice.
#[derive(Debug)]
pub(super) struct ChoiceParser {
    parser: OutputParser,
    /// Used for the ids of the choice's calls.
    response_id: String,
    choice: u32,
    num_calls: u32,
}

/// What a piece of output adds to a choice's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MessageDelta {
    Content(String),
    Reasoning(String),
    Call(ToolCallBody),
}

impl ChoiceParser {
    /// One reader per choice; empty if the format is plain.
    pub(super) fn all(info: &ResponseInfo) -> Vec<Self> {
        let format: &OutputFormat = &info.output;
        if format.is_plain() {
            return Vec::new();
        }
        let parser = |choice| Self {
            parser: OutputParser::new(format),
            response_id: info.id.clone(),
            choice,
            num_calls: 0,
        };
        (0..info.num_choices).map(parser).collect()
    }

    /// Whether the choice contains a call.
    pub(super) fn has_calls(&self) -> bool {
        self.num_calls > 0
    }

    /// Appends text; at the end of the choice withheld text is added.
    pub(super) fn push(&mut self, text: &str, is_end: bool) -> Vec<MessageDelta> {
        let mut pieces = self.parser.push(text);
        if is_end {
            pieces.extend(self.parser.finish());
        }
        crate::output::merge_adjacent(pieces).into_iter().map(|piece| self.message_delta(piece)).collect()
    }

    fn message_delta(&mut self, piece: Piece) -> MessageDelta {
        match piece {
            Piece::Content(text) => MessageDelta::Content(text),
            Piece::Reasoning(text) => MessageDelta::Reasoning(text),
            Piece::Call(ToolCall { name, arguments }) => {
                let index = self.num_calls;
                self.num_calls += 1;
                MessageDelta::Call(ToolCallBody {
                    index: Some(index),
                    id: Some(call_id("call_", &self.response_id, self.choice, index)),
                    r#type: Some("function"),
                    function: FunctionBody { name: Some(name), arguments },
                })
            }
            Piece::Arguments(arguments) => MessageDelta::Call(ToolCallBody {
                index: Some(self.num_calls.saturating_sub(1)),
                id: None,
                r#type: None,
                function: FunctionBody { name: None, arguments },
            }),
        }
    }
}

/// Content of a choice's complete message.
#[derive(Debug, Default)]
pub(super) struct MessageParts {
    pub(super) content: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<ToolCallBody>,
}

impl MessageParts {
    pub(super) fn from_deltas(deltas: Vec<MessageDelta>) -> Self {
        let mut parts = Self::default();
        for delta in deltas {
            match delta {
                MessageDelta::Content(text) => parts.content.push_str(&text),
                MessageDelta::Reasoning(text) => parts.reasoning.push_str(&text),
                MessageDelta::Call(call) if call.id.is_some() => {
                    parts.calls.push(ToolCallBody { index: None, ..call });
                }
                MessageDelta::Call(more) => {
                    if let Some(call) = parts.calls.last_mut() {
                        call.function.arguments.push_str(&more.function.arguments);
                    }
                }
            }
        }
        parts
    }
}
