//! The command line of `outrider distill` and its validation.

use std::path::PathBuf;

use crate::check_pair::WeightsArg;
use crate::usage::{UsageError, check};

const AFTER_HELP: &str = "\
The log is the file that a router writes with --request-log FILE; the previous part, FILE.1, is
read as well if it exists. One row in ten, chosen by a hash of its prompt, is held out: it is used
for evaluation and never for training.

Training minimizes 0.8 KL(target || draft) + 0.2 cross entropy over the answers of the log. The new
draft has the shape, the tokenizer and the number format of the old one.

It is written after the last step: what is interrupted before is lost. Split a long training into
several runs, each with --draft naming the draft of the run before.

Examples:
  outrider distill --log requests.jsonl --target models/target --draft models/draft \\
      --out models/draft-2
  outrider distill --log a.jsonl --log b.jsonl --target big --weights int8 --draft small \\
      --out small-2 --steps 2000";

/// Arguments of `outrider distill`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct DistillArgs {
    /// A router's request log (--request-log); may be given several times
    #[arg(long, value_name = "FILE", required = true)]
    pub log: Vec<PathBuf>,

    /// The target's checkpoint
    #[arg(long, value_name = "DIR")]
    pub target: PathBuf,

    /// Checkpoint of the draft in use: training starts from its weights
    #[arg(long, value_name = "DIR")]
    pub draft: PathBuf,

    /// Directory for the new draft; must not exist
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,

    /// Training steps
    #[arg(long, value_name = "N", default_value_t = 300)]
    pub steps: usize,

    /// Windows of text per training step
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batch: usize,

    /// Tokens per window: the context that the draft sees in training
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub context: usize,

    /// Peak learning rate
    #[arg(long, value_name = "RATE", default_value_t = 3e-4)]
    pub learning_rate: f64,

    /// Seed for the order of windows
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Minimum number of answer tokens to train on: with fewer the draft overfits
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    pub min_tokens: usize,

    /// Use only rows of this model, by its name in the log
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,

    /// Weight format of the target, as in serving
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub weights: WeightsArg,

    /// Held-out prompts per task type in the comparison
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub num_prompts: usize,

    /// Maximum number of output tokens per held-out prompt
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_tokens: u32,

    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

impl DistillArgs {
    /// Rejects invalid values; the error names the flag.
    pub(super) fn check(&self) -> Result<(), UsageError> {
        check("--steps", self.steps, "1 or more", self.steps > 0)?;
        check("--batch", self.batch, "1 or more", self.batch > 0)?;
        check("--context", self.context, "8 or more", self.context >= 8)?;
        let rate = self.learning_rate;
        check("--learning-rate", rate, "above 0, below 1", rate > 0.0 && rate < 1.0)?;
        check("--num-prompts", self.num_prompts, "1 or more", self.num_prompts > 0)?;
        check("--max-tokens", self.max_tokens, "2 or more", self.max_tokens > 1)?;
        check("--out", self.out.display(), "a directory that does not exist", !self.out.exists())
    }
}
