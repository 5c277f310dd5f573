//! The tags `{% generation %}` and `{% endgeneration %}` of transformers. They mark the assistant's part of a
//! conversation for training and change no text, so they become a condition that always holds.

use std::borrow::Cow;

const OPEN: &str = "{%";
const CLOSE: &str = "%}";

/// Replaces the tags, keeping their marks for whitespace.
pub(super) fn without_generation_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut changed = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find(OPEN) {
        let (before, tag) = rest.split_at(start);
        changed.push_str(before);
        let len = tag.find(CLOSE).map_or(tag.len(), |end| end + CLOSE.len());
        let (tag, after) = tag.split_at(len);
        match replacement(tag) {
            Some(tag) => changed.push_str(&tag),
            None => changed.push_str(tag),
        }
        rest = after;
    }
    changed.push_str(rest);
    Cow::Owned(changed)
}

/// The tag to use for a whole tag from `{%` to `%}`, if it is one of the two.
fn replacement(tag: &str) -> Option<String> {
    let inner = tag.strip_prefix(OPEN)?.strip_suffix(CLOSE)?;
    let is_mark = |c: char| matches!(c, '-' | '+');
    let unmarked = inner.strip_prefix(is_mark).unwrap_or(inner);
    let unmarked = unmarked.strip_suffix(is_mark).unwrap_or(unmarked);
    let word = match unmarked.trim() {
        "generation" => "if true",
        "endgeneration" => "endif",
        _ => return None,
    };
    Some(tag.replacen(unmarked.trim(), word, 1))
}
