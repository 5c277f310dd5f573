//! The command line of `outrider up`, unresolved. `preflight` applies defaults and checks it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

use engine::ParameterCount;
use worker::compute_device::ComputeDevice;
use worker::memory::{MemoryLimit, is_memory_fraction};

use crate::check_pair::WeightsArg;
use crate::count::count;

/// Upper limit of workers on one machine, to catch typing errors.
const WORKERS_MAX: u64 = 64;

const EXAMPLES: &str = "\
Once all are ready it prints where they listen and a curl command to paste; then, within seconds,
what drafting gained on this machine: one seeded prompt with drafts and without, token ids compared.
If one process ends, the others are stopped too.

Examples:
  # The bundled pair: it writes nonsense, at the pace of a model of 250M parameters.
  outrider up
  outrider up --target models/qwen3-8b --draft models/qwen3-0.6b --weights int8
  # Drafts from n-grams of the text, without a second model.
  outrider up --target models/qwen3-8b --draft ngram
  # The target on a GPU; its draft stays on the CPU.
  outrider up --target models/qwen3-8b --draft models/qwen3-0.6b --device cuda:0
  # Synthetic workers with the step times of a profile, for tests of routers and load.
  outrider up --engine synthetic:deploy/profiles/8b-h100.toml";

/// Arguments of `outrider up`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct UpArgs {
    /// Checkpoint directory of the target model [default: the bundled models/demo/target]
    #[arg(long, value_name = "DIR")]
    pub target: Option<PathBuf>,

    /// Draft: a checkpoint directory, `ngram` or `none` [default: the bundled models/demo/draft; with
    /// --target, ngram]
    #[arg(long, value_name = "DIR|ngram|none")]
    pub draft: Option<DraftArg>,

    /// Run synthetic workers, which reproduce a profile's step times (deploy/profiles) and compute nothing,
    /// instead of models
    #[arg(long, value_name = "synthetic:FILE", conflicts_with = "target")]
    pub engine: Option<SyntheticArg>,

    /// Factor on every step time of a synthetic engine: 2 makes it half as fast
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = time_scale, requires = "engine")]
    pub time_scale: f64,

    /// Number of draft workers [default: 1, or the profile's number]
    #[arg(long, value_name = "N", value_parser = workers())]
    pub draft_workers: Option<u64>,

    /// Number of target workers [default: 1, or the profile's number]
    #[arg(long, value_name = "N", value_parser = workers())]
    pub target_workers: Option<u64>,

    /// Address of the HTTP APIs (OpenAI's and Anthropic's); port 0 selects a free port
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    pub http: SocketAddr,

    /// Address of the gRPC APIs; port 0 selects a free port
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8001")]
    pub grpc: SocketAddr,

    /// Address of the router's console and metrics; port 0 selects a free port
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8002")]
    pub admin: SocketAddr,

    /// Ballast of the target, in parameters, such as 250M: for demonstrations. Ballast changes no token but
    /// costs the time and memory (2 bytes per parameter) of a bigger model, so that drafting has something to
    /// gain; 0 adds none [default: 250M for the bundled target, else 0]
    #[arg(long, value_name = "PARAMS", conflicts_with = "engine")]
    pub ballast: Option<ParameterCount>,

    /// Weight format of both models [default: auto]
    #[arg(long, value_name = "FORMAT", env = "OUTRIDER_WEIGHTS")]
    pub weights: Option<WeightsArg>,

    /// Compute device of the target workers: cpu, a GPU as cuda:0, or several GPUs of this machine as
    /// cuda:0,1 to split the model over them
    #[arg(long, value_name = "DEVICE", default_value_t = ComputeDevice::Cpu, conflicts_with = "engine")]
    pub device: ComputeDevice,

    /// Compute device of the draft workers, if the draft is a model. On the CPU they take nothing from a
    /// target on a GPU, and draft ahead while it verifies
    #[arg(long, value_name = "DEVICE", default_value_t = ComputeDevice::Cpu, conflicts_with = "engine")]
    pub draft_device: ComputeDevice,

    /// KV cache memory limit of each target worker, for example 2GiB, or 60% of the memory of the machine or
    /// container [default: 1GiB; on GPUs set by --gpu-memory-utilization]
    #[arg(long, value_name = "SIZE", env = "OUTRIDER_KV_MEMORY", value_parser = memory_size)]
    pub kv_memory: Option<String>,

    /// KV cache memory limit of each draft worker, with the same default
    #[arg(long, value_name = "SIZE", env = "OUTRIDER_KV_MEMORY", value_parser = memory_size)]
    pub draft_kv_memory: Option<String>,

    /// For workers on GPUs: fraction of the memory to use; the KV cache gets what weights, a forward pass and
    /// other processes leave of it [default: 0.9]
    #[arg(long, value_name = "PART", value_parser = part)]
    pub gpu_memory_utilization: Option<f32>,

    /// Skip the measurement of what drafting gains, once all are ready
    #[arg(long)]
    pub no_evidence: bool,

    /// Compute threads per worker on the CPU [default: the worker's default, all cores: draft and target run
    /// in turns]
    #[arg(long, value_name = "N", value_parser = count)]
    pub threads: Option<NonZeroUsize>,

    /// File of accepted API keys, one per line (deploy/README.md, API keys); without it only loopback
    /// addresses may be served
    #[arg(long, value_name = "FILE")]
    pub api_keys: Option<PathBuf>,

    /// Log level of the processes: error, warn, info, debug, trace, or a filter like `router=debug,info`
    /// [default: info, shown once all are ready]
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<String>,
}

/// The value of `--draft`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftArg {
    /// A checkpoint directory. A directory named `ngram` or `none` is written `./ngram`.
    Model(PathBuf),
    /// The table of n-grams.
    Ngram,
    /// No draft.
    None,
}

impl FromStr for DraftArg {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "ngram" => Self::Ngram,
            "none" => Self::None,
            directory => Self::Model(directory.into()),
        })
    }
}

/// The value of `--engine`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyntheticArg {
    /// The profile's file.
    pub profile: PathBuf,
}

impl FromStr for SyntheticArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("synthetic:") {
            Some(file) if !file.is_empty() => Ok(Self { profile: file.into() }),
            _ => Err("expected synthetic:FILE, a profile like those in deploy/profiles".to_owned()),
        }
    }
}

fn time_scale(text: &str) -> Result<f64, String> {
    let factor = f64::from_str(text).ok().filter(|factor| *factor > 0.0 && factor.is_finite());
    factor.ok_or_else(|| "expected a factor above 0, such as 2 for half the speed".to_owned())
}

/// Checks a size of memory, which the worker reads again.
fn memory_size(text: &str) -> Result<String, String> {
    text.parse::<MemoryLimit>().map(|_| text.to_owned())
}

fn part(text: &str) -> Result<f32, String> {
    let part = f32::from_str(text).ok().filter(|part| is_memory_fraction(*part));
    part.ok_or_else(|| "expected a part above 0 and at most 1, such as 0.8".to_owned())
}

fn workers() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=WORKERS_MAX)
}
