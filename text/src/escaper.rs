//! [`SpecialTokenEscaper`]: prevents user text from becoming special tokens. Inserts a mark into every
//! spelling of one before the chat template is rendered. The rendered text is split at the marks and
//! tokenized in parts, so that no part contains the whole spelling.

use serde_json::{Map, Value};

use super::ConversationMessage;

/// Unicode noncharacters, which no text needs; one that does not occur is used as the mark.
const ESCAPE_MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// The mark of one conversation.
#[derive(Debug)]
pub(super) struct SpecialTokenEscaper<'a> {
    /// Spellings of the special tokens.
    special: &'a [String],
    /// The characters with which they begin: few, while a model may have thousands of special tokens.
    first_characters: Vec<char>,
    mark: char,
}

impl<'a> SpecialTokenEscaper<'a> {
    /// Chooses a mark that does not occur in the conversation; the last one if all occur.
    pub(super) fn new(
        special: &'a [String],
        messages: &[ConversationMessage],
        extra: &Map<String, Value>,
    ) -> Self {
        let written = serde_json::to_string(&(messages, extra)).unwrap_or_default();
        let mut marks = ESCAPE_MARKS;
        let mark = marks.find(|&mark| !written.contains(mark)).unwrap_or(*ESCAPE_MARKS.end());
        let mut first_characters: Vec<char> =
            special.iter().filter_map(|token| token.chars().next()).collect();
        first_characters.sort_unstable();
        first_characters.dedup();
        Self { special, first_characters, mark }
    }

    pub(super) fn messages(&self, messages: &[ConversationMessage]) -> Vec<ConversationMessage> {
        let shielded = |message: &ConversationMessage| ConversationMessage {
            role: message.role.clone(),
            content: message.content.as_deref().map(|content| self.text(content)),
            name: message.name.as_deref().map(|name| self.text(name)),
            reasoning_content: message.reasoning_content.as_deref().map(|text| self.text(text)),
            tool_calls: message.tool_calls.iter().map(|call| self.value(call)).collect(),
            tool_call_id: message.tool_call_id.as_deref().map(|id| self.text(id)),
        };
        messages.iter().map(shielded).collect()
    }

    pub(super) fn object(&self, fields: &Map<String, Value>) -> Map<String, Value> {
        fields.iter().map(|(name, value)| (self.text(name), self.value(value))).collect()
    }

    fn value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(text)),
            Value::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Value::Object(fields) => Value::Object(self.object(fields)),
            other => other.clone(),
        }
    }

    /// Inserts a mark after the first character of every special token's spelling. Existing marks are
    /// removed.
    fn text(&self, text: &str) -> String {
        let mut shielded = String::with_capacity(text.len());
        for (at, character) in text.char_indices().filter(|(_, character)| *character != self.mark) {
            shielded.push(character);
            let may_be_special = self.first_characters.contains(&character);
            if may_be_special && self.special.iter().any(|special| text[at..].starts_with(special.as_str())) {
                shielded.push(self.mark);
            }
        }
        shielded
    }

    /// Splits a rendered text at the marks.
    pub(super) fn parts<'t>(&self, rendered: &'t str) -> impl Iterator<Item = &'t str> + use<'t> {
        rendered.split(self.mark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some models reserve more than a thousand special tokens. Comparing each of them with the text at every
    /// character would take minutes.
    #[test]
    fn a_long_text_is_escaped_fast_however_many_special_tokens_there_are() {
        let special: Vec<String> = (0..4_000).map(|idx| format!("<|reserved_{idx}|>")).collect();
        let text = format!("{}<|reserved_3999|>", "word ".repeat(800_000));
        let messages = [ConversationMessage::new("user", text.clone())];
        let escaper = SpecialTokenEscaper::new(&special, &messages, &Map::new());
        let escaped = escaper.messages(&messages);
        let parts: Vec<&str> = escaper.parts(escaped[0].text()).collect();
        assert_eq!((parts.concat(), parts.len()), (text, 2), "the special token is split");
    }
}
