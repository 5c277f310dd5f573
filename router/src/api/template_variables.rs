//! Variables of the chat template: those that clients set, and fields that are passed to it as variables.

use serde_json::{Map, Value};
use text::{ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE};

use crate::error::RouterError;

/// Variables of a chat template that only the router sets, besides `tools`.
pub(super) const OWN_VARIABLES: [&str; 6] =
    ["messages", ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE, "bos_token", "eos_token", "documents"];

/// Refuses variables of the chat template that have one of these names; `field` contains them.
pub(super) fn refuse_variables(
    field: &str,
    variables: &Map<String, Value>,
    names: &[&str],
) -> Result<(), RouterError> {
    let is_default = |name: &str, value: &Value| match value {
        Value::Null => true,
        Value::Bool(true) => name == ADD_GENERATION_PROMPT,
        Value::Bool(false) => name == CONTINUE_FINAL_MESSAGE,
        Value::Array(items) => name != "messages" && items.is_empty(),
        _ => false,
    };
    let is_refused =
        |(name, value): &(&String, &Value)| names.contains(&name.as_str()) && !is_default(name, value);
    match variables.iter().find(is_refused) {
        None => Ok(()),
        Some((name, _)) => {
            let path = format!("{field}.{name}");
            let message = format!("{path} is a variable that this server sets: leave it out");
            Err(RouterError::invalid(path, message))
        }
    }
}

/// Checks `chat_template_kwargs`.
pub(super) fn checked_variables(
    variables: Option<Map<String, Value>>,
) -> Result<Map<String, Value>, RouterError> {
    let (field, variables) = ("chat_template_kwargs", variables.unwrap_or_default());
    refuse_variables(field, &variables, &OWN_VARIABLES)?;
    refuse_variables(field, &variables, &["tools"])?;
    Ok(variables)
}

/// Passes the requested effort of reasoning to the chat template, in the variable that vLLM uses for it. A
/// value that the client sets as a variable of the template is kept.
pub(super) fn set_reasoning_effort(variables: &mut Map<String, Value>, effort: Option<String>) {
    if let Some(effort) = effort.filter(|effort| !effort.is_empty()) {
        variables.entry("reasoning_effort").or_insert(Value::String(effort));
    }
}

/// Fields by which a request chooses how the prompt of its conversation ends, as in vLLM.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PromptEnd {
    /// False: the prompt does not begin the assistant's next message.
    pub(super) add_generation_prompt: Option<bool>,
    /// True: the prompt ends with the last message, which the model continues.
    pub(super) continue_final_message: Option<bool>,
}

impl PromptEnd {
    /// Passes the choice on, in the variables that stand for it.
    pub(super) fn set(self, variables: &mut Map<String, Value>) -> Result<(), RouterError> {
        let continues = self.continue_final_message == Some(true);
        if continues && self.add_generation_prompt == Some(true) {
            let message = format!(
                "{CONTINUE_FINAL_MESSAGE} cannot be combined with {ADD_GENERATION_PROMPT}: set one of them to false"
            );
            return Err(RouterError::invalid(CONTINUE_FINAL_MESSAGE, message));
        }
        if continues {
            variables.insert(CONTINUE_FINAL_MESSAGE.to_owned(), Value::Bool(true));
        }
        if self.add_generation_prompt == Some(false) {
            variables.insert(ADD_GENERATION_PROMPT.to_owned(), Value::Bool(false));
        }
        Ok(())
    }
}
