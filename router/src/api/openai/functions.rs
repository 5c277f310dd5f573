//! The older form of tools in chat completions: `functions` and `function_call` of a request, `function_call`
//! in a message, and messages of role function. Each becomes its newer form.

use serde_json::{Value, json};

use super::message::Message;
use super::shapes::Content;
use crate::api::disabled::is_disabled;
use crate::api::exact_arguments::{FlatCall, NestedCall};
use crate::api::functions::parse_arguments;
use crate::error::RouterError;
use crate::request::tools::ToolChoice;

/// Field of a request and of a message.
const FUNCTION_CALL: &str = "function_call";

/// Reads `function_call` of a request.
pub(super) fn parse_choice(choice: Option<&Value>) -> Result<ToolChoice, RouterError> {
    let Some(choice) = choice else { return Ok(ToolChoice::default()) };
    match choice["name"].as_str() {
        Some(name) => Ok(ToolChoice::Named(name.to_owned())),
        None if choice == "none" => Ok(ToolChoice::None),
        None if is_disabled(FUNCTION_CALL, choice) => Ok(ToolChoice::default()),
        None => Err(RouterError::must_be(FUNCTION_CALL, r#"one of none, auto, or {"name": ..}"#)),
    }
}

/// The calls of a conversation that are written in the older form, which have no ids.
#[derive(Debug, Default)]
pub(super) struct FunctionCalls {
    /// Id given to the latest call.
    last_id: Option<String>,
}

impl FunctionCalls {
    /// Rewrites a message that has this form.
    pub(super) fn rewrite(&mut self, idx: usize, message: &mut Message) -> Result<(), RouterError> {
        let call = message.function_call.take().map(|FlatCall(call)| call);
        if let Some(call) = call.filter(|call| !is_disabled(FUNCTION_CALL, call)) {
            let id = format!("call_{idx}");
            let call = json!({ "id": id, "type": "function", "function": read_call(idx, message, call)? });
            message.tool_calls = Some(vec![NestedCall(call)]);
            self.last_id = Some(id);
        }
        if message.role == "function" {
            let Some(id) = &self.last_id else {
                let path = format!("messages[{idx}].role");
                let reason = format!("{path} is function, but no earlier message has a {FUNCTION_CALL}");
                return Err(RouterError::invalid(path, reason));
            };
            message.role = "tool".to_owned();
            message.tool_call_id = Some(id.clone());
            // A function may return nothing.
            message.content.get_or_insert_with(|| Content(String::new()));
        }
        Ok(())
    }
}

/// Checks a message's call; returns it with its arguments as a conversation has them.
fn read_call(idx: usize, message: &Message, mut call: Value) -> Result<Value, RouterError> {
    let path = format!("messages[{idx}].{FUNCTION_CALL}");
    let invalid = |path: &str, why: &str| Err(RouterError::invalid(path, format!("{path} {why}")));
    if message.role != "assistant" {
        return invalid(&path, "is only allowed in messages of role assistant");
    }
    if message.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty()) {
        return invalid(&path, "cannot be combined with tool_calls: send one of them");
    }
    if !call["name"].is_string() {
        return invalid(&format!("{path}.name"), "must be a string");
    }
    call["arguments"] = parse_arguments(&format!("{path}.arguments"), &call["arguments"])?;
    Ok(call)
}
