//! [`SpecialTokenEscaper`]: prevents user text from becoming special tokens. Inserts a mark into every
//! spelling of one before the chat template is rendered. The rendered text is split at the marks and
//! tokenized in parts, so that no part contains the whole spelling.

use std::borrow::Cow;

use aho_corasick::AhoCorasick;
use serde_json::{Map, Value};

use super::ConversationMessage;
use super::arguments::{ARGUMENTS, arguments_as_json, with_strings};

/// Unicode noncharacters, which no text needs; one that does not occur is used as the mark.
const ESCAPE_MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// The mark of one conversation.
#[derive(Debug)]
pub(super) struct SpecialTokenEscaper<'a> {
    /// Finds the spellings of the special tokens.
    special: &'a AhoCorasick,
    mark: char,
}

impl<'a> SpecialTokenEscaper<'a> {
    /// Chooses a mark that does not occur in the conversation; the last one if all occur.
    pub(super) fn new(
        special: &'a AhoCorasick,
        messages: &[ConversationMessage],
        extra: &Map<String, Value>,
    ) -> Self {
        let written = serde_json::to_string(&(messages, extra)).unwrap_or_default();
        let mut marks = ESCAPE_MARKS;
        let mark = marks.find(|&mark| !written.contains(mark)).unwrap_or(*ESCAPE_MARKS.end());
        Self { special, mark }
    }

    pub(super) fn messages(&self, messages: &[ConversationMessage]) -> Vec<ConversationMessage> {
        let escaped = |message: &ConversationMessage| ConversationMessage {
            role: message.role.clone(),
            content: message.content.as_deref().map(|content| self.text(content)),
            name: message.name.as_deref().map(|name| self.text(name)),
            reasoning_content: message.reasoning_content.as_deref().map(|text| self.text(text)),
            tool_calls: message.tool_calls.iter().map(|call| self.call(call)).collect(),
            tool_call_id: message.tool_call_id.as_deref().map(|id| self.text(id)),
        };
        messages.iter().map(escaped).collect()
    }

    pub(super) fn object(&self, fields: &Map<String, Value>) -> Map<String, Value> {
        fields.iter().map(|(name, value)| (self.text(name), self.value(value))).collect()
    }

    /// Escapes a call. In arguments that are JSON text, a string may spell a special token with JSON's
    /// escapes.
    fn call(&self, call: &Value) -> Value {
        let mut escaped = self.value(call);
        let json = arguments_as_json(call).map(|json| with_strings(json, |text| self.text(text)));
        if let (Some(json), Some(arguments)) = (json, escaped.pointer_mut(ARGUMENTS)) {
            *arguments = Value::String(json);
        }
        escaped
    }

    fn value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(text)),
            Value::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Value::Object(fields) => Value::Object(self.object(fields)),
            other => other.clone(),
        }
    }

    /// Inserts a mark after the first character of every special token's spelling. Existing marks are removed
    /// first: without them the text may spell one.
    fn text(&self, text: &str) -> String {
        let text = match text.contains(self.mark) {
            true => Cow::Owned(text.replace(self.mark, "")),
            false => Cow::Borrowed(text),
        };
        let mut starts: Vec<usize> =
            self.special.find_overlapping_iter(text.as_ref()).map(|found| found.start()).collect();
        starts.sort_unstable();
        starts.dedup();
        let mut escaped = String::with_capacity(text.len() + starts.len() * self.mark.len_utf8());
        let mut written = 0;
        for start in starts {
            let second = start + text[start..].chars().next().map_or(0, char::len_utf8);
            escaped.push_str(&text[written..second]);
            escaped.push(self.mark);
            written = second;
        }
        escaped + &text[written..]
    }

    /// Splits a rendered text at the marks.
    pub(super) fn parts<'t>(&self, rendered: &'t str) -> impl Iterator<Item = &'t str> + use<'t> {
        rendered.split(self.mark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of a conversation of one message whose template is its text.
    fn parts(special: &[&str], text: &str) -> Vec<String> {
        let special = AhoCorasick::new(special).unwrap();
        let messages = [ConversationMessage::new("user", text.to_owned())];
        let escaper = SpecialTokenEscaper::new(&special, &messages, &Map::new());
        let escaped = escaper.messages(&messages);
        escaper.parts(escaped[0].text()).map(str::to_owned).collect()
    }

    #[test]
    fn spellings_of_special_tokens_are_split_after_their_first_character() {
        for (special, text, expected) in [
            (&["<s>", "</s>"][..], "a <s> b</s>", &["a <", "s> b<", "/s>"][..]),
            (&["<s>"], "<<s><s", &["<<", "s><s"]),
            (&["abab", "ba"], "ababab", &["a", "b", "a", "b", "ab"]),
            (&["\u{2581}end"], "\u{2581}\u{2581}end", &["\u{2581}\u{2581}", "end"]),
            (&["<s>"], "", &[""]),
            (&[], "<s>", &["<s>"]),
        ] {
            assert_eq!(parts(special, text), expected, "{special:?} in {text}");
        }
    }

    /// All marks occur, so that one of them has to be removed; the spelling begins only then.
    #[test]
    fn a_mark_within_a_spelling_does_not_hide_it() {
        let marks: String = ESCAPE_MARKS.collect();
        for hidden in ESCAPE_MARKS {
            let parts = parts(&["<|end|>"], &format!("{marks} <|{hidden}end|>"));
            assert!(parts.iter().all(|part| !part.contains("<|end|>")), "{parts:?}");
        }
    }

    /// Some models reserve more than a thousand special tokens, and a text may consist of their beginnings.
    /// Comparing each of them with the text at every character would take minutes.
    #[test]
    fn a_long_text_is_escaped_fast_however_many_special_tokens_there_are() {
        let special: Vec<String> = (0..4_000).map(|idx| format!("<|reserved_{idx}|>")).collect();
        let special: Vec<&str> = special.iter().map(String::as_str).collect();
        for filler in ["word ", "<|reserved_", "<"] {
            let text = format!("{}<|reserved_3999|>", filler.repeat(4_000_000 / filler.len()));
            let parts = parts(&special, &text);
            assert_eq!((parts.concat(), parts.len()), (text, 2), "the special token is split");
        }
    }
}
