//! Methods of Python's strings that minijinja's own library of them lacks, or has without their names of
//! arguments.

use minijinja::value::{Kwargs, Tuple, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Maximum width to which a string is padded.
const MAX_WIDTH: usize = 1 << 20;

/// Calls a method that minijinja does not know.
pub(super) fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => match string_method(text, method, args) {
            Some(result) => result,
            None => unknown_method_callback(state, value, method, args),
        },
        None => unknown_method_callback(state, value, method, args),
    }
}

/// `None` if this file has no such method.
fn string_method(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "split" => split(text, args),
        "rsplit" => rsplit(text, args),
        "partition" | "rpartition" => partition(text, method, args),
        "index" | "rindex" => index(text, method, args),
        "removeprefix" => affix(args).map(|affix| text.strip_prefix(affix).unwrap_or(text).into()),
        "removesuffix" => affix(args).map(|affix| text.strip_suffix(affix).unwrap_or(text).into()),
        "swapcase" => from_args(args).map(|()| text.chars().flat_map(swapped).collect::<String>().into()),
        "zfill" => zfill(text, args),
        "ljust" | "rjust" | "center" => justify(text, method, args),
        _ => return None,
    })
}

fn affix(args: &[Value]) -> Result<&str, Error> {
    let (affix,) = from_args(args)?;
    Ok(affix)
}

fn swapped(character: char) -> Vec<char> {
    if character.is_uppercase() {
        character.to_lowercase().collect()
    } else {
        character.to_uppercase().collect()
    }
}

/// The separator, which is whitespace by default, and the maximum number of parts.
fn split_arguments(args: &[Value]) -> Result<(Option<String>, usize), Error> {
    let (separator, max_splits, options): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = separator.or(options.get("sep")?);
    let max_splits = max_splits.or(options.get("maxsplit")?);
    options.assert_all_used()?;
    if separator == Some("") {
        return Err(failed("empty separator"));
    }
    let num_parts = max_splits.and_then(|max| usize::try_from(max).ok()).map_or(usize::MAX, |max| max + 1);
    Ok((separator.map(str::to_owned), num_parts))
}

/// minijinja's own does not know the names of the arguments.
fn split(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, num_parts) = split_arguments(args)?;
    let parts: Vec<&str> = match &separator {
        Some(separator) => text.splitn(num_parts, separator.as_str()).collect(),
        None => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_start());
            while parts.len() + 1 < num_parts
                && let Some((part, after)) = rest.split_once(char::is_whitespace)
            {
                parts.push(part);
                rest = after.trim_start();
            }
            parts.extend((!rest.is_empty()).then_some(rest));
            parts
        }
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, num_parts) = split_arguments(args)?;
    let mut parts: Vec<&str> = match &separator {
        Some(separator) => text.rsplitn(num_parts, separator.as_str()).collect(),
        None => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_end());
            while parts.len() + 1 < num_parts && !rest.is_empty() {
                let start = rest.rfind(char::is_whitespace);
                let start = start.map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end();
            }
            parts.extend((!rest.is_empty()).then_some(rest));
            parts
        }
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

fn partition(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(failed("empty separator"));
    }
    let parts = if method == "partition" {
        text.split_once(separator).map_or([text, "", ""], |(before, after)| [before, separator, after])
    } else {
        text.rsplit_once(separator).map_or(["", "", text], |(before, after)| [before, separator, after])
    };
    Ok(Tuple::from(parts.map(Value::from)).into())
}

/// The position in characters.
fn index(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted,): (&str,) = from_args(args)?;
    let found = if method == "index" { text.find(wanted) } else { text.rfind(wanted) };
    let at = found.ok_or_else(|| failed("substring not found"))?;
    Ok(Value::from(text[..at].chars().count()))
}

fn zfill(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (width,): (i64,) = from_args(args)?;
    let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
    let zeros = "0".repeat(padding(text, width)?);
    Ok(format!("{sign}{zeros}{digits}").into())
}

fn justify(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<&str>) = from_args(args)?;
    let fill = fill.unwrap_or(" ");
    if fill.chars().count() != 1 {
        return Err(failed("the fill character must be exactly one character long"));
    }
    let padding = padding(text, width)?;
    let before = match method {
        "ljust" => 0,
        "rjust" => padding,
        // Python puts the odd character in front if the width is odd.
        _ => padding / 2 + usize::from(padding % 2 == 1 && width % 2 == 1),
    };
    Ok(format!("{}{text}{}", fill.repeat(before), fill.repeat(padding - before)).into())
}

/// Number of characters that `text` lacks to `width`.
fn padding(text: &str, width: i64) -> Result<usize, Error> {
    let width = usize::try_from(width).unwrap_or(0);
    if width > MAX_WIDTH {
        return Err(failed(&format!("a width of {width}, at most {MAX_WIDTH} are supported")));
    }
    Ok(width.saturating_sub(text.chars().count()))
}

fn failed(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.to_owned())
}
