//! Unsupported fields of every API: which of their values request nothing ([`is_disabled`]), and the refusal
//! of the others.

use serde_json::Value;

use crate::error::RouterError;

/// Whether the value of an unsupported field requests nothing, so that the field can be ignored.
pub(super) fn is_disabled(field: &str, value: &Value) -> bool {
    match (field, value) {
        (_, Value::Null | Value::Bool(false)) => true,
        ("function_call", Value::String(choice)) => matches!(choice.as_str(), "" | "none" | "auto"),
        ("verbosity", Value::String(verbosity)) => matches!(verbosity.as_str(), "" | "medium"),
        (_, Value::String(text)) => text.is_empty(),
        ("modalities", Value::Array(items)) => items.is_empty() || *items == ["text"],
        (_, Value::Array(items)) => items.is_empty(),
        _ => false,
    }
}

/// Refuses the first field of the object at `path` (empty, or ending in a dot) that requests an unsupported
/// feature. `is_disabled` recognizes values that request nothing.
pub(super) fn refuse_fields(
    path: &str,
    fields: &[(&str, &Option<Value>)],
    is_disabled: impl Fn(&str, &Value) -> bool,
) -> Result<(), RouterError> {
    let is_requested =
        |value: &Option<Value>, field: &str| value.as_ref().is_some_and(|value| !is_disabled(field, value));
    match fields.iter().find(|(field, value)| is_requested(value, field)) {
        Some((field, _)) => Err(unsupported(&format!("{path}{field}"))),
        None => Ok(()),
    }
}

/// The error for a field that requests an unsupported feature.
pub(super) fn unsupported(field: &str) -> RouterError {
    RouterError::invalid(field, format!("{field} is not supported: leave it out"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_that_request_nothing() {
        for (field, value, expected) in [
            ("any", json!(null), true),
            ("any", json!(false), true),
            ("any", json!(""), true),
            ("any", json!([]), true),
            ("any", json!(true), false),
            ("any", json!(0), false),
            ("any", json!("none"), false),
            ("any", json!(["text"]), false),
            ("any", json!({}), false),
            ("function_call", json!("none"), true),
            ("function_call", json!({ "name": "f" }), false),
            ("modalities", json!(["text"]), true),
            ("modalities", json!(["text", "audio"]), false),
            ("verbosity", json!("medium"), true),
            ("verbosity", json!("low"), false),
        ] {
            assert_eq!(is_disabled(field, &value), expected, "{field}: {value}");
        }
    }
}
