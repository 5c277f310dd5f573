//! Errors of `outrider check-pair`.

use std::path::PathBuf;

use engine::EngineError;
use speculation::fingerprint::TokenListError;
use speculation::logits::DrawError;
use text::ModelTextError;

use crate::load::LoadError;
use crate::usage::UsageError;

/// Why a pair could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum CheckPairError {
    /// The value of a flag is invalid.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// A file of a checkpoint cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A checkpoint's tokenizer is not valid.
    #[error("{}: {source}", directory.display())]
    TokenList {
        /// The checkpoint.
        directory: PathBuf,
        /// What is wrong with it.
        source: TokenListError,
    },
    /// A checkpoint's tokenizer or chat template cannot be read.
    #[error("{}: {source}", directory.display())]
    Text {
        /// The checkpoint.
        directory: PathBuf,
        /// What is wrong with it.
        source: ModelTextError,
    },
    /// The chat template or the tokenizer rejects a prompt.
    #[error("a prompt of task type {task} cannot be used: {reason}")]
    Prompt {
        /// Its task type.
        task: String,
        /// The reason.
        reason: String,
    },
    /// The engine returned an error.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The prompts cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Logits from which no token can be drawn.
    #[error(transparent)]
    Draw(#[from] DrawError),
    /// Target and draft number their tokens differently.
    #[error("the pair cannot be served: {0}")]
    TokenizersDiffer(String),
    /// The rules of a sequence failed.
    #[error("a sequence could not be decoded: {0}")]
    Sequence(String),
    /// No prompt leaves space for an output.
    #[error(
        "no prompt fits the models' window of {0} tokens together with --max-tokens: use shorter prompts"
    )]
    NoPromptFits(u32),
}
