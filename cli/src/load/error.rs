//! Errors of the load generator. A failed request is not one of them: it is counted as an
//! [`RequestOutcome`](super::sample::RequestOutcome).

use std::path::PathBuf;

/// Why nothing can be measured.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The generator does not support the URL.
    #[error("url `{url}`: {reason}")]
    Url {
        /// The URL as given.
        url: String,
        /// The problem and what is expected.
        reason: String,
    },
    /// No server answers, or it is not an OpenAI endpoint.
    #[error("request to {url} failed: {reason}")]
    Unreachable {
        /// The requested URL.
        url: String,
        /// The failure.
        reason: String,
    },
    /// A file of prompts could not be read.
    #[error("cannot read prompts from {path}: {source}")]
    ReadPrompts {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A line is not a valid prompt.
    #[error("{path}, line {line}: {reason}")]
    BadPrompt {
        /// The file.
        path: PathBuf,
        /// Line number, counted from 1.
        line: usize,
        /// The problem and what is expected.
        reason: String,
    },
    /// There is no prompt.
    #[error("no prompt in {path}: expected lines of JSON with `task` and `prompt` or `messages`")]
    NoPrompts {
        /// The file or directory.
        path: PathBuf,
    },
}
