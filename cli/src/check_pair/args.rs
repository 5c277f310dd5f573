//! The command line of `outrider check-pair` and its validation.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use engine::{ParameterCount, WeightFormat};
use speculation::step::MAX_DRAFT_TOKENS;

use super::error::CheckPairError;
use super::eval::PairOptions;
use crate::count::count;
use crate::usage::check;

/// Text after the flags in `outrider check-pair --help`.
const AFTER_HELP: &str = "\
How to read it:
  acceptance rate   accepted / drafted tokens; falls with k, so compare it only at the same k
  by position       probability that a drafted token is accepted, given that all before it were; the
                    router chooses k by it
  coupled           the mode that is served: exact, and the same text with and without a draft
  rejection         the standard rule, also exact: shows how much acceptance coupling costs
  typical           lossy: accepts tokens that are likely enough under the target
  cost ratio        time of a draft step / time of a target step, measured here alternately
  k that pays       chosen by the router's own code from these acceptance counts and step times;
                    'off' if no k pays there; 'switch off' in the last column if no k pays in any
                    column

Prompts are lines of JSON, {\"task\": .., \"prompt\": ..} or {\"task\": .., \"messages\": [..]}, in a
file or in all *.jsonl of a directory. Use prompts from your own traffic; without --prompts a small
built-in set is used.

Examples:
  outrider check-pair --target models/demo/target --draft models/demo/draft
  outrider check-pair --target big --draft small --against small-retrained \\
      --prompts mine.jsonl --weights int8
  outrider check-pair --target big --draft small --quantization";

/// Arguments of `outrider check-pair`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct CheckPairArgs {
    /// The target's checkpoint
    #[arg(long, value_name = "DIR")]
    pub target: PathBuf,

    /// The draft's checkpoint
    #[arg(long, value_name = "DIR")]
    pub draft: PathBuf,

    /// Another draft to compare, such as a retrained one with the one in use
    #[arg(long, value_name = "DIR", conflicts_with = "quantization")]
    pub against: Option<PathBuf>,

    /// Prompts: a file of JSON lines, or a directory of such files
    #[arg(long, value_name = "FILE|DIR")]
    pub prompts: Option<PathBuf>,

    /// Maximum number of prompts per task type
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub num_prompts: usize,

    /// Maximum number of output tokens per sequence
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_tokens: u32,

    /// Temperatures to measure at
    #[arg(long, value_name = "T,..", value_delimiter = ',', default_value = "0,0.7,1")]
    pub temperatures: Vec<f32>,

    /// Tokens drafted per round (k), 1 to 32
    #[arg(long, value_name = "K", default_value_t = 4)]
    pub draft_tokens: u32,

    /// Weight format of the target
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub weights: WeightsArg,

    /// Weight format of the draft
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub draft_weights: WeightsArg,

    /// Compute threads
    #[arg(long, value_name = "N", default_value = "1", value_parser = count)]
    pub threads: NonZeroUsize,

    /// Ballast for the target, in parameters, such as 250M: costs time, changes no token; shows the draft's
    /// value for a bigger target
    #[arg(long, value_name = "PARAMS", default_value = "0", conflicts_with = "quantization")]
    pub ballast: ParameterCount,

    /// Round-trip time to a separate draft worker, microseconds: part of the cost of drafting there
    #[arg(long, value_name = "US", default_value_t = 300)]
    pub wire_us: u64,

    /// Print instead the effect of int8 and int4 on both models: logits, greedy agreement, acceptance by task
    /// type
    #[arg(long)]
    pub quantization: bool,

    /// Print JSON instead of Markdown
    #[arg(long)]
    pub json: bool,

    /// Stop when standard input closes, for a parent that must not leave processes behind. A router sets the
    /// variable for the check that its console starts
    #[arg(long, hide = true, env = "OUTRIDER_EXIT_ON_STDIN_CLOSE")]
    pub exit_on_stdin_close: bool,
}

/// Weight formats, as on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum WeightsArg {
    /// As the checkpoint stores them
    Auto,
    /// 32-bit floats
    F32,
    /// 16-bit floats
    Bf16,
    /// 8-bit floats by output channel, as an FP8 checkpoint stores them
    Fp8,
    /// 8-bit integers by output channel
    Int8,
    /// 4-bit integers in groups of 32
    Int4,
}

impl WeightsArg {
    /// The engine's format.
    pub fn format(self) -> WeightFormat {
        match self {
            Self::Auto => WeightFormat::AsStored,
            Self::F32 => WeightFormat::F32,
            Self::Bf16 => WeightFormat::Bf16,
            Self::Fp8 => WeightFormat::Fp8,
            Self::Int8 => WeightFormat::Int8,
            Self::Int4 => WeightFormat::Int4,
        }
    }

    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }
}

impl CheckPairArgs {
    /// How the pair is run and measured.
    pub(super) fn pair_options(&self) -> PairOptions {
        PairOptions {
            target_weights: self.weights.format(),
            draft_weights: self.draft_weights.format(),
            threads: self.threads,
            ballast: self.ballast,
            temperatures: self.temperatures.clone(),
            num_draft_tokens: self.draft_tokens,
            max_tokens: self.max_tokens,
            wire: Duration::from_micros(self.wire_us),
        }
    }

    /// Rejects invalid values; the error names the flag.
    pub(super) fn check(&self) -> Result<(), CheckPairError> {
        let (k, most) = (self.draft_tokens, MAX_DRAFT_TOKENS as u32);
        check("--draft-tokens", k, &format!("1 to {most}"), (1..=most).contains(&k))?;
        check("--num-prompts", self.num_prompts, "1 or more", self.num_prompts > 0)?;
        check("--max-tokens", self.max_tokens, "2 or more", self.max_tokens > 1)?;
        for t in &self.temperatures {
            check("--temperatures", t, "0 to 2", (0.0..=2.0).contains(t))?;
        }
        Ok(())
    }
}
