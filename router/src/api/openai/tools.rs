//! Tools as OpenAI writes them: what a request says of them, and calls in answers.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::error::RouterError;
use crate::output::{OutputFormat, OutputReader, Piece, ToolCall};
use crate::pipeline::text_stream::ResponseInfo;
use crate::request::tools::{SentTools, Tool, ToolChoice};

/// `tools`, `tool_choice` and `parallel_tool_calls`.
pub(super) fn sent_tools(
    tools: Option<&[Value]>,
    choice: Option<&Value>,
    parallel: Option<bool>,
) -> Result<SentTools, RouterError> {
    let tools = tools.unwrap_or_default();
    let choice = match choice {
        None | Some(Value::Null) => ToolChoice::Auto,
        Some(choice) => sent_choice(choice)?,
    };
    let tools: Result<Vec<Tool>, RouterError> =
        tools.iter().enumerate().map(|(idx, tool)| sent_tool(idx, tool)).collect();
    Ok(SentTools { tools: tools?, choice, parallel: parallel.unwrap_or(true) })
}

fn sent_tool(idx: usize, tool: &Value) -> Result<Tool, RouterError> {
    let wrong = |path: &str, expected: &str| {
        let path = format!("tools[{idx}]{path}");
        let message = format!("{path} must be {expected}");
        RouterError::invalid(path, message)
    };
    if tool["type"] != "function" {
        return Err(wrong(".type", "`function`: other tools are not supported"));
    }
    let function = tool["function"].as_object().ok_or_else(|| wrong(".function", "an object"))?;
    let name = function.get("name").and_then(Value::as_str);
    let name = name.ok_or_else(|| wrong(".function.name", "a string"))?.to_owned();
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => None,
        Some(Value::Object(schema)) => Some(schema.clone()),
        Some(_) => return Err(wrong(".function.parameters", "a JSON schema: an object")),
    };
    if !function.get("description").is_none_or(|text| text.is_string() || text.is_null()) {
        return Err(wrong(".function.description", "a string"));
    }
    Ok(Tool { name, parameters })
}

fn sent_choice(choice: &Value) -> Result<ToolChoice, RouterError> {
    match choice {
        Value::String(word) if word == "none" => Ok(ToolChoice::None),
        Value::String(word) if word == "auto" => Ok(ToolChoice::Auto),
        Value::String(word) if word == "required" => Ok(ToolChoice::Required),
        Value::Object(named) if named.get("type").is_some_and(|kind| kind == "function") => {
            let name = choice["function"]["name"].as_str().ok_or_else(|| {
                let path = "tool_choice.function.name";
                RouterError::invalid(path, format!("{path} must be a string"))
            })?;
            Ok(ToolChoice::Named(name.to_owned()))
        }
        _ => {
            let expected = r#"none, auto, required, or {"type": "function", "function": {"name": ..}}"#;
            Err(RouterError::invalid("tool_choice", format!("tool_choice must be one of {expected}")))
        }
    }
}

/// An assistant's earlier calls, as templates read them: with their arguments as an object.
pub(super) fn earlier_calls(path: &str, calls: Vec<Value>) -> Result<Vec<Value>, RouterError> {
    let read = |(idx, mut call): (usize, Value)| {
        let wrong = |field: &str, expected: &str| {
            let path = format!("{path}[{idx}].{field}");
            let message = format!("{path} must be {expected}");
            RouterError::invalid(path, message)
        };
        if !call["function"]["name"].is_string() {
            return Err(wrong("function.name", "a string"));
        }
        let arguments = match &call["function"]["arguments"] {
            Value::Null => Some(Map::new()),
            Value::String(text) if text.is_empty() => Some(Map::new()),
            Value::String(text) => serde_json::from_str(text).ok(),
            Value::Object(arguments) => Some(arguments.clone()),
            _ => None,
        };
        let expected = "a JSON object, written as a string";
        let arguments = arguments.ok_or_else(|| wrong("function.arguments", expected))?;
        call["function"]["arguments"] = Value::Object(arguments);
        if call.get("type").is_none() {
            call["type"] = json!("function");
        }
        Ok(call)
    };
    calls.into_iter().enumerate().map(read).collect()
}

/// A call in an answer, or a part of one in a chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolCallBody {
    /// In chunks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    /// In a chunk that begins a call, and in whole answers.
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

/// What a choice is made of, as far as it was read.
#[derive(Debug)]
pub(super) struct ChoiceReader {
    reader: OutputReader,
    /// Begins the ids of the choice's calls.
    id: String,
    num_calls: u32,
}

/// What a piece adds to a choice's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Addition {
    Content(String),
    Reasoning(String),
    Call(ToolCallBody),
}

impl ChoiceReader {
    /// One for each choice; none where the format is plain.
    pub(super) fn all(info: &ResponseInfo) -> Vec<Self> {
        let format: &OutputFormat = &info.output;
        if format.is_plain() {
            return Vec::new();
        }
        let unique = info.id.rsplit('-').next().unwrap_or_default();
        let reader = |choice| Self {
            reader: OutputReader::new(format),
            id: format!("call_{unique}_{choice}"),
            num_calls: 0,
        };
        (0..info.num_choices).map(reader).collect()
    }

    /// Whether the choice has made a call.
    pub(super) fn has_calls(&self) -> bool {
        self.num_calls > 0
    }

    /// Reads on; at the choice's end what was held back too.
    pub(super) fn read(&mut self, text: &str, is_end: bool) -> Vec<Addition> {
        let mut pieces = self.reader.push(text);
        if is_end {
            pieces.extend(self.reader.finish());
        }
        crate::output::joined(pieces).into_iter().map(|piece| self.addition(piece)).collect()
    }

    fn addition(&mut self, piece: Piece) -> Addition {
        match piece {
            Piece::Content(text) => Addition::Content(text),
            Piece::Reasoning(text) => Addition::Reasoning(text),
            Piece::Call(ToolCall { name, arguments }) => {
                let index = self.num_calls;
                self.num_calls += 1;
                Addition::Call(ToolCallBody {
                    index: Some(index),
                    id: Some(format!("{}_{index}", self.id)),
                    r#type: Some("function"),
                    function: FunctionBody { name: Some(name), arguments },
                })
            }
            Piece::Arguments(arguments) => Addition::Call(ToolCallBody {
                index: Some(self.num_calls.saturating_sub(1)),
                id: None,
                r#type: None,
                function: FunctionBody { name: None, arguments },
            }),
        }
    }
}

/// What a choice's message holds, once it is complete.
#[derive(Debug, Default)]
pub(super) struct MessageParts {
    pub(super) content: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<ToolCallBody>,
}

impl MessageParts {
    pub(super) fn of(additions: Vec<Addition>) -> Self {
        let mut parts = Self::default();
        for addition in additions {
            match addition {
                Addition::Content(text) => parts.content.push_str(&text),
                Addition::Reasoning(text) => parts.reasoning.push_str(&text),
                Addition::Call(call) if call.id.is_some() => {
                    parts.calls.push(ToolCallBody { index: None, ..call });
                }
                Addition::Call(more) => {
                    if let Some(call) = parts.calls.last_mut() {
                        call.function.arguments.push_str(&more.function.arguments);
                    }
                }
            }
        }
        parts
    }
}
