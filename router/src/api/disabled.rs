//! [`is_disabled`]: which values of unsupported fields request nothing, for every API.

use serde_json::Value;

/// Whether the value of an unsupported field requests nothing, so that the field can be ignored.
pub(super) fn is_disabled(field: &str, value: &Value) -> bool {
    match (field, value) {
        (_, Value::Null | Value::Bool(false)) => true,
        ("function_call", Value::String(choice)) => matches!(choice.as_str(), "" | "none" | "auto"),
        ("truncation", Value::String(truncation)) => matches!(truncation.as_str(), "" | "disabled"),
        (_, Value::String(text)) => text.is_empty(),
        ("modalities", Value::Array(items)) => items.is_empty() || *items == ["text"],
        (_, Value::Array(items)) => items.is_empty(),
        ("reasoning", Value::Object(fields)) => fields.values().all(Value::is_null),
        ("top_logprobs", Value::Number(count)) => count.as_u64() == Some(0),
        _ => false,
    }
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
            ("truncation", json!("disabled"), true),
            ("truncation", json!("auto"), false),
            ("reasoning", json!({ "effort": null }), true),
            ("reasoning", json!({ "effort": "low" }), false),
            ("top_logprobs", json!(0), true),
            ("top_logprobs", json!(1), false),
        ] {
            assert_eq!(is_disabled(field, &value), expected, "{field}: {value}");
        }
    }
}
