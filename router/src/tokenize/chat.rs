//! Renders a conversation in the form that the model's chat template accepts. Mistral's templates
//! require short ids of tool calls.

use std::borrow::Cow;

use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use text::{ChatTemplate, ConversationMessage, ModelText, RenderedChat, TextError};

/// Part of the message with which Mistral's templates refuse other ids.
const SHORT_IDS_ONLY: &str = "alphanumeric strings with length 9";
/// Length of the ids that these templates accept.
const SHORT_ID_LEN: usize = 9;
const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Renders a conversation.
pub(super) fn render(
    model: &ModelText,
    template: &ChatTemplate,
    messages: &[ConversationMessage],
    template_kwargs: &Map<String, Value>,
) -> Result<RenderedChat, TextError> {
    let mut messages = Cow::Borrowed(messages);
    if template.source().contains(SHORT_IDS_ONLY) {
        shorten_ids(messages.to_mut());
    }
    model.render_chat(template, &messages, template_kwargs)
}

/// Replaces the ids of calls and of their results.
fn shorten_ids(messages: &mut [ConversationMessage]) {
    for message in messages {
        for call in &mut message.tool_calls {
            if let Some(Value::String(id)) = call.get_mut("id") {
                *id = short_id(id);
            }
        }
        message.tool_call_id = message.tool_call_id.as_deref().map(short_id);
    }
}

/// Returns an id that these templates accept. Equal ids have equal short ids.
fn short_id(id: &str) -> String {
    if id.len() == SHORT_ID_LEN && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    let hash = Sha256::digest(id);
    let mut rest = u64::from_le_bytes(hash[..8].try_into().expect("a hash has 32 bytes"));
    let mut digit = || {
        let digit = DIGITS[(rest % 62) as usize];
        rest /= 62;
        char::from(digit)
    };
    (0..SHORT_ID_LEN).map(|_| digit()).collect()
}
