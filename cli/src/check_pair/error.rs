//! Why a pair could not be checked.

use std::path::PathBuf;

use engine::EngineError;
use speculation::fingerprint::TokenListError;
use speculation::logits::DrawError;
use text::ModelTextError;

use crate::load::LoadError;

/// Why a pair could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum CheckPairError {
    /// A flag makes no sense.
    #[error("{flag} is {value}, expected {expected}")]
    Usage {
        /// Which.
        flag: &'static str,
        /// As it was given.
        value: String,
        /// What would have been accepted.
        expected: String,
    },
    /// A file of a checkpoint cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A tokenizer that is none.
    #[error("{}: {source}", path.display())]
    TokenList {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: TokenListError,
    },
    /// A checkpoint whose text cannot be read.
    #[error("{}: {source}", directory.display())]
    Text {
        /// The checkpoint.
        directory: PathBuf,
        /// What is wrong with it.
        source: ModelTextError,
    },
    /// A prompt that the chat template or the tokenizer refuses.
    #[error("a prompt of task type {task} cannot be used: {reason}")]
    Prompt {
        /// Its task type.
        task: String,
        /// What was wrong.
        reason: String,
    },
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The prompts cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Logits that nothing can be drawn from.
    #[error(transparent)]
    Draw(#[from] DrawError),
    /// The two number their tokens differently.
    #[error("the pair cannot be served: {0}")]
    Unpaired(String),
    /// The rules of a sequence broke off.
    #[error("a sequence could not be decoded: {0}")]
    Sequence(String),
    /// No prompt leaves room for an output.
    #[error("no prompt fits the models' window of {0} tokens with --max-tokens: give shorter ones")]
    NothingFits(u32),
}
