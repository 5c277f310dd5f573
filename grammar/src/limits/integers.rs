//! Integers that a value may equal or that bound it. The parser computes with 64-bit floats: instead of an
//! integer that none of them holds it would allow a neighbor.

use serde_json::{Map, Number, Value};

use crate::GrammarError;

/// Keywords with values to equal.
const CONSTANTS: [&str; 2] = ["const", "enum"];
/// Keywords with a bound.
const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];

/// Refuses a subschema with an integer that the parser would change.
pub(super) fn check(keywords: &Map<String, Value>) -> Result<(), GrammarError> {
    for keyword in CONSTANTS {
        let mut left: Vec<&Value> = keywords.get(keyword).into_iter().collect();
        while let Some(value) = left.pop() {
            match value {
                Value::Number(number) if !is_exact(number) || !is_exact_unsigned(number) => {
                    return Err(refused(keyword, number));
                }
                Value::Array(items) => left.extend(items),
                Value::Object(fields) => left.extend(fields.values()),
                _ => {}
            }
        }
    }
    for keyword in BOUNDS {
        if let Some(Value::Number(number)) = keywords.get(keyword)
            && !is_exact(number)
        {
            return Err(refused(keyword, number));
        }
    }
    Ok(())
}

/// Whether a signed integer stays the same. The parser converts it back by a cast, which keeps the largest
/// one.
fn is_exact(number: &Number) -> bool {
    number.as_i64().is_none_or(|integer| (integer as f64) as i64 == integer)
}

/// Whether an integer that only an unsigned type holds is written as it was. As a bound it is never reached.
fn is_exact_unsigned(number: &Number) -> bool {
    let unsigned = number.as_u64().filter(|integer| i64::try_from(*integer).is_err());
    unsigned.is_none_or(|integer| (integer as f64).to_string() == integer.to_string())
}

fn refused(keyword: &str, number: &Number) -> GrammarError {
    GrammarError::Compile(format!(
        "{keyword} {number}: beyond 2^53, only integers that a 64-bit float holds are supported: use a string"
    ))
}
