//! `outrider engine-bench`: the cost of a forward on this machine, by rows and context, relative to its
//! memory bandwidth.
//!
//! Loads one engine per requested format, then measures case by case (`measure`), alternating between formats
//! and plain memory reads: the speed of a shared machine varies, so only adjacent measurements are compared.
//! Shows the progress on standard error and prints the results (`report`).

mod measure;
mod memory;
mod report;
mod slower;

use std::fs::File;
use std::io::Write as _;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use engine::{Engine, EngineError, KernelError, LoadOptions, ReadProbe, WeightFormat};
use speculation::logits::DrawError;

use measure::{Bench, Case, FormatBench};
use memory::{LoadMemoryMeter, probe_bytes};

use crate::count::count;
use crate::output;
use crate::progress::Progress;
use crate::usage::{UsageError, check};

/// Seed of random weights, so that two runs measure the same model.
const SEED: u64 = 1;
/// An upper limit: KV memory is allocated as sequences grow.
const KV_MEMORY_BYTES: u64 = 16 << 30;
/// Number of sequences in the batch case, with one row each.
const BATCH: usize = 8;
/// Upper limit for counts on the command line, to catch typing errors.
const COUNT_MAX: usize = 1 << 20;

/// Text after the arguments in `--help`.
const AFTER_HELP: &str = "\
How to read it:
  A step is a forward over `rows` new tokens of each sequence after `context` cached tokens, and
  one draw (temperature 1) from each row of logits. Up to 64 rows, logits are computed for all
  rows, as in verification; above, the rows are a prompt, and only the last one needs logits:
  these tokens/s are the prefill speed.
  bandwidth share: the bytes that a forward must read (weights, keys and values; not the
  embedding table) relative to the bytes that plain loops read from memory in the same time,
  measured alternately with the forwards. 1.0 is the limit; the value at one row shows the
  quality of decoding, those at 8 and 16 rows what speculation and batching can gain.
  attention, vocabulary, draws: shares of the step, timed within it (attention and vocabulary use
  several threads, draws one).
  warning: a smaller format took longer than a larger one by more than noise (5%).
  knee: the largest number of rows whose forward costs at most 1.5 times that of one row.

Examples:
  outrider engine-bench --model models/demo/target
  outrider engine-bench --model random:config.json --weights bf16,int8,int4 --threads 2 \\
      --context 128,2048,8192
  outrider engine-bench --model random:config.json --weights bf16,int8,int4 --isa avx2
  outrider engine-bench --model random:config.json --weights int8 --vocab 152000 --rows 1 --json";

/// Arguments of `outrider engine-bench`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct EngineBenchArgs {
    /// Checkpoint directory, or `random:` and the path of a config.json for random weights of that shape
    #[arg(long, value_name = "DIR|random:CONFIG.json")]
    pub model: String,

    /// Weight formats: auto, f32, bf16, fp8, int8 or int4; several are measured in turns
    #[arg(long, value_name = "FORMAT,..", default_value = "auto")]
    pub weights: String,

    /// Vocabulary size in place of config.json's, with `random:` only
    #[arg(long, value_name = "N")]
    pub vocab: Option<u32>,

    /// Compute threads
    #[arg(long, value_name = "N", default_value = "1", value_parser = count)]
    pub threads: NonZeroUsize,

    /// Pin each compute thread to a separate core, of those that this process may use
    #[arg(long)]
    pub pin: bool,

    /// Instruction set, one that this CPU supports; the environment variable OUTRIDER_ISA sets it for every
    /// process [default: the fastest]
    #[arg(long, value_name = "NAME")]
    pub isa: Option<String>,

    /// Rows of one sequence per forward
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,2,4,8,16,32,64,512")]
    pub rows: Vec<usize>,

    /// Tokens in a sequence before the forward
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "128,2048")]
    pub context: Vec<usize>,

    /// Minimum time per case, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 600)]
    pub case_ms: u64,

    /// Memory to read for the bandwidth measurement, MiB; limited to a quarter of the available memory
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    pub read_mib: usize,

    /// Print JSON instead of a table, one object per format
    #[arg(long)]
    pub json: bool,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
