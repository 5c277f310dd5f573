//! `outrider engine-bench`: what a forward costs on this machine, by rows and context, beside what its memory
//! allows.
//!
//! Load one engine for each format asked for, then measure case by case (`measure`), formats and plain reading of memory in turns:
//! a shared machine is fast one moment and slow the next, so only what ran side by side is compared. Print (`report`).

mod measure;
mod report;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use engine::{Engine, EngineError, LoadOptions, ReadProbe, WeightFormat};

use measure::{Bench, Case, Subject};

/// The exit code of a command line that makes no sense.
const EXIT_USAGE: u8 = 64;
/// The seed of random weights: two runs measure the same model.
const SEED: u64 = 1;
/// A ceiling, not a size: KV memory is taken as sequences grow.
const KV_MEMORY_BYTES: u64 = 16 << 30;
/// Sequences of one row each, as a batch of so many users makes them.
const BATCH: usize = 8;
/// More rows, or tokens, than this is a slip of the finger.
const MOST: usize = 1 << 20;

/// Arguments of `outrider engine-bench`.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchArgs {
    /// A checkpoint directory, or `random:` and the path of a config.json: random weights of that shape
    #[arg(long, value_name = "DIR|random:CONFIG.json")]
    pub model: String,

    /// Formats of the weights: auto, f32, bf16, int8 or int4; several are measured in turns
    #[arg(long, value_name = "FORMAT,..", default_value = "auto")]
    pub weights: String,

    /// Threads that compute
    #[arg(long, value_name = "N", default_value = "1")]
    pub threads: NonZeroUsize,

    /// Rows of one sequence in a forward
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,2,4,8,16,32,64,512")]
    pub rows: Vec<usize>,

    /// Tokens that a sequence holds before
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "128,2048")]
    pub context: Vec<usize>,

    /// Least time for each case, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 600)]
    pub case_ms: u64,

    /// Memory that is read to learn the bandwidth, MiB; less is taken where a quarter of what is free is less
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    pub read_mib: usize,

    /// Print JSON instead of a table, one object for each format
    #[arg(long)]
    pub json: bool,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
enum BenchError {
    #[error("{flag} is {value}, expected {expected}")]
    Usage { flag: &'static str, value: String, expected: String },
    #[error("{0}")]
    Engine(#[from] EngineError),
    #[error("no case fits the model's window of {0} tokens, take a smaller --context")]
    NothingFits(u32),
}

/// Run the subcommand to its end. What goes wrong is printed here, on one line.
#[expect(clippy::print_stderr, reason = "the fault is the program's answer")]
pub fn main(args: &BenchArgs) -> ExitCode {
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("outrider: {error}");
            match error {
                BenchError::Usage { .. } => ExitCode::from(EXIT_USAGE),
                BenchError::Engine(_) | BenchError::NothingFits(_) => ExitCode::FAILURE,
            }
        }
    }
}

fn run(args: &BenchArgs) -> Result<(), BenchError> {
    let formats = formats(&args.weights)?;
    let threads = args.threads.get();
    check_counts("--rows", &args.rows)?;
    check_counts("--context", &args.context)?;
    check_counts("--read-mib", &[args.read_mib])?;
    let mut subjects = Vec::new();
    for (name, format) in formats {
        let begin = Instant::now();
        let engine = load(&args.model, format, threads)?;
        subjects.push(Subject::new(name, engine, begin.elapsed()));
    }
    let window = subjects.iter().map(|subject| subject.engine.info().max_model_len).min().unwrap_or(0);
    let (cases, left_out): (Vec<Case>, Vec<Case>) =
        cases(args).into_iter().partition(|case| case.context + case.rows <= window as usize);
    if cases.is_empty() {
        return Err(BenchError::NothingFits(window));
    }
    let probe = ReadProbe::new(probe_bytes(args.read_mib << 20), threads)?;
    let mut bench = Bench::new(subjects, probe, Duration::from_millis(args.case_ms));
    for case in &cases {
        bench.measure(*case)?;
    }
    report::print(args, &bench.finish(), &left_out);
    Ok(())
}

/// Context by context, so that a sequence only grows.
fn cases(args: &BenchArgs) -> Vec<Case> {
    let mut contexts = args.context.clone();
    contexts.sort_unstable();
    let one = |context| args.rows.iter().map(move |&rows| Case { context, rows, sequences: 1 });
    let batch = |context| Case { context, rows: 1, sequences: BATCH };
    contexts.into_iter().flat_map(|context| one(context).chain([batch(context)])).collect()
}

fn formats(list: &str) -> Result<Vec<(String, WeightFormat)>, BenchError> {
    let usage = |name: &str| BenchError::Usage {
        flag: "--weights",
        value: format!("`{name}`"),
        expected: "auto, f32, bf16, int8, int4, or several of them with commas".to_owned(),
    };
    list.split(',')
        .map(|name| Ok((name.to_owned(), WeightFormat::named(name).ok_or_else(|| usage(name))?)))
        .collect()
}

fn check_counts(flag: &'static str, counts: &[usize]) -> Result<(), BenchError> {
    match counts.iter().find(|count| !(1..=MOST).contains(*count)) {
        None => Ok(()),
        Some(count) => {
            Err(BenchError::Usage { flag, value: count.to_string(), expected: format!("1 to {MOST}") })
        }
    }
}

fn load(model: &str, weights: WeightFormat, threads: usize) -> Result<Engine, EngineError> {
    let options = |model_dir: &str| LoadOptions {
        model_dir: PathBuf::from(model_dir),
        weights,
        threads,
        tensor_parallel: 1,
        kv_memory_bytes: KV_MEMORY_BYTES,
        max_model_len: None,
    };
    match model.strip_prefix("random:") {
        Some(config) => Engine::random(&options(config), SEED),
        None => Engine::load(&options(model)),
    }
}

/// What was asked for, but no more than a quarter of the free memory where the system tells it.
fn probe_bytes(wanted: usize) -> usize {
    let free_kib = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<usize>().ok()
    });
    free_kib.map_or(wanted, |kib| wanted.min(kib.saturating_mul(1024) / 4))
}
