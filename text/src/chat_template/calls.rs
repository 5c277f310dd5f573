//! Conversations in which an assistant's message has tool calls. If it has no content, the client sent null,
//! and templates distinguish null from an empty text; but some fail on null, or write it as a word. The
//! arguments of calls are objects; but some templates append them to a text, which fails.

use std::collections::HashSet;

use aho_corasick::AhoCorasick;
use serde_json::{Map, Value};

use super::{ChatTemplate, ConversationMessage, large_integers};
use crate::TextError;

/// Python's spelling of null in a text.
const NULL_WORD: &str = "None";

impl ChatTemplate {
    /// Renders a conversation. Arguments of calls are passed as objects, or as JSON texts if the template
    /// fails on objects (DeepSeek's), except by running for too long.
    pub(crate) fn render_calls(
        &self,
        messages: &[ConversationMessage],
        extra: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let with_objects = self.render_content(messages, extra, large_integers::with_objects);
        if !matches!(with_objects, Err(TextError::Conversation(_))) {
            return with_objects;
        }
        match with_arguments_as_text(messages) {
            Some(with_texts) => {
                self.render_content(&with_texts, extra, large_integers::as_they_are).or(with_objects)
            }
            None => with_objects,
        }
    }

    /// Renders a conversation, whose messages `to_values` converts. Content that is null is passed as null,
    /// or as an empty text if the template cannot use null. Refuses a conversation if its template writes
    /// calls, but leaves out those of such messages.
    fn render_content(
        &self,
        messages: &[ConversationMessage],
        extra: &Map<String, Value>,
        to_values: fn(&[ConversationMessage]) -> minijinja::Value,
    ) -> Result<String, TextError> {
        let render = |messages: &[ConversationMessage]| self.render_messages(to_values(messages), extra);
        let with_null = render(messages);
        let is_final = matches!(with_null, Err(TextError::TooLong(_)));
        if is_final || messages.iter().all(|message| message.content.is_some()) {
            return with_null;
        }
        let names = CalledNames::without_content(messages);
        let lacks_calls = with_null.as_ref().is_ok_and(|prompt| names.missing_in(prompt).is_some());
        if let Ok(prompt) = &with_null
            && !lacks_calls
            && !prompt.contains(NULL_WORD)
        {
            return with_null;
        }
        let with_text = |message: &ConversationMessage| ConversationMessage {
            content: Some(message.text().to_owned()),
            ..message.clone()
        };
        let filled: Vec<_> = messages.iter().map(with_text).collect();
        let prompt = match (with_null, render(&filled)) {
            (Ok(with_null), Ok(with_text)) => {
                let num_words = |prompt: &str| prompt.matches(NULL_WORD).count();
                let writes_null = num_words(&with_null) > num_words(&with_text);
                if writes_null || lacks_calls { with_text } else { with_null }
            }
            (Ok(prompt), Err(_)) | (Err(_), Ok(prompt)) => prompt,
            (Err(_), Err(error @ TextError::TooLong(_))) | (Err(error), Err(_)) => return Err(error),
        };
        match names.missing_in(&prompt).filter(|_| self.source.contains("tool_calls")) {
            None => Ok(prompt),
            Some(name) => Err(TextError::Refused(format!(
                "the model's chat template leaves out the call of `{name}` in a message without content: \
                 leave tool calls out of messages, or write them in the content"
            ))),
        }
    }
}

/// The conversation with arguments as JSON texts; `None` if it has no calls.
fn with_arguments_as_text(messages: &[ConversationMessage]) -> Option<Vec<ConversationMessage>> {
    if messages.iter().all(|message| message.tool_calls.is_empty()) {
        return None;
    }
    let mut messages = messages.to_vec();
    for call in messages.iter_mut().flat_map(|message| &mut message.tool_calls) {
        let arguments = call.pointer_mut("/function/arguments");
        if let Some(arguments) = arguments.filter(|arguments| arguments.is_object()) {
            *arguments = Value::String(arguments.to_string());
        }
    }
    Some(messages)
}

/// Longer names are no tool's. So at most this many names end at one byte of a prompt.
const NAME_LEN_MAX: usize = 128;

/// Names of the tools that messages without content call, as far as every template writes them unchanged.
struct CalledNames<'a> {
    /// Each name once.
    names: Vec<&'a str>,
    /// Finds all of them in one pass, because a client may send tens of thousands.
    search: AhoCorasick,
}

impl<'a> CalledNames<'a> {
    fn without_content(messages: &'a [ConversationMessage]) -> Self {
        let calls = messages.iter().filter(|message| message.content.is_none());
        let names = calls
            .flat_map(|message| &message.tool_calls)
            .filter_map(|call| call["function"]["name"].as_str());
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let mut seen = HashSet::new();
        let is_checked = |name: &str| name.len() <= NAME_LEN_MAX && name.chars().all(is_plain);
        let names: Vec<&str> = names.filter(|name| is_checked(name) && seen.insert(*name)).collect();
        let search = AhoCorasick::new(&names).expect("a request is far below the limit of states");
        Self { names, search }
    }

    /// Returns the first name that does not occur in `prompt`.
    fn missing_in(&self, prompt: &str) -> Option<&'a str> {
        let mut is_found = vec![false; self.names.len()];
        for found in self.search.find_overlapping_iter(prompt) {
            is_found[found.pattern().as_usize()] = true;
        }
        let missing = is_found.iter().position(|is_found| !is_found)?;
        Some(self.names[missing])
    }
}
