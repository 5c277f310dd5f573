//! `outrider plan`: computes what a pair of models needs and yields on given GPUs, from their config.json
//! alone, before any GPU is rented.
//!
//! Arguments -> [`Inputs`] -> [`Plan`] (`placement`, over `gpu`, `weights`, `step_time`, `round`, `limits`,
//! all pure) -> a table or JSON (`table`). It computes from data sheets and assumptions, and prints the
//! assumptions. It measures nothing and must never look as if it did.

pub mod gpu;
pub mod groups;
pub mod limits;
pub mod placement;
pub mod round;
pub mod step_time;
mod table;
pub mod weights;

use std::path::PathBuf;
use std::process::ExitCode;

use engine::{EngineError, ModelShape};

use gpu::GpuSet;
use placement::{Inputs, ModelOnGpus, Plan, Prices, Traffic};
use step_time::Assumptions;
use weights::{Format, KvFormat};

use crate::output;
use crate::usage::{UsageError, check};

/// Numbers of ranks over which the engine can split a model (docs/contract.md C2).
const RANKS: [u32; 4] = [1, 2, 4, 8];

/// Text after the flags in `outrider plan --help`.
const AFTER_HELP: &str = "\
How to read it:
  weights       every parameter at its format's width; scales of quantized weights and parameters
                that are never quantized (input embeddings, norms) are counted separately and must
                fit as well
  KV budget     memory left for keys and values; divided by --context it gives the concurrency
  colocated     the draft runs on the target's GPUs, alternating with it: no wire, but the target
                waits, and the draft's weights and KV use memory that the target's KV could use
  apart         the draft has separate GPUs (--draft-gpus): it uses none of the target's memory
  wanted ratio  draft GPUs per target beyond which one more adds less than 5%
  breaks first  which of memory, bandwidth, compute, draft and speculation reaches its limit at the
                fewest sequences

Step times follow a roofline model: the slower of memory reads and arithmetic, at assumed shares of
the data sheet. Measure your own with `outrider engine-bench` and set --bandwidth-share. Acceptance
matters most: measure it with `outrider check-pair` and give it by position
(--acceptance 0.8,0.75,0.7).
Cost is printed if --gpu-price is given: prices change too often to have defaults.

Examples:
  outrider plan --target llama-70b/config.json --draft llama-8b/config.json --gpus 2xH100-80 \\
      --weights int8
  outrider plan --target qwen3-32b --draft qwen3-0.6b --gpus 2xA100-80 --draft-gpus 1xL4 \\
      --acceptance 0.65 --rate 4 --gpu-price 1.80 --draft-gpu-price 0.60";

/// Arguments of `outrider plan`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct PlanArgs {
    /// The target's config.json, or its directory
    #[arg(long, value_name = "CONFIG")]
    pub target: PathBuf,

    /// The draft's config.json, or its directory; without it only plain decoding is planned
    #[arg(long, value_name = "CONFIG")]
    pub draft: Option<PathBuf>,

    /// The targets' GPUs, such as 2xH100-80. Known: B200-180, H200-141, H100-80, H100-PCIE-80, A100-80,
    /// A100-40, L40S-48, L4-24, A10-24, T4-16, RTX5090-32, RTX4090-24, RTX3090-24
    #[arg(long, value_name = "NxGPU")]
    pub gpus: GpuSet,

    /// Number of targets that share those GPUs; each splits its model over its part
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub targets: u32,

    /// GPUs only for drafting, such as 4xL4; each holds the whole draft
    #[arg(long, value_name = "NxGPU", requires = "draft")]
    pub draft_gpus: Option<GpuSet>,

    /// Weight format of the target
    #[arg(long, value_name = "FORMAT", default_value = "bf16")]
    pub weights: Format,

    /// Weight format of the draft
    #[arg(long, value_name = "FORMAT", default_value = "bf16")]
    pub draft_weights: Format,

    /// Format of keys and values, for both models
    #[arg(long, value_name = "FORMAT", default_value = "bf16")]
    pub kv: KvFormat,

    /// Tokens per sequence: prompt and output
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    pub context: u32,

    /// Output tokens per sequence; the rest of --context is the prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    pub output_tokens: u32,

    /// Probability that a drafted token is accepted, given that all before it were; several values: by
    /// position, the last one repeats
    #[arg(long, value_name = "P,..", value_delimiter = ',', default_value = "0.7")]
    pub acceptance: Vec<f64>,

    /// Requests per second to serve
    #[arg(long, value_name = "REQUESTS")]
    pub rate: Option<f64>,

    /// Loads to show, in sequences per target; loads beyond the memory limit are dropped, the limit itself is
    /// added
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,4,16,64,256")]
    pub concurrency: Vec<u32>,

    /// Price of one target GPU per hour, in any currency
    #[arg(long, value_name = "PRICE")]
    pub gpu_price: Option<f64>,

    /// Price of one draft GPU per hour, in the same currency
    #[arg(long, value_name = "PRICE")]
    pub draft_gpu_price: Option<f64>,

    #[command(flatten)]
    assumed: Assumptions,

    /// Print JSON instead of tables
    #[arg(long)]
    pub json: bool,
}

