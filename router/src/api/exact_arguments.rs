//! Earlier calls in request bodies, whose arguments keep their digits. A [`Value`] turns an integer beyond 64
//! bits into a float, so arguments with such an integer become JSON text, as [`parse_arguments`] returns
//! them. OpenAI's libraries send all arguments as such a text.

use std::fmt;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use text::parse_arguments;

/// A call in a message of chat completions.
#[derive(Debug)]
pub struct NestedCall(pub Value);

/// An object that has the arguments of a call itself: the older `function_call` of a message.
#[derive(Debug)]
pub struct FlatCall(pub Value);

impl<'de> Deserialize<'de> for NestedCall {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ExactArguments(&["function", "arguments"]).deserialize(deserializer).map(Self)
    }
}

impl<'de> Deserialize<'de> for FlatCall {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ExactArguments(&["arguments"]).deserialize(deserializer).map(Self)
    }
}

/// Reads an object that may be a call with its arguments in this field; `expected` describes the object.
pub(super) fn read_fields<'de, D: Deserializer<'de>>(
    field: &'static [&'static str; 1],
    expected: &str,
    deserializer: D,
) -> Result<Map<String, Value>, D::Error> {
    match ExactArguments(field).deserialize(deserializer)? {
        Value::Object(fields) => Ok(fields),
        _ => Err(D::Error::custom(format!("invalid type: expected {expected}"))),
    }
}

/// Reads any value; the path leads to the arguments within it.
pub(super) struct ExactArguments(pub(super) &'static [&'static str]);

impl<'de> DeserializeSeed<'de> for ExactArguments {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        if !self.0.is_empty() {
            return deserializer.deserialize_any(self);
        }
        let raw: Box<RawValue> = Deserialize::deserialize(deserializer)?;
        let json = raw.get();
        let value = if json.starts_with('{') { parse_arguments(json) } else { serde_json::from_str(json) };
        value.map_err(D::Error::custom)
    }
}

impl<'de> Visitor<'de> for ExactArguments {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Value, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(items)).map(Value::Array)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = entries.next_key::<String>()? {
            let value = match self.0.split_first() {
                Some((first, rest)) if *first == name => entries.next_value_seed(ExactArguments(rest))?,
                _ => entries.next_value()?,
            };
            fields.insert(name, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Every other value is read as it would be without this module.
    #[test]
    fn only_arguments_with_integers_beyond_64_bits_become_text() {
        let large = r#"{"a": 18446744073709551616}"#;
        for (arguments, expected) in [
            ("null", json!(null)),
            ("[1, -1, 1.5, true]", json!([1, -1, 1.5, true])),
            (r#""{\"a\": 1}""#, json!(r#"{"a": 1}"#)),
            (r#" {"a": [18446744073709551615]} "#, json!({ "a": [u64::MAX] })),
            (large, json!(r#"{"a":18446744073709551616}"#)),
        ] {
            let flat = format!(r#"{{"x": "y", "arguments": {arguments}, "z": {{"arguments": 1e3}}}}"#);
            let expected = json!({ "x": "y", "arguments": expected, "z": { "arguments": 1e3 } });
            let FlatCall(read) = serde_json::from_str(&flat).unwrap();
            assert_eq!(read.to_string(), expected.to_string());
            let nested = format!(r#"{{"function": {flat}, "id": null}}"#);
            let NestedCall(read) = serde_json::from_str(&nested).unwrap();
            assert_eq!(read.to_string(), json!({ "function": expected, "id": null }).to_string());
        }
        for json in ["5", "-5", "0.5", "null", "true", "\"x\"", "[{}]", r#"{"function": 5}"#] {
            let NestedCall(read) = serde_json::from_str(json).unwrap();
            assert_eq!(read, serde_json::from_str::<Value>(json).unwrap());
        }
        let deep = format!(r#"{{"arguments": {{"a": {}{}}}}}"#, "[".repeat(200), "]".repeat(200));
        assert!(serde_json::from_str::<FlatCall>(&deep).is_err(), "it is nested too deeply");
    }
}
