//! Why no load could be made. What happens to single requests is no error of the generator: it is counted as an [`Outcome`](super::sample::Outcome).

use std::path::PathBuf;

/// Why there is nothing to measure.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The URL is not one that the generator can speak to.
    #[error("url `{url}`: {reason}")]
    Url {
        /// As given.
        url: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// Nobody answers there, or not as an OpenAI endpoint does.
    #[error("cannot ask {url}: {reason}")]
    Unreachable {
        /// What was asked.
        url: String,
        /// What happened.
        reason: String,
    },
    /// A file of prompts could not be read.
    #[error("cannot read prompts from {path}: {source}")]
    ReadPrompts {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A line is no prompt.
    #[error("{path}, line {line}: {reason}")]
    BadPrompt {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong, and what is expected.
        reason: String,
    },
    /// No prompt at all.
    #[error("no prompt in {path}: expected lines of JSON with `task` and `prompt` or `messages`")]
    NoPrompts {
        /// The file or directory.
        path: PathBuf,
    },
}
