//! Whole numbers in request bodies. Some clients (in Go, JavaScript, Lua) write them as `1024.0`, so that a
//! number without a fraction is accepted wherever a body has a whole number. Bodies name these functions in
//! `deserialize_with`.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, Expected, Unexpected, Visitor};

/// First number beyond the range of `i64`.
const I64_END: f64 = 9_223_372_036_854_775_808.0;

/// Reads a field that may be absent or null.
pub(super) fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    let value: Option<Integer> = Option::deserialize(deserializer)?;
    Ok(value.map(|Integer(value)| value))
}

/// Reads a list that may be absent or null.
pub(super) fn optional_list<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<i64>>, D::Error> {
    let values: Option<Vec<Integer>> = Option::deserialize(deserializer)?;
    Ok(values.map(|values| values.into_iter().map(|Integer(value)| value).collect()))
}

/// The whole number that a number with a point or an exponent stands for, for a visitor's `visit_f64`; an
/// error if it has a fraction or is beyond the range of `i64`.
pub(super) fn from_float<E: Error>(value: f64, expected: &dyn Expected) -> Result<i64, E> {
    let is_whole = value.fract() == 0.0 && (-I64_END..I64_END).contains(&value);
    if is_whole { Ok(value as i64) } else { Err(E::invalid_type(Unexpected::Float(value), expected)) }
}

struct Integer(i64);

impl<'de> Deserialize<'de> for Integer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IntegerVisitor;
        impl Visitor<'_> for IntegerVisitor {
            type Value = Integer;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number from -2^63 to 2^63 - 1")
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<Integer, E> {
                Ok(Integer(value))
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Integer, E> {
                let value =
                    i64::try_from(value).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))?;
                Ok(Integer(value))
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<Integer, E> {
                from_float(value, &self).map(Integer)
            }
        }
        deserializer.deserialize_i64(IntegerVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_without_a_fraction_are_whole_numbers() {
        for (json, expected) in [
            ("null", Ok(None)),
            ("-1", Ok(Some(-1))),
            ("1024.0", Ok(Some(1_024))),
            ("1e3", Ok(Some(1_000))),
            ("-0.0", Ok(Some(0))),
            ("9223372036854775807", Ok(Some(i64::MAX))),
            ("-9223372036854775808.0", Ok(Some(i64::MIN))),
            ("9223372036854775808", Err("integer `9223372036854775808`")),
            ("9223372036854775808.0", Err("floating point")),
            ("1.5", Err("floating point `1.5`, expected a whole number")),
            ("\"1\"", Err("string \"1\", expected a whole number")),
            ("true", Err("boolean `true`, expected a whole number")),
        ] {
            let found = optional(&mut serde_json::Deserializer::from_str(json));
            match (found, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{json}"),
                (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{json}: {error}"),
                (found, _) => panic!("{json}: {found:?}"),
            }
        }
        let list = |json| optional_list(&mut serde_json::Deserializer::from_str(json));
        assert_eq!(list("[1, 2.0]").unwrap(), Some(vec![1, 2]));
        assert!(list("[1, 2.5]").is_err());
    }
}
