//! JSON bodies: parses those of requests and serializes those of responses. Errors name the field, line and
//! column, and what was expected there.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::foreign_fields::own_name;
use crate::error::RouterError;

/// Why serializing a response cannot fail.
pub(super) const SERIALIZABLE: &str = "a response has only serializable values: string keys, numbers, text";

/// Serializes a response as one line of JSON.
pub(super) fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect(SERIALIZABLE)
}

/// Parses a JSON body.
pub(super) fn parse_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, RouterError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        let at = error.valid_up_to();
        invalid(None, format!("the body is not valid UTF-8: invalid sequence at byte {at}"))
    })?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        explain(&path, error.inner())
    })?;
    deserializer.end().map_err(|error| explain(".", &error))?;
    Ok(value)
}

fn explain(path: &str, error: &serde_json::Error) -> RouterError {
    let at = format!("at line {} column {}", error.line(), error.column());
    if error.to_string().starts_with("number out of range") {
        return invalid(
            None,
            format!("the body has a number that no 64-bit float can hold, such as 1e400, {at}"),
        );
    }
    if !error.is_data() {
        return invalid(None, format!("the body is not valid JSON: {error}"));
    }
    let reason = error.to_string();
    // The path of an unknown field includes the field, that of a field sent twice does not.
    if reason.starts_with("unknown field `") {
        // The reason lists the known ones. A nested path is none of the names.
        let known_name = own_name(path, |field| reason.contains(&format!("`{field}`")));
        let hint = known_name.map(|name| format!(": send {name}")).unwrap_or_default();
        return invalid(Some(path), format!("{path} is not a field of this endpoint, {at}{hint}"));
    }
    if let Some(field) = quoted_after(&reason, "duplicate field ") {
        let path = if path == "." { field.to_owned() } else { format!("{path}.{field}") };
        return invalid(Some(&path), format!("{path}: {reason}"));
    }
    if path == "." {
        return invalid(None, format!("the body does not have the expected shape: {reason}"));
    }
    invalid(Some(path), format!("{path}: {reason}"))
}

/// Returns the name in backticks after `prefix`.
fn quoted_after<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    text.strip_prefix(prefix)?.strip_prefix('`')?.split('`').next()
}

fn invalid(param: Option<&str>, message: String) -> RouterError {
    RouterError::InvalidRequest { message, param: param.map(str::to_owned) }
}
