//! Quotes words of commands that are printed to be pasted into a shell: paths and model names may contain
//! spaces and quotes.

use std::borrow::Cow;

/// The word as a POSIX shell has to read it; unchanged if it contains nothing special.
pub(crate) fn quote(word: &str) -> Cow<'_, str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "@%+=:,./_-".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', r"'\''")).into(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::quote;

    #[test]
    fn only_words_with_special_characters_are_quoted() {
        for word in ["--url", "http://127.0.0.1:8000/v1", "ttft:500ms,tpot:30ms", "models/qwen3-0.6b"] {
            assert_eq!(quote(word), word);
        }
        for word in ["", "my models", "it's", "$HOME", "a;b", "*", "~", "back\\slash", "\"", "`id`", "ä"] {
            assert_ne!(quote(word), word);
            let script = format!("printf %s {}", quote(word));
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout), word, "{script}");
        }
    }
}
