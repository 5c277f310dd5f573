//! Tool calls in chat completions: those that a client sends back, and those in answers, in the newer field
//! `tool_calls` or the older `function_call`.

use serde::Serialize;
use serde_json::{Value, json};
use speculation::FinishReason;

use crate::api::exact_arguments::NestedCall;
use crate::api::functions::parse_arguments;
use crate::error::RouterError;
use crate::output::ToolCall;

/// The field of an answer that contains calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CallField {
    /// `tool_calls`.
    #[default]
    ToolCalls,
    /// `function_call`, with the only call, for requests with `functions`.
    FunctionCall,
}

impl CallField {
    /// Finish reason of a choice that may contain calls.
    pub(super) fn finish_reason(self, reason: FinishReason, has_calls: bool) -> &'static str {
        match self {
            _ if !has_calls || reason != FinishReason::Stop => reason.as_str(),
            Self::ToolCalls => "tool_calls",
            Self::FunctionCall => "function_call",
        }
    }
}

/// Reads an assistant's earlier calls for the template.
pub(super) fn parse_earlier_calls(path: &str, calls: Vec<NestedCall>) -> Result<Vec<Value>, RouterError> {
    let parse = |(idx, NestedCall(mut call)): (usize, NestedCall)| {
        if !call["function"]["name"].is_string() {
            return Err(RouterError::must_be(&format!("{path}[{idx}].function.name"), "a string"));
        }
        let arguments =
            parse_arguments(&format!("{path}[{idx}].function.arguments"), &call["function"]["arguments"])?;
        call["function"]["arguments"] = arguments;
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

/// The function that is called; the whole call in `function_call`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FunctionBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl ToolCallBody {
    /// The first chunk of a call, with the arguments known so far.
    pub(super) fn started(id: String, index: u32, call: ToolCall) -> Self {
        Self { index: Some(index), ..Self::whole(id, call) }
    }

    /// A later chunk of a call.
    pub(super) fn continued(index: u32, arguments: String) -> Self {
        let function = FunctionBody::continued(arguments);
        Self { index: Some(index), id: None, r#type: None, function }
    }

    /// A complete call.
    pub(super) fn whole(id: String, call: ToolCall) -> Self {
        Self { index: None, id: Some(id), r#type: Some("function"), function: call.into() }
    }

    /// The function alone.
    pub(super) fn into_function(self) -> FunctionBody {
        self.function
    }
}

impl FunctionBody {
    /// More arguments, in a later chunk.
    pub(super) fn continued(arguments: String) -> Self {
        Self { name: None, arguments }
    }
}

impl From<ToolCall> for FunctionBody {
    fn from(ToolCall { name, arguments }: ToolCall) -> Self {
        Self { name: Some(name), arguments }
    }
}