/// Errors of `outrider plan`.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The value of a flag is invalid.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// A config.json cannot be read, or its architecture is unknown.
    #[error(transparent)]
    Config(#[from] EngineError),
}

/// Runs the subcommand. Prints an error on one line.
pub fn main(args: &PlanArgs) -> ExitCode {
    match inputs(args) {
        Ok(inputs) => {
            let plan = Plan::new(&inputs);
            output::finish(&match args.json {
                true => format!("{}\n", serde_json::json!(plan)),
                false => table::text(&plan),
            })
        }
        Err(error) => output::failed(&error, matches!(error, PlanError::Usage(_))),
    }
}

/// Validates the arguments.
pub fn inputs(args: &PlanArgs) -> Result<Inputs, PlanError> {
    let share = |flag, value: f64| check(flag, value, "more than 0, at most 1", value > 0.0 && value <= 1.0);
    let amount = |flag, value: f64| check(flag, value, "0 or more", value >= 0.0 && value.is_finite());
    let assumed = &args.assumed;
    share("--bandwidth-share", assumed.bandwidth_share)?;
    share("--compute-share", assumed.compute_share)?;
    share("--memory-share", assumed.memory_share)?;
    amount("--step-overhead-us", assumed.step_overhead_us)?;
    amount("--all-reduce-us", assumed.all_reduce_us)?;
    amount("--wire-us", assumed.wire_us)?;
    amount("--router-us", assumed.router_us)?;
    check("--max-batch-rows", assumed.rows_max, "1 or more", assumed.rows_max > 0)?;
    for &rate in &args.acceptance {
        check("--acceptance", rate, "0 to 1", (0.0..=1.0).contains(&rate))?;
    }
    for (flag, value) in
        [("--rate", args.rate), ("--gpu-price", args.gpu_price), ("--draft-gpu-price", args.draft_gpu_price)]
    {
        check(flag, value.unwrap_or(1.0), "more than 0", value.is_none_or(|v| v > 0.0 && v.is_finite()))?;
    }
    let least = args.concurrency.iter().copied().min().unwrap_or(1);
    check("--concurrency", least, "1 or more", least > 0)?;
    let whole = args.targets > 0 && args.gpus.count.is_multiple_of(args.targets);
    check("--targets", args.targets, &format!("a divisor of {} GPUs", args.gpus.count), whole)?;
    let ranks = args.gpus.count / args.targets;
    check("--gpus", args.gpus, "1, 2, 4 or 8 GPUs for each of --targets", RANKS.contains(&ranks))?;

    let target = ModelShape::read(&args.target)?;
    let draft = args.draft.as_deref().map(ModelShape::read).transpose()?;
    let most = draft.as_ref().map_or(target.max_len, |draft| draft.max_len.min(target.max_len));
    let holds = |tokens| (1..=most).contains(&tokens);
    check("--context", args.context, &format!("1 to {most}, the models' own limit"), holds(args.context))?;
    let output_fits = (1..=args.context).contains(&args.output_tokens);
    check("--output-tokens", args.output_tokens, "1 to --context", output_fits)?;

    Ok(Inputs {
        target: ModelOnGpus {
            shape: target,
            format: args.weights,
            gpus: GpuSet { count: ranks, ..args.gpus },
        },
        targets: args.targets,
        draft: draft.map(|shape| (shape, args.draft_weights)),
        draft_gpus: args.draft_gpus,
        kv: args.kv,
        traffic: Traffic {
            context: args.context,
            output_tokens: args.output_tokens,
            acceptance: args.acceptance.clone(),
            rate: args.rate,
            loads: args.concurrency.clone(),
        },
        prices: Prices { gpu: args.gpu_price, draft_gpu: args.draft_gpu_price },
        assumed: *assumed,
    })
}
