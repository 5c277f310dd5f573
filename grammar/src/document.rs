//! [`Grammar`]: the grammar in a sequence's spec, as a JSON document `{"kind": .., "text": ..}`.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::GrammarError;

/// Maximum size of a grammar's text in bytes. A larger one takes long to compile.
pub const TEXT_BYTES_MAX: usize = 128 << 10;

/// Syntax of a grammar's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrammarKind {
    /// A JSON schema: the output is one JSON value that matches it.
    JsonSchema,
    /// A regular expression that matches the whole output.
    Regex,
    /// A context-free grammar in llguidance's variant of Lark; `start` matches the whole output.
    Lark,
}

/// A grammar that a sequence's output must match.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grammar {
    /// Syntax of `text`.
    pub kind: GrammarKind,
    /// The grammar.
    pub text: String,
}

impl Grammar {
    /// A grammar for one JSON value that matches `schema`.
    pub fn json_schema(schema: &Value) -> Self {
        Self { kind: GrammarKind::JsonSchema, text: schema.to_string() }
    }

    /// A grammar for any JSON object.
    pub fn json_object() -> Self {
        Self::json_schema(&json!({ "type": "object" }))
    }

    /// A grammar for one of these texts.
    pub fn choice<S: AsRef<str>>(choices: &[S]) -> Self {
        let choices: Vec<String> = choices.iter().map(|choice| escaped(choice.as_ref())).collect();
        Self { kind: GrammarKind::Regex, text: choices.join("|") }
    }

    /// Parses the wire document.
    pub fn from_wire(document: &str) -> Result<Self, GrammarError> {
        let grammar: Self =
            serde_json::from_str(document).map_err(|error| GrammarError::Document(error.to_string()))?;
        grammar.check_size()?;
        Ok(grammar)
    }

    /// The wire document.
    pub fn to_wire(&self) -> String {
        json!({ "kind": self.kind, "text": self.text }).to_string()
    }

    /// Checks that the text is within [`TEXT_BYTES_MAX`].
    pub fn check_size(&self) -> Result<(), GrammarError> {
        let bytes = self.text.len();
        if bytes > TEXT_BYTES_MAX { Err(GrammarError::TooLong { bytes }) } else { Ok(()) }
    }
}

/// A regular expression that matches only `text`.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_ascii_punctuation() && !matches!(character, '<' | '>') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_come_back_as_they_went() {
        let grammars = [
            Grammar::json_object(),
            Grammar::choice(&["a|b", "c\"d\n"]),
            Grammar { kind: GrammarKind::Lark, text: "start: \"a\"".to_owned() },
        ];
        for grammar in grammars {
            assert_eq!(Grammar::from_wire(&grammar.to_wire()), Ok(grammar));
        }
        assert_eq!(
            Grammar::json_object().to_wire(),
            r#"{"kind":"json_schema","text":"{\"type\":\"object\"}"}"#
        );
    }

    #[test]
    fn what_is_no_document_is_refused() {
        for document in
            ["", "{}", "start: x", r#"{"kind":"ebnf","text":""}"#, r#"{"kind":"regex","text":"","x":1}"#]
        {
            assert!(matches!(Grammar::from_wire(document), Err(GrammarError::Document(_))), "{document}");
        }
        let long = Grammar { kind: GrammarKind::Regex, text: "a".repeat(TEXT_BYTES_MAX + 1) };
        let refused = GrammarError::TooLong { bytes: TEXT_BYTES_MAX + 1 };
        assert_eq!(Grammar::from_wire(&long.to_wire()), Err(refused));
    }
}
