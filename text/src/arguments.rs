//! The arguments of tool calls in a conversation. Templates get them as objects, but a [`Value`] turns an
//! integer beyond 64 bits into a float. Arguments with such an integer therefore stay JSON text until a
//! template is rendered (`chat_template/large_integers.rs`).

use serde_json::{Map, Value};

/// Where a call has its arguments.
pub(crate) const ARGUMENTS: &str = "/function/arguments";

/// Reads the arguments of a call from JSON: an object, or JSON text if they have an integer beyond 64 bits.
pub fn parse_arguments(json: &str) -> Result<Value, serde_json::Error> {
    if !tokens(json).any(is_large_integer) {
        return serde_json::from_str(json).map(Value::Object);
    }
    fields_of(json)?;
    Ok(Value::String(with_strings(json, str::to_owned)))
}

/// The arguments of a call that are JSON text because of an integer beyond 64 bits.
pub(crate) fn arguments_as_json(call: &Value) -> Option<&str> {
    let json = call.pointer(ARGUMENTS)?.as_str()?;
    (tokens(json).any(is_large_integer) && fields_of(json).is_ok()).then_some(json)
}

/// The fields of the arguments that [`parse_arguments`] left as JSON text, to count their values. Integers
/// beyond 64 bits are 0.
pub fn fields_of_json_arguments(call: &Value) -> Option<Map<String, Value>> {
    arguments_as_json(call).and_then(|json| fields_of(json).ok())
}

/// Parses an object with 0 in place of each integer beyond 64 bits.
fn fields_of(json: &str) -> Result<Map<String, Value>, serde_json::Error> {
    let replaced = |token| if is_large_integer(token) { "0" } else { token };
    // The spaces keep tokens apart that are only valid together, or only apart.
    serde_json::from_str(&tokens(json).map(replaced).collect::<Vec<_>>().join(" "))
}

/// A valid JSON text with changed strings, those of keys included, and without the spaces between its tokens.
pub(crate) fn with_strings(json: &str, change: impl Fn(&str) -> String) -> String {
    let changed = |token: &str| match serde_json::from_str::<String>(token) {
        Ok(text) => Value::String(change(&text)).to_string(),
        Err(_) => token.to_owned(),
    };
    tokens(json).map(changed).collect()
}

/// Whether a token is an integer beyond 64 bits.
pub(crate) fn is_large_integer(token: &str) -> bool {
    let digits = token.strip_prefix('-').unwrap_or(token);
    digits.starts_with(|first: char| matches!(first, '1'..='9'))
        && digits.bytes().all(|digit| digit.is_ascii_digit())
        && token.parse::<i64>().is_err()
        && token.parse::<u64>().is_err()
}

/// Splits a JSON text into strings (with their quotes and escapes), numbers, words and punctuation.
pub(crate) fn tokens(json: &str) -> impl Iterator<Item = &str> {
    let mut rest = json;
    std::iter::from_fn(move || {
        rest = rest.trim_start_matches([' ', '\t', '\n', '\r']);
        let (token, after) = rest.split_at(token_len(rest)?);
        rest = after;
        Some(token)
    })
}

/// Length of the first token; `None` at the end.
fn token_len(text: &str) -> Option<usize> {
    const PUNCTUATION: &[char] = &['{', '}', '[', ']', ':', ','];
    let ends_word = |c: char| c == '"' || c.is_ascii_whitespace() || PUNCTUATION.contains(&c);
    match text.chars().next()? {
        '"' => Some(string_len(text)),
        first if PUNCTUATION.contains(&first) => Some(1),
        first => {
            Some(text[first.len_utf8()..].find(ends_word).map_or(text.len(), |len| first.len_utf8() + len))
        }
    }
}

/// Length of a string that begins with its quote.
fn string_len(text: &str) -> usize {
    let mut is_escaped = false;
    let is_end = |byte: u8| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    };
    text.bytes().skip(1).position(is_end).map_or(text.len(), |end| end + 2)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_arguments_with_integers_beyond_64_bits_stay_text() {
        let digits = "7".repeat(400);
        for (json, expected) in [
            ("{}", Some(json!({}))),
            (r#"{"a": 18446744073709551615}"#, Some(json!({ "a": u64::MAX }))),
            (r#"{"a": -9223372036854775808}"#, Some(json!({ "a": i64::MIN }))),
            (r#"{"a": "18446744073709551616"}"#, Some(json!({ "a": "18446744073709551616" }))),
            (r#"{"18446744073709551616": 1}"#, Some(json!({ "18446744073709551616": 1 }))),
            (r#"{"a": 1e30}"#, Some(json!({ "a": 1e30 }))),
            (
                " {\"a\" : [18446744073709551616,\n1.50], \"\\u0062\\\"\": \"\\u003c \"} ",
                Some(json!(r#"{"a":[18446744073709551616,1.50],"b\"":"< "}"#)),
            ),
            (r#"{"a": -9223372036854775809}"#, Some(json!(r#"{"a":-9223372036854775809}"#))),
            (&format!(r#"{{"a":{digits}}}"#), Some(json!(format!(r#"{{"a":{digits}}}"#)))),
            // Invalid with or without their large integer.
            ("[18446744073709551616]", None),
            (r#"{"a": 18446744073709551616 2}"#, None),
            (r#"{"a": 1 8446744073709551616}"#, None),
            (r#"{"a": 0018446744073709551616}"#, None),
            (r#"{"a": +18446744073709551616}"#, None),
            ("{\"a\":\u{a0}18446744073709551616}", None),
            (r#"{"a": 18446744073709551616, "b"#, None),
            (r#"{"a": 18446744073709551616, "\"#, None),
            ("", None),
        ] {
            assert_eq!(parse_arguments(json).ok(), expected, "{json}");
        }
        let deep = format!("{{\"a\":{}18446744073709551616{}}}", "[".repeat(200), "]".repeat(200));
        assert!(parse_arguments(&deep).is_err(), "it is nested too deeply");
    }

    #[test]
    fn only_text_with_a_large_integer_is_json() {
        let call = |arguments: Value| json!({ "function": { "arguments": arguments } });
        for (arguments, is_json) in [
            (json!(r#"{"x":18446744073709551616,"y":["x",1]}"#), true),
            (json!(r#"{"x":"x"}"#), false),
            (json!("18446744073709551616"), false),
            (json!({ "x": "x" }), false),
        ] {
            let fields = fields_of_json_arguments(&call(arguments)).map(Value::Object);
            assert_eq!(fields, is_json.then(|| json!({ "x": 0, "y": ["x", 1] })));
        }
        let changed =
            with_strings(r#"{"x": 18446744073709551616, "y": ["\"", 1]}"#, |text| format!("{text}!"));
        assert_eq!(changed, r#"{"x!":18446744073709551616,"y!":["\"!",1]}"#);
    }
}
