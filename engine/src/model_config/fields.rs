//! Typed access to a JSON object of a checkpoint; every error names the file and the field. `null` counts as
//! absent, as in the programs that write these files.

use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use crate::EngineError;

/// Larger than any configuration file; a longer file is refused.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Reads a JSON file whose top level is an object.
pub(crate) fn read_json_object(path: &Path) -> Result<Map<String, Value>, EngineError> {
    parse_json_object(path, &read_file(path)?)
}

/// Parses bytes that were read from `path`; errors name `path`.
pub(crate) fn parse_json_object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, EngineError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(broken(path, "the top level is not a json object".to_owned())),
        Err(error) => Err(broken(path, format!("not valid json: {error}"))),
    }
}

/// Reads a whole file of at most `MAX_FILE_BYTES`.
pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>, EngineError> {
    let io = |source| EngineError::Io { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(io)?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(broken(path, format!("longer than {MAX_FILE_BYTES} bytes")));
    }
    Ok(bytes)
}

fn broken(path: &Path, reason: String) -> EngineError {
    EngineError::BrokenFile { path: path.to_owned(), reason }
}

/// An object of a configuration file, and the prefix of its fields in error messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields<'a> {
    path: &'a Path,
    prefix: &'a str,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The top level of a file.
    pub(crate) fn top(path: &'a Path, object: &'a Map<String, Value>) -> Self {
        Self { path, prefix: "", object }
    }

    /// An object inside this one, or `None` if it is absent.
    pub(crate) fn nested(&self, name: &'a str) -> Result<Option<Fields<'a>>, EngineError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Fields { path: self.path, prefix: name, object })),
            Some(other) => Err(self.bad(name, format!("is {other}, expected an object"))),
        }
    }

    /// The value of a field that is present and not null.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// Names of all fields.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.object.keys().map(String::as_str)
    }

    /// A count between 1 and `max`.
    pub(crate) fn count(&self, name: &str, max: usize) -> Result<usize, EngineError> {
        self.optional_count(name, max)?.ok_or_else(|| self.missing(name))
    }

    /// A count between 1 and `max`, or `None` if it is absent.
    pub(crate) fn optional_count(&self, name: &str, max: usize) -> Result<Option<usize>, EngineError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        // Some exporters write whole numbers as floats.
        let whole = value
            .as_u64()
            .or_else(|| value.as_f64().filter(|x| x.fract() == 0.0 && *x >= 0.0).map(|x| x as u64));
        match whole.and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (1..=max).contains(&n) => Ok(Some(n)),
            _ => Err(self.bad(name, format!("is {value}, expected a whole number from 1 to {max}"))),
        }
    }

    /// A finite number.
    pub(crate) fn number(&self, name: &str) -> Result<f64, EngineError> {
        self.optional_number(name)?.ok_or_else(|| self.missing(name))
    }

    /// A finite number, or `None` if it is absent.
    pub(crate) fn optional_number(&self, name: &str) -> Result<Option<f64>, EngineError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() => Ok(Some(x)),
            _ => Err(self.bad(name, format!("is {value}, expected a finite number"))),
        }
    }

    /// A number above zero.
    pub(crate) fn positive(&self, name: &str) -> Result<f64, EngineError> {
        let x = self.number(name)?;
        if x > 0.0 { Ok(x) } else { Err(self.bad(name, format!("is {x}, expected a number above zero"))) }
    }

    /// A boolean; absent means `default`.
    pub(crate) fn flag(&self, name: &str, default: bool) -> Result<bool, EngineError> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.bad(name, format!("is {other}, expected true or false"))),
        }
    }

    /// A string, or `None` if it is absent.
    pub(crate) fn optional_string(&self, name: &str) -> Result<Option<&'a str>, EngineError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(string)) => Ok(Some(string)),
            Some(other) => Err(self.bad(name, format!("is {other}, expected a string"))),
        }
    }

    /// One id or a list of ids; absent means none, and so does -1, which some exporters write.
    pub(crate) fn ids(&self, name: &str) -> Result<Vec<u32>, EngineError> {
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let list = match value {
            Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        let named = list.iter().filter(|id| id.as_i64() != Some(-1));
        let ids = named.map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
        ids.collect::<Option<Vec<u32>>>()
            .ok_or_else(|| self.bad(name, format!("is {value}, expected a token id or a list of token ids")))
    }

    /// The error for a missing field.
    pub(crate) fn missing(&self, name: &str) -> EngineError {
        EngineError::MissingField { path: self.path.to_owned(), field: self.dotted(name) }
    }

    /// The error for a field with another value than expected; `reason` follows the field's name.
    pub(crate) fn bad(&self, name: &str, reason: impl Into<String>) -> EngineError {
        let mut reason = reason.into();
        if let Some((cut, _)) = reason.char_indices().nth(300) {
            reason.truncate(cut);
            reason.push_str("..");
        }
        EngineError::BadField { path: self.path.to_owned(), field: self.dotted(name), reason }
    }

    /// The file that this object is from.
    pub(crate) fn path(&self) -> &'a Path {
        self.path
    }

    /// The field's path for an error, which is one line whatever the name in the file.
    fn dotted(&self, name: &str) -> String {
        let name = name.escape_debug();
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }
}