enum EngineBenchError {
    #[error(transparent)]
    Usage(#[from] UsageError),
    #[error("{0}")]
    Engine(#[from] EngineError),
    #[error("a draw failed: {0}")]
    Draw(#[from] DrawError),
    #[error("cannot use {} with --vocab: {source}", path.display())]
    Config { path: PathBuf, source: std::io::Error },
    #[error("no case fits the model's window of {0} tokens: use a smaller --context")]
    NoCaseFits(u32),
}

/// Runs the subcommand. Prints an error on one line.
pub fn main(args: &EngineBenchArgs) -> ExitCode {
    match run(args) {
        Ok(text) => output::finish(&text),
        Err(error) => output::failed(&error, matches!(error, EngineBenchError::Usage(_))),
    }
}

/// Measures and returns the text to print.
fn run(args: &EngineBenchArgs) -> Result<String, EngineBenchError> {
    let formats = formats(&args.weights)?;
    let threads = args.threads.get();
    check_counts("--rows", &args.rows)?;
    check_counts("--context", &args.context)?;
    check_counts("--read-mib", &[args.read_mib])?;
    check_counts("--vocab", args.vocab.map(|vocab| vocab as usize).as_slice())?;
    if let Some(name) = &args.isa {
        use_instruction_set(name)?;
    }
    let model = Model::new(args)?;
    let mut loaded = Vec::new();
    for (name, format) in formats {
        let (watch, begin) = (LoadMemoryMeter::begin(), Instant::now());
        let engine = model.load(format, threads)?;
        loaded.push(FormatBench::new(name, engine, (begin.elapsed(), watch.end())));
    }
    let window = loaded.iter().map(|format| format.engine.info().max_model_len).min().unwrap_or(0);
    let (cases, left_out): (Vec<Case>, Vec<Case>) =
        cases(args).into_iter().partition(|case| case.context + case.rows <= window as usize);
    if cases.is_empty() {
        return Err(EngineBenchError::NoCaseFits(window));
    }
    let probe = ReadProbe::new(probe_bytes(args.read_mib << 20), threads)?;
    if args.pin {
        // All threads were started before: a thread started by a pinned one would inherit its single core.
        let cores = engine::allowed_cores()?;
        loaded.iter_mut().try_for_each(|format| format.engine.pin_threads(&cores))?;
    }
    let mut bench = Bench::new(loaded, probe, Duration::from_millis(args.case_ms));
    let progress = Progress::new(cases.len(), "cases");
    for case in &cases {
        let Case { context, rows, sequences } = case;
        progress.begin_part(format!("context {context}, sequences {sequences}, rows {rows}"));
        bench.measure(*case)?;
        progress.finish_unit();
    }
    progress.end();
    Ok(report::text(args, &bench.finish()?, &left_out))
}

/// All cases, ordered by context, so that a sequence only grows.
fn cases(args: &EngineBenchArgs) -> Vec<Case> {
    let mut contexts = args.context.clone();
    contexts.sort_unstable();
    let one = |context| args.rows.iter().map(move |&rows| Case { context, rows, sequences: 1 });
    let batch = |context| Case { context, rows: 1, sequences: BATCH };
    contexts.into_iter().flat_map(|context| one(context).chain([batch(context)])).collect()
}

fn formats(list: &str) -> Result<Vec<(String, WeightFormat)>, UsageError> {
    let usage = |name: &str| UsageError {
        flag: "--weights",
        value: format!("`{name}`"),
        expected: "auto, f32, bf16, fp8, int8, int4, or a comma-separated list".to_owned(),
    };
    list.split(',')
        .map(|name| Ok((name.to_owned(), WeightFormat::named(name).ok_or_else(|| usage(name))?)))
        .collect()
}

/// Must be called before the first engine is loaded.
fn use_instruction_set(name: &str) -> Result<(), EngineBenchError> {
    engine::use_instruction_set(name).map_err(|error| match error {
        EngineError::Kernel(KernelError::MissingInstructionSet { name, available }) => UsageError {
            flag: "--isa",
            value: format!("`{name}`"),
            expected: format!("one that this CPU supports: {available}"),
        }
        .into(),
        other => other.into(),
    })
}

fn check_counts(flag: &'static str, counts: &[usize]) -> Result<(), UsageError> {
    let expected = format!("1 to {COUNT_MAX}");
    counts.iter().try_for_each(|count| check(flag, count, &expected, (1..=COUNT_MAX).contains(count)))
}

/// A copy of a config.json with another vocabulary size, in a file without a name: nothing is left behind,
/// even if this process is killed.
fn with_vocab(config: &Path, vocab: u32) -> std::io::Result<File> {
    let text = std::fs::read_to_string(config)?;
    let mut fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text)?;
    fields.insert("vocab_size".to_owned(), vocab.into());
    let mut file = tempfile::tempfile()?;
    file.write_all(serde_json::Value::Object(fields).to_string().as_bytes())?;
    Ok(file)
}

/// Source of the model.
enum Model {
    Checkpoint(PathBuf),
    Random {
        config: PathBuf,
        /// The file with another vocabulary that `config` names; it exists as long as it is open.
        _file: Option<File>,
    },
}

impl Model {
    fn new(args: &EngineBenchArgs) -> Result<Self, EngineBenchError> {
        match (args.model.strip_prefix("random:"), args.vocab) {
            (Some(config), None) => Ok(Self::Random { config: PathBuf::from(config), _file: None }),
            (Some(config), Some(vocab)) => {
                let path = PathBuf::from(config);
                let file =
                    with_vocab(&path, vocab).map_err(|source| EngineBenchError::Config { path, source })?;
                let config = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
                Ok(Self::Random { config, _file: Some(file) })
            }
            (None, None) => Ok(Self::Checkpoint(PathBuf::from(&args.model))),
            (None, Some(vocab)) => {
                let expected =
                    "--model random:CONFIG.json: a checkpoint has its own vocabulary size".to_owned();
                Err(UsageError { flag: "--vocab", value: vocab.to_string(), expected }.into())
            }
        }
    }

    fn load(&self, weights: WeightFormat, threads: usize) -> Result<Engine, EngineError> {
        let options = |model_dir: &PathBuf| LoadOptions {
            threads,
            ..LoadOptions::new(model_dir, weights, KV_MEMORY_BYTES)
        };
        match self {
            Self::Checkpoint(dir) => Engine::load(&options(dir)),
            Self::Random { config, .. } => Engine::random(&options(config), SEED),
        }
    }
}
