//! Errors of `outrider distill`.

use std::path::PathBuf;

use distill::DistillError;

use crate::check_pair::error::CheckPairError;
use crate::usage::UsageError;

/// Why a draft could not be distilled.
#[derive(Debug, thiserror::Error)]
pub enum DistillCommandError {
    /// The value of a flag is invalid.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The disk has no room for the new draft.
    #[error(
        "cannot write {}: the new draft takes {} MB, and {} MB are free there: free some, or choose another --out",
        out.display(), needed.div_ceil(1_000_000), free / 1_000_000
    )]
    NoSpace {
        /// The directory to write.
        out: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// Target and draft number their tokens differently.
    #[error("{} cannot draft for {}: {difference}", draft.display(), target.display())]
    TokenizersDiffer {
        /// The draft's checkpoint.
        draft: PathBuf,
        /// The target's checkpoint.
        target: PathBuf,
        /// The first difference.
        difference: String,
    },
    /// The log has rows of several models.
    #[error("the log has rows of several models, {models}: choose one with --model")]
    SeveralModels {
        /// Their names.
        models: String,
    },
    /// The log has rows, but none of the selected model.
    #[error("the log has no row of --model {model}, only of {others}")]
    NoSuchModel {
        /// The selected name.
        model: String,
        /// The names in the log.
        others: String,
    },
    /// The log has too few answer tokens.
    #[error(
        "the log has {tokens} answer tokens in {rows} rows to train on, fewer than the {min_tokens} of --min-tokens: log more"
    )]
    TooFewTokens {
        /// Answer tokens.
        tokens: usize,
        /// Number of rows that contain them.
        rows: usize,
        /// The required minimum.
        min_tokens: usize,
    },
    /// No row is held out for evaluation.
    #[error("no row of the log is held out for evaluation (one prompt in {0} is): log more distinct prompts")]
    NoHeldOutRows(u64),
    /// The model in training computes other logits than the engine.
    #[error(
        "{} cannot be trained: its logits differ from the engine's by up to {difference:.3}, so config.json uses a feature that training does not support",
        draft.display()
    )]
    LogitsDiffer {
        /// The draft's checkpoint.
        draft: PathBuf,
        /// Largest difference of a single logit.
        difference: f32,
    },
    /// A checkpoint or the pair cannot be used.
    #[error(transparent)]
    Pair(#[from] CheckPairError),
    /// The draft cannot be trained or written.
    #[error(transparent)]
    Training(#[from] DistillError),
}
