//! Why a draft could not be distilled.

use std::path::PathBuf;

use distill::DistillError;

use crate::check_pair::error::CheckPairError;

/// Why a draft could not be distilled.
#[derive(Debug, thiserror::Error)]
pub enum DistillCommandError {
    /// A flag makes no sense.
    #[error("{flag} is {value}, expected {expected}")]
    Usage {
        /// Which.
        flag: &'static str,
        /// As it was given.
        value: String,
        /// What would have been accepted.
        expected: &'static str,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The two number their tokens differently.
    #[error("{} cannot draft for {}: {difference}", draft.display(), target.display())]
    Unpaired {
        /// The draft's checkpoint.
        draft: PathBuf,
        /// The target's.
        target: PathBuf,
        /// The first difference.
        difference: String,
    },
    /// Rows of several models.
    #[error("the log has rows of several models, {models}: choose one with --model")]
    SeveralModels {
        /// Their names.
        models: String,
    },
    /// Not enough to learn from.
    #[error(
        "the log has {tokens} answer tokens in {rows} rows to train on, fewer than the {min_tokens} of --min-tokens: log more"
    )]
    TooFewTokens {
        /// Answer tokens.
        tokens: usize,
        /// Rows that they are in.
        rows: usize,
        /// As asked for.
        min_tokens: usize,
    },
    /// Nothing to judge by.
    #[error("no row of the log is held out to judge by (one prompt in {0} is): log more different prompts")]
    NothingHeldOut(u64),
    /// The trained model is another one than the served one.
    #[error(
        "{} cannot be trained here: its logits are up to {difference:.3} from the engine's, so that config.json asks for something that training does not know",
        draft.display()
    )]
    NotTheEnginesModel {
        /// The draft's checkpoint.
        draft: PathBuf,
        /// Largest difference of one logit.
        difference: f32,
    },
    /// A checkpoint or the pair cannot be used.
    #[error(transparent)]
    Pair(#[from] CheckPairError),
    /// The draft cannot be trained or written.
    #[error(transparent)]
    Training(#[from] DistillError),
}
