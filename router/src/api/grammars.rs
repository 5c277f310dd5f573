//! Grammars from the fields by which each API constrains the output.

use grammar::{Grammar, GrammarKind};
use serde_json::Value;

use crate::error::RouterError;
use crate::request::structure::RawGrammar;

/// Maximum number of texts in one `choice`.
const CHOICES_MAX: usize = 4_096;

/// Names of a format's fields, for messages.
pub(super) struct FormatNames {
    /// The format.
    pub(super) format: &'static str,
    /// Its type.
    pub(super) kind: &'static str,
    /// Its JSON schema.
    pub(super) schema: &'static str,
}

/// The grammar of a format with this type and JSON schema; `None` if it allows any text.
pub(super) fn grammar_from_format(
    names: &FormatNames,
    kind: &str,
    schema: Option<Value>,
) -> Result<Option<RawGrammar>, RouterError> {
    match kind {
        "text" => Ok(None),
        "json_object" => Ok(Some(raw_grammar(names.format, Grammar::json_object()))),
        "json_schema" => {
            let field = names.schema;
            let missing = || format!("{field} is required where {} is json_schema", names.kind);
            let schema = schema.ok_or_else(|| RouterError::invalid(field, missing()))?;
            Ok(Some(grammar_from_schema(field, &schema)?))
        }
        other => Err(RouterError::not_one_of(names.kind, &["text", "json_object", "json_schema"], other)),
    }
}

/// A grammar, with the field that requested it.
pub(super) fn raw_grammar(field: &'static str, grammar: Grammar) -> RawGrammar {
    RawGrammar { field, grammar }
}

/// The grammar of a schema, which may be an object or its text.
pub(super) fn grammar_from_schema(field: &'static str, schema: &Value) -> Result<RawGrammar, RouterError> {
    let grammar = match schema {
        Value::String(text) => Grammar { kind: GrammarKind::JsonSchema, text: text.clone() },
        Value::Object(_) => Grammar::json_schema(schema),
        _ => return Err(RouterError::must_be(field, "a JSON schema: an object")),
    };
    Ok(raw_grammar(field, grammar))
}

/// A grammar for one of these texts.
pub(super) fn grammar_from_choices(
    field: &'static str,
    choices: &[String],
) -> Result<RawGrammar, RouterError> {
    if choices.is_empty() || choices.len() > CHOICES_MAX {
        let message = format!("{field} has {} texts, 1 to {CHOICES_MAX} are allowed", choices.len());
        return Err(RouterError::invalid(field, message));
    }
    Ok(raw_grammar(field, Grammar::choice(choices)))
}
