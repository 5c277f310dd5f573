//! Renders a conversation in the form that the model's chat template accepts. Some templates restrict
//! conversations more than the APIs do: Mistral's require short ids of tool calls, Llama 3's a single call
//! per message, and those of newer Qwen models allow messages of the system only at the beginning.

use std::borrow::Cow;

use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use text::{CONTINUE_FINAL_MESSAGE, ChatTemplate, ConversationMessage, ModelText, RenderedChat, TextError};

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
    let render_form = |form: &[ConversationMessage]| model.render_chat(template, form, template_kwargs);
    let reason = match render_form(&messages) {
        Err(TextError::Refused(reason)) => reason,
        result => return result,
    };
    // The template may refuse several calls in one message, messages of the system behind others, or both.
    let is_continued = template_kwargs.get(CONTINUE_FINAL_MESSAGE) == Some(&Value::Bool(true));
    let single_calls = || with_single_calls(&messages);
    let system_first = || with_system_first(&messages, is_continued);
    let both = || with_single_calls(&system_first()?);
    let forms: [&dyn Fn() -> Option<Vec<ConversationMessage>>; 3] = [&single_calls, &system_first, &both];
    for form in forms {
        match form().map(|form| render_form(&form)) {
            Some(Ok(rendered)) => return Ok(rendered),
            // The other forms would take as long.
            Some(Err(error @ TextError::TooLong(_))) => return Err(error),
            Some(Err(_)) | None => {}
        }
    }
    Err(TextError::Refused(reason))
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

/// Joins the messages of the system to one at the beginning; `None` if there is none behind another message,
/// or if the model continues one of them.
fn with_system_first(
    messages: &[ConversationMessage],
    is_continued: bool,
) -> Option<Vec<ConversationMessage>> {
    let is_system = |message: &ConversationMessage| message.role == "system";
    if !messages.iter().skip(1).any(is_system) || (is_continued && messages.last().is_some_and(is_system)) {
        return None;
    }
    let (system, others): (Vec<_>, Vec<_>) = messages.iter().partition(|message| is_system(message));
    let texts: Vec<&str> = system.into_iter().map(ConversationMessage::text).collect();
    let first = ConversationMessage::new("system", texts.join("\n\n"));
    Some(std::iter::once(first).chain(others.into_iter().cloned()).collect())
}

/// Splits messages with several calls; `None` if there are none.
fn with_single_calls(messages: &[ConversationMessage]) -> Option<Vec<ConversationMessage>> {
    if messages.iter().all(|message| message.tool_calls.len() < 2) {
        return None;
    }
    let mut split = Vec::new();
    let mut rest = messages;
    while let Some((message, after)) = rest.split_first() {
        rest = after;
        if message.tool_calls.len() < 2 {
            split.push(message.clone());
            continue;
        }
        let num_results = after.iter().take_while(|message| message.role == "tool").count();
        let (results, after) = after.split_at(num_results);
        split_calls(message, results, &mut split);
        rest = after;
    }
    Some(split)
}

/// Appends one message for each call, followed by the results of that call. The first of them has the text
/// and the reasoning. Results of no call come last.
fn split_calls(
    message: &ConversationMessage,
    results: &[ConversationMessage],
    split: &mut Vec<ConversationMessage>,
) {
    let mut results: Vec<&ConversationMessage> = results.iter().collect();
    for (idx, call) in message.tool_calls.iter().enumerate() {
        let (content, reasoning_content) = match idx {
            0 => (message.content.clone(), message.reasoning_content.clone()),
            _ => (message.content.as_ref().map(|_| String::new()), None),
        };
        // Field by field: a copy of the message would copy all of its calls.
        split.push(ConversationMessage {
            role: message.role.clone(),
            content,
            name: message.name.clone(),
            reasoning_content,
            tool_calls: vec![call.clone()],
            tool_call_id: message.tool_call_id.clone(),
        });
        let is_own = |result: &&ConversationMessage| {
            result.tool_call_id.is_some() && result.tool_call_id.as_deref() == call["id"].as_str()
        };
        let (own, others): (Vec<_>, Vec<_>) = results.into_iter().partition(is_own);
        split.extend(own.into_iter().cloned());
        results = others;
    }
    split.extend(results.into_iter().cloned());
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::demo;
    use super::*;

    /// Each rendering that takes too long blocks other prompts for seconds.
    #[test]
    fn no_other_form_is_tried_after_a_rendering_that_took_too_long() {
        let source = "{% for m in messages if m.tool_calls | length > 1 %}\
            {{ raise_exception('a single call') }}{% endfor %}{% if messages[0].role != 'system' %}\
            {% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}{% endif %}fine";
        let (model, template) = (demo(), ChatTemplate::compile(source, "", "").unwrap());
        let call = |id: &str| json!({ "id": id, "function": { "name": "f", "arguments": {} } });
        let mut calls = ConversationMessage::new("assistant", "I look".to_owned());
        calls.tool_calls = vec![call("1"), call("2")];
        let system = ConversationMessage::new("system", "Be brief".to_owned());
        let user = ConversationMessage::new("user", "Hi".to_owned());
        let render = |messages: &[ConversationMessage]| render(&model, &template, messages, &Map::new());
        // Both changes together make a form that the template accepts.
        let fine = render(&[system.clone(), user.clone(), calls.clone()]).unwrap();
        assert_eq!(fine.text, "fine");
        let tried = render(&[user, system, calls]);
        assert!(matches!(tried, Err(TextError::TooLong(_))), "{tried:?}");
    }

    /// A body has room for 30,000 calls; copying all of them once for each would take minutes.
    #[test]
    fn a_message_with_many_calls_is_split_in_linear_time() {
        let num_calls = 30_000;
        let call =
            |idx: usize| json!({ "id": idx.to_string(), "function": { "name": "f", "arguments": {} } });
        let mut message = ConversationMessage::new("assistant", "I look".to_owned());
        message.reasoning_content = Some("hm".to_owned());
        message.tool_calls = (0..num_calls).map(call).collect();
        let mut result = ConversationMessage::new("tool", "sun".to_owned());
        result.tool_call_id = Some("1".to_owned());
        let split = with_single_calls(&[message, result.clone()]).unwrap();
        assert_eq!(split.len(), num_calls + 1);
        assert_eq!((split[0].text(), split[0].reasoning_content.as_deref()), ("I look", Some("hm")));
        assert_eq!((split[1].text(), &split[1].reasoning_content), ("", &None));
        assert_eq!(split[2], result, "it follows its call");
        assert!(split.iter().all(|message| message.role == "tool" || message.tool_calls.len() == 1));
        assert_eq!(split[num_calls].tool_calls[0]["id"], (num_calls - 1).to_string());
    }
}
