//! The text of an error with its causes.

use std::error::Error;

/// The error and its causes, each once: many errors end with the text of their cause.
pub fn error_text(error: &anyhow::Error) -> String {
    causes_text(error.as_ref())
}

/// As [`error_text`], of any error.
pub(crate) fn causes_text(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for cause in anyhow::Chain::new(error).map(ToString::to_string).filter(|cause| !cause.is_empty()) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_cause_is_printed_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot read a file: {source}")]
        struct Read {
            source: std::io::Error,
        }
        let read = Read { source: std::io::Error::other("no such file") };
        let error = anyhow::Error::new(read).context("--model m");
        assert_eq!(error_text(&error), "--model m: cannot read a file: no such file");
        let error = anyhow::anyhow!("no route").context("tcp connect error").context("tcp connect error");
        assert_eq!(error_text(&error), "tcp connect error: no route");
    }
}
