//! A last message that the model continues, as transformers' `continue_final_message` does: the rendered
//! conversation ends with the text of that message instead of the beginning of another one.

use serde_json::{Map, Value};

use super::ConversationMessage;
use crate::TextError;

/// Variable by which a conversation requests this.
pub const CONTINUE_FINAL_MESSAGE: &str = "continue_final_message";

/// Marks the end of the message in the rendered text, as in transformers. Its last space shows whether the
/// template trims the message.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Whether the variables request it.
pub(crate) fn is_requested(variables: &Map<String, Value>) -> bool {
    variables.get(CONTINUE_FINAL_MESSAGE) == Some(&Value::Bool(true))
}

/// Marks the end of the last message.
pub(crate) fn mark_end(messages: &mut [ConversationMessage]) -> Result<(), TextError> {
    let last = messages.last_mut().filter(|last| last.tool_calls.is_empty());
    match last.and_then(|last| last.content.as_mut()) {
        Some(content) => {
            content.push_str(TAG);
            Ok(())
        }
        None => {
            let message = "only a last message with content and without tool calls can be continued";
            Err(TextError::Refused(message.into()))
        }
    }
}

/// Returns the rendered text up to the mark.
pub(crate) fn cut_at_end(rendered: &str) -> Result<&str, TextError> {
    let end = rendered.rfind(TAG.trim_end()).ok_or_else(|| {
        let message = "the model's chat template leaves out the end of the last message, so that it cannot be \
                       continued";
        TextError::Refused(message.into())
    })?;
    let (text, rest) = rendered.split_at(end);
    Ok(if rest.starts_with(TAG) { text } else { text.trim_end() })
}
