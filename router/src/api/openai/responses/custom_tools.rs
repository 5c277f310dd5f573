//! Custom tools: their input is a text, not JSON. Chat templates describe only functions, so the model gets a
//! function with the text as its one argument, and answers contain the text again.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::RouterError;
use crate::request::tools::ToolChoice;

/// Type of these tools.
pub(super) const TYPE: &str = "custom";

/// Arguments of the function.
#[derive(Deserialize)]
struct Arguments {
    input: String,
}

/// Returns the function for the custom tool at this path. A grammar of the input becomes part of the
/// description: with `tool_choice` auto no arguments are constrained, and within JSON a text cannot be.
pub(super) fn as_function(path: &str, mut tool: Value, choice: &ToolChoice) -> Result<Value, RouterError> {
    let path = format!("{path}.format");
    let grammar = read_format(&path, &tool["format"])?;
    let is_allowed = tool["name"].as_str().is_some_and(|name| choice.allows(name));
    if grammar.is_some() && choice.is_required() && is_allowed {
        let message =
            format!("{path}: the grammar of a required call is not supported: set tool_choice to auto");
        return Err(RouterError::invalid(path, message));
    }
    let description = match &tool["description"] {
        Value::Null => Some(""),
        Value::String(text) => Some(text.as_str()),
        // Refused with all other tools.
        _ => None,
    };
    if let (Some(grammar), Some(description)) = (grammar, description) {
        let described = format!("{description}\n\n{grammar}");
        tool["description"] = json!(described.trim_start());
    }
    tool["type"] = json!("function");
    tool["parameters"] = json!({
        "type": "object",
        "properties": { "input": { "type": "string" } },
        "required": ["input"],
        "additionalProperties": false
    });
    Ok(tool)
}

/// Reads the format of the input; returns a description of its grammar, if it has one.
fn read_format(path: &str, format: &Value) -> Result<Option<String>, RouterError> {
    let invalid =
        |field: &str, expected: &str| Err(RouterError::must_be(&format!("{path}{field}"), expected));
    if format.is_null() {
        return Ok(None);
    }
    match format["type"].as_str() {
        Some("text") => return Ok(None),
        Some("grammar") => {}
        _ => return invalid(".type", "text or grammar"),
    }
    let syntax = match format["syntax"].as_str() {
        Some("lark") => "Lark grammar",
        Some("regex") => "regular expression",
        _ => return invalid(".syntax", "lark or regex"),
    };
    match format["definition"].as_str() {
        Some(definition) => Ok(Some(format!("The input must match this {syntax}:\n{definition}"))),
        None => invalid(".definition", "a string"),
    }
}

/// The arguments that stand for an input.
pub(super) fn arguments_of(input: &str) -> Map<String, Value> {
    Map::from_iter([("input".to_owned(), json!(input))])
}

/// The input that a call's arguments stand for. Arguments of another form, or cut off, are returned as they
/// are, so that the tool can say what is wrong.
pub(super) fn input_of(arguments: &str) -> String {
    match serde_json::from_str(arguments) {
        Ok(Arguments { input }) => input,
        Err(_) => arguments.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_survives_its_arguments() {
        for input in ["", "*** Begin Patch\n+\"a\" \\ \u{20ac}\n"] {
            assert_eq!(input_of(&Value::Object(arguments_of(input)).to_string()), input);
        }
        for arguments in ["{}", r#"{"patch":"x"}"#, r#"{"input":5}"#, r#"{"input":"cut"#] {
            assert_eq!(input_of(arguments), arguments);
        }
    }
}
