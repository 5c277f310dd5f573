//! Checks prompts: texts, token ids and conversations.

use serde_json::Map;
use text::{ConversationMessage, fields_of_json_arguments};

use super::bounds::at_most;
use super::check::{checked_token_ids, is_name};
use super::json_values::ValueCount;
use super::limits;
use super::raw::RawPrompt;
use crate::catalog::ModelEntry;
use crate::error::RouterError;
use crate::tokenize::Prompt;

/// Allowed roles of a message; templates write a role into the prompt verbatim.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

impl RawPrompt {
    /// Checks a prompt that is a whole request by itself; `path` names it in messages.
    pub fn check(self, path: &str, entry: &ModelEntry) -> Result<Prompt, RouterError> {
        self.count_values(path, &mut ValueCount::default())?;
        self.into_checked(path, entry)
    }

    /// Counts the JSON values of calls and of template variables; `path` names the messages.
    pub(super) fn count_values(&self, path: &str, count: &mut ValueCount) -> Result<(), RouterError> {
        let Self::Chat { messages, template_kwargs } = self else { return Ok(()) };
        for (name, value) in template_kwargs {
            // The APIs set this variable from their field of the same name.
            let field = if name == "tools" { "tools" } else { "chat_template_kwargs" };
            count.add(field, [value])?;
        }
        messages.iter().flat_map(|message| &message.tool_calls).try_for_each(|call| {
            count.add(path, [call])?;
            // They become values when the template is rendered.
            count.add(path, fields_of_json_arguments(call).iter().flat_map(Map::values))
        })
    }

    /// Checks a prompt; `path` names it in messages. Its JSON values are not counted.
    pub(super) fn into_checked(self, path: &str, entry: &ModelEntry) -> Result<Prompt, RouterError> {
        let empty = || RouterError::invalid(path, format!("{path} must not be empty"));
        match self {
            Self::Text { text, .. } if text.is_empty() => Err(empty()),
            Self::Text { text, framing } => Ok(Prompt::Text { text, framing }),
            Self::TokenIds(ids) if ids.is_empty() => Err(empty()),
            Self::TokenIds(ids) => Ok(Prompt::TokenIds(checked_token_ids(path, &ids, entry)?)),
            Self::Chat { messages, .. } if messages.is_empty() => Err(empty()),
            Self::Chat { messages, template_kwargs } => {
                let messages = checked_messages(path, messages)?;
                Ok(Prompt::Chat { messages, template_kwargs })
            }
        }
    }
}

fn checked_messages(
    path: &str,
    mut messages: Vec<ConversationMessage>,
) -> Result<Vec<ConversationMessage>, RouterError> {
    at_most(path, messages.len(), "messages", limits::MESSAGES_MAX)?;
    for (idx, message) in messages.iter_mut().enumerate() {
        // Templates expect the older name of this role.
        if message.role == "developer" {
            message.role = "system".to_owned();
        }
        let role = message.role.as_str();
        if !ROLES.contains(&role) {
            let known = ["system", "developer", "user", "assistant", "tool"];
            return Err(RouterError::not_one_of(&format!("{path}[{idx}].role"), &known, role));
        }
        let max = limits::NAME_LEN_MAX;
        if message.name.as_ref().is_some_and(|name| !is_name(name, max)) {
            let param = format!("{path}[{idx}].name");
            let message = format!("{param} must have 1 to {max} of the characters A-Z a-z 0-9 _ . -");
            return Err(RouterError::invalid(param, message));
        }
    }
    Ok(messages)
}
