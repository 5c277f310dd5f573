//! [`ValueCount`]: limits the JSON values of a request in fields that may hold any JSON, such as schemas and
//! the arguments of calls. A parsed value takes up to 36 times the bytes of its text, for as long as the
//! request waits.

use serde_json::Value;

use super::limits;
use crate::error::RouterError;

/// The JSON values of one request that were counted so far.
#[derive(Debug, Default)]
pub struct ValueCount(usize);

impl ValueCount {
    /// Counts these values and all values within them; `field` names them in the message.
    pub fn add<'a>(
        &mut self,
        field: &str,
        values: impl IntoIterator<Item = &'a Value>,
    ) -> Result<(), RouterError> {
        self.0 += values.into_iter().map(num_values).sum::<usize>();
        let (total, max) = (self.0, limits::JSON_VALUES_MAX);
        if total <= max {
            return Ok(());
        }
        let message = format!(
            "{field}: this request has {total} JSON values in schemas, calls, variables and metadata, at most \
             {max} are allowed: shorten {field}"
        );
        Err(RouterError::invalid(field, message))
    }
}

/// Number of values in a JSON value, itself included. The parser limits how deeply they nest.
pub fn num_values(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(num_values).sum::<usize>(),
        Value::Object(fields) => 1 + fields.values().map(num_values).sum::<usize>(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_value_is_counted_and_all_fields_share_the_limit() {
        for (value, expected) in [
            (json!(null), 1),
            (json!("a"), 1),
            (json!([]), 1),
            (json!([1, [2, 3]]), 5),
            (json!({ "a": 1, "b": { "c": [true] } }), 5),
        ] {
            assert_eq!(num_values(&value), expected, "{value}");
        }
        let mut count = ValueCount::default();
        let half = json!(vec![0; limits::JSON_VALUES_MAX / 2 - 1]);
        assert_eq!(count.add("a", [&half]), Ok(()));
        assert_eq!(count.add("b", [&half]), Ok(()));
        let error = count.add("c", &[json!(0)]).unwrap_err();
        let RouterError::InvalidRequest { message, param } = error else { panic!("{error}") };
        assert_eq!(param.as_deref(), Some("c"));
        for expected in ["has 65537 JSON values", "at most 65536 are allowed: shorten c"] {
            assert!(message.contains(expected), "{message}");
        }
    }
}
