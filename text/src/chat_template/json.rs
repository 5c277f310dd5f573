//! The filter `tojson` as transformers defines it: Python's `json.dumps(value, ensure_ascii, indent,
//! separators, sort_keys)` without HTML escaping.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::large_integers::LargeInteger;

/// Maximum depth of a value. JSON of clients has at most 128 levels.
const MAX_DEPTH: usize = 200;
/// Maximum characters of indentation per level.
const MAX_INDENT: usize = 16;

/// Arguments of the filter in their order.
const ARGUMENTS: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];

struct Writer {
    text: String,
    ensure_ascii: bool,
    sort_keys: bool,
    /// Written once per level on lines of their own; `None`: everything is on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

/// The filter. Unknown arguments are refused.
pub(super) fn to_json(value: Value, positional: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    if positional.len() > ARGUMENTS.len() {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let mut arguments = Vec::new();
    for (idx, name) in ARGUMENTS.into_iter().enumerate() {
        let named = options.get::<Option<Value>>(name)?;
        let given = named.or_else(|| positional.get(idx).cloned());
        arguments.push(given.filter(|given| !given.is_none() && !given.is_undefined()));
    }
    options.assert_all_used()?;
    let [ensure_ascii, indent, separators, sort_keys] =
        <[Option<Value>; 4]>::try_from(arguments).expect("one for each name");
    let indent = indent.as_ref().map(indentation).transpose()?;
    let default_separator = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) = match separators {
        None => (default_separator.to_owned(), ": ".to_owned()),
        Some(pair) => (separator(&pair, 0)?, separator(&pair, 1)?),
    };
    let is_set = |flag: Option<Value>| flag.is_some_and(|flag| flag.is_true());
    let mut writer = Writer {
        text: String::new(),
        ensure_ascii: is_set(ensure_ascii),
        sort_keys: is_set(sort_keys),
        indent,
        item_separator,
        key_separator,
    };
    writer.write(&value, 0)?;
    Ok(Value::from_safe_string(writer.text))
}

fn indentation(indent: &Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str() {
        return Ok(text.chars().take(MAX_INDENT).collect());
    }
    let width = i64::try_from(indent.clone())?;
    Ok(" ".repeat(usize::try_from(width).unwrap_or(0).min(MAX_INDENT)))
}

fn separator(pair: &Value, idx: usize) -> Result<String, Error> {
    let part = pair.get_item_by_index(idx)?;
    part.as_str().map(str::to_owned).ok_or_else(|| invalid("tojson: separators must be two strings"))
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

impl Writer {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!("tojson: more than {MAX_DEPTH} levels")));
        }
        if let Some(LargeInteger(digits)) = value.downcast_object_ref::<LargeInteger>() {
            self.text.push_str(digits);
            return Ok(());
        }
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&number(value)?),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map => self.object(value, depth)?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item)).collect();
                self.items(('[', ']'), items, depth)?;
            }
            kind => return Err(invalid(format!("tojson: {kind} cannot be written as JSON"))),
        }
        Ok(())
    }

    fn object(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        let item = |key: Value| Ok((Some(key_text(&key)?), value.get_item(&key)?));
        let items = keys.into_iter().map(item).collect::<Result<_, Error>>()?;
        self.items(('{', '}'), items, depth)
    }

    fn items(
        &mut self,
        (open, close): (char, char),
        items: Vec<(Option<String>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        self.text.push(open);
        let is_empty = items.is_empty();
        for (idx, (key, item)) in items.into_iter().enumerate() {
            if idx > 0 {
                self.text.push_str(&self.item_separator);
            }
            self.new_line(depth + 1);
            if let Some(key) = key {
                self.string(&key);
                self.text.push_str(&self.key_separator);
            }
            self.write(&item, depth + 1)?;
        }
        if !is_empty {
            self.new_line(depth);
        }
        self.text.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            (0..depth).for_each(|_| self.text.push_str(indent));
        }
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for character in text.chars() {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                ' '..='~' => self.text.push(character),
                _ if character < ' ' || self.ensure_ascii => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        write!(self.text, "\\u{unit:04x}").expect("writing to a string cannot fail");
                    }
                }
                _ => self.text.push(character),
            }
        }
        self.text.push('"');
    }
}

/// A key as `json.dumps` writes it.
fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => key.is_true().to_string(),
        ValueKind::Number => number(key)?,
        kind => return Err(invalid(format!("tojson: {kind} cannot be a key"))),
    })
}

/// A number as Python's `repr` writes it.
fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let x = f64::try_from(value.clone())?;
    if x.is_nan() {
        return Ok("NaN".to_owned());
    }
    if x.is_infinite() {
        return Ok(if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned());
    }
    // Both languages write the shortest digits that give the number again.
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').expect("`:e` writes an exponent");
    let exponent: i32 = exponent.parse().expect("`:e` writes a whole number");
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return Ok(format!("{digits}e{sign}{:02}", exponent.abs()));
    }
    let plain = x.to_string();
    Ok(if plain.contains('.') { plain } else { format!("{plain}.0") })
}
