//! Checks of `outrider up` before any process is started, and the resulting cluster description.
//!
//! All faults are collected in one pass. Nothing is started and no port stays bound. Whether a GPU exists is
//! for the worker to say that loads a model onto it.

mod devices;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use engine::ParameterCount;
use scheduling::profile::Profile;
use speculation::fingerprint::first_difference;
use text::translation::{TokenizerFile, Translation, TranslationError};
use worker::compute_device::ComputeDevice;

use super::args::{DraftArg, SyntheticArg, UpArgs};
use super::checkpoint::{self, BUNDLED_PAIR, display_path};
use crate::check_pair::WeightsArg;
use crate::check_pair::error::CheckPairError;
use crate::check_pair::texts::CheckpointText;
use crate::cluster::{Binaries, ClusterError, ClusterSpec, DraftKind, ROUTER, TargetKind, try_bind};

/// Ballast of the bundled target: it gives steps the time of a model that is worth drafting for.
const BUNDLED_BALLAST: ParameterCount = ParameterCount(250_000_000);

/// Log level of the processes by default.
const DEFAULT_LOG: &str = "info";

/// A reason not to start. Its text is one line.
#[derive(Debug, thiserror::Error)]
pub enum PreflightFault {
    /// No model was named and the bundled one was not found.
    #[error(
        "no {BUNDLED_PAIR} found above the working directory or this executable: give a checkpoint with --target DIR"
    )]
    NoBundledPair,
    /// A directory is not a checkpoint.
    #[error(
        "{flag} {directory} {missing}: give a Hugging Face checkpoint directory; \
         nothing is downloaded (`hf download MODEL --local-dir DIR` does that)"
    )]
    NotACheckpoint {
        /// The flag that names it.
        flag: &'static str,
        /// The directory.
        directory: PathBuf,
        /// What is missing.
        missing: String,
    },
    /// The text files of a checkpoint cannot be read.
    #[error(transparent)]
    Text(#[from] CheckPairError),
    /// Draft and target number their tokens differently, and tokens cannot be mapped.
    #[error(
        "draft {draft} and target {target} do not share a tokenizer: {difference}; and tokens cannot be mapped: {source}; \
         use another draft, or --draft ngram"
    )]
    TokenizersDiffer {
        /// The draft's checkpoint.
        draft: PathBuf,
        /// The target's checkpoint.
        target: PathBuf,
        /// The first token that differs.
        difference: String,
        /// Why tokens cannot be mapped.
        source: TranslationError,
    },
    /// A profile cannot be used.
    #[error("--engine synthetic:{file}: {reason}")]
    BadProfile {
        /// The file.
        file: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A port is in use.
    #[error(
        "{flag} {address} is taken, perhaps by another `outrider up`: stop the process that listens there, \
         or choose another with {flag} ADDR (port 0 is any free one)"
    )]
    AddressTaken {
        /// The flag that names it.
        flag: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// Two flags name the same address.
    #[error("{flag} {address} is taken by {other}: choose another with {flag} ADDR")]
    SameAddress {
        /// The second flag.
        flag: &'static str,
        /// The address of both.
        address: SocketAddr,
        /// The first flag.
        other: &'static str,
    },
    /// An address at which this process cannot listen, such as that of another machine.
    #[error("{flag} {address} cannot be bound: {source}: choose another with {flag} ADDR")]
    UnusableAddress {
        /// The flag that names it.
        flag: &'static str,
        /// The address.
        address: SocketAddr,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A draft without a model was given a GPU.
    #[error(
        "--draft-device {device} is for a draft that is a model: remove it, or give a checkpoint with --draft DIR"
    )]
    DraftWithoutModel {
        /// The device.
        device: ComputeDevice,
    },
    /// The KV cache on a GPU was given a part of the host's memory.
    #[error(
        "{flag} {size} is a part of the host's memory, not of a GPU's: give a size, or use --gpu-memory-utilization"
    )]
    PartOfHostMemory {
        /// The flag that names it.
        flag: &'static str,
        /// The part.
        size: String,
    },
    /// Several workers would each take most of a GPU's memory.
    #[error(
        "{workers} workers share cuda:{gpu}, and without a size each takes most of its memory: give sizes with {flags}, \
         or use other GPUs"
    )]
    SharedGpu {
        /// Number of workers on this GPU.
        workers: u64,
        /// The GPU.
        gpu: usize,
        /// The flags that would give the missing sizes.
        flags: String,
    },
    /// No worker takes a part of a GPU's memory.
    #[error(
        "--gpu-memory-utilization {part} has no effect: it sizes the KV cache of workers on GPUs (--device cuda:0) that \
         have no --kv-memory (drafts: --draft-kv-memory)"
    )]
    UnusedUtilization {
        /// The part.
        part: f32,
    },
    /// The file of API keys does not exist.
    #[error("--api-keys {file} is not a file: write your keys into one, each in a line of its own")]
    NoKeyFile {
        /// The file.
        file: PathBuf,
    },
    /// A server binary is missing.
    #[error(transparent)]
    Binaries(#[from] ClusterError),
}

/// A cluster that passed all checks.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) spec: ClusterSpec,
    /// Whether to measure what drafting gains once all processes are ready.
    pub(super) evidence: bool,
    /// Whether log lines are shown while processes load, instead of only once all are ready.
    pub(super) shows_loading_logs: bool,
}

impl Checked {
    /// What each process does until it is ready.
    pub(super) fn loading_lines(&self, names: &[&str]) -> Vec<(String, String)> {
        let line = |name: &str| match (name, &self.spec.draft) {
            (ROUTER, _) => "waiting for a target worker".to_owned(),
            (name, DraftKind::Model(directory)) if name.starts_with("draft") => {
                loading(directory, &self.spec.draft_device)
            }
            (name, _) if name.starts_with("draft") => "starting".to_owned(),
            _ => match &self.spec.target {
                TargetKind::Model(directory) => {
                    format!("{}{}", loading(directory, &self.spec.target_device), self.with_ballast())
                }
                TargetKind::Synthetic { .. } => "starting".to_owned(),
            },
        };
        names.iter().map(|name| ((*name).to_owned(), line(name))).collect()
    }

    fn with_ballast(&self) -> String {
        match self.spec.ballast {
            0 => String::new(),
            parameters => {
                format!(" with {} parameters of ballast that change no token", ParameterCount(parameters))
            }
        }
    }

    /// Short description of the pair.
    pub(super) fn pair(&self) -> String {
        let path = match &self.spec.target {
            TargetKind::Model(directory) => directory,
            TargetKind::Synthetic { profile, .. } => profile,
        };
        let (device, workers) = (on_gpu(&self.spec.target_device), self.spec.target_workers);
        let target = format!("target {}{device}{} x{workers}", display_path(path), self.with_ballast());
        match &self.spec.draft {
            DraftKind::None => format!("{target}, no draft"),
            DraftKind::Synthetic => {
                format!("{target}, drafts x{}: synthetic, nothing is computed", self.spec.draft_workers)
            }
            DraftKind::Ngram => format!("{target}, draft ngram x{}", self.spec.draft_workers),
            DraftKind::Model(directory) => {
                let tokens =
                    if self.spec.target_tokenizer.is_some() { ", tokens mapped by their bytes" } else { "" };
                let (device, workers) = (on_gpu(&self.spec.draft_device), self.spec.draft_workers);
                format!("{target}, draft {}{device} x{workers}{tokens}", display_path(directory))
            }
        }
    }
}

fn loading(directory: &Path, device: &ComputeDevice) -> String {
    format!("loading {}{}", display_path(directory), on_gpu(device))
}

/// The device as part of a line; empty for the CPU.
fn on_gpu(device: &ComputeDevice) -> String {
    match device {
        ComputeDevice::Cpu => String::new(),
        ComputeDevice::Cuda(_) => format!(" on {device}"),
    }
}

/// Resolves defaults and checks everything.
pub(super) fn check(args: UpArgs) -> Result<Checked, Vec<PreflightFault>> {
    let mut faults = Vec::new();
    let engine = choose_engine(&args).map_err(|more| faults.extend(more)).ok();
    faults.extend(engine.iter().flat_map(|engine| devices::faults(&args, engine)));
    let addresses = [("--http", args.http), ("--grpc", args.grpc), ("--admin", args.admin)];
    for (i, &(flag, address)) in addresses.iter().enumerate() {
        faults.extend(address_fault((flag, address), &addresses[..i]));
    }
    if let Some(file) = args.api_keys.as_ref().filter(|file| !file.is_file()) {
        faults.push(PreflightFault::NoKeyFile { file: file.clone() });
    }
    let binaries = Binaries::beside_this_executable().map_err(|error| faults.push(error.into())).ok();
    match (engine, binaries) {
        (Some(engine), Some(binaries)) if faults.is_empty() => {
            let shows_loading_logs = args.log.is_some();
            let has_draft = !matches!(engine.draft, DraftKind::None | DraftKind::Synthetic);
            // The gain of synthetic workers is written in their profile; and with API keys no key is known
            // for the requests.
            let evidence = has_draft && !args.no_evidence && args.api_keys.is_none() && args.engine.is_none();
            Ok(Checked { spec: spec(args, binaries, engine), evidence, shows_loading_logs })
        }
        _ => Err(faults),
    }
}

/// Why the router cannot listen at the address of a flag, if so; `others` are those of the flags before it.
fn address_fault(
    (flag, address): (&'static str, SocketAddr),
    others: &[(&'static str, SocketAddr)],
) -> Option<PreflightFault> {
    if address.port() == 0 {
        return None;
    }
    if let Some(&(other, _)) = others.iter().find(|(_, taken)| *taken == address) {
        return Some(PreflightFault::SameAddress { flag, address, other });
    }
    let source = try_bind(address).err()?;
    Some(match source.kind() {
        ErrorKind::AddrInUse => PreflightFault::AddressTaken { flag, address },
        _ => PreflightFault::UnusableAddress { flag, address, source },
    })
}

/// What the workers run, and the default number of workers.
#[derive(Debug)]
struct EngineChoice {
    target: TargetKind,
    draft: DraftKind,
    /// Set if the draft has another tokenizer.
    target_tokenizer: Option<PathBuf>,
    target_workers: u64,
    draft_workers: u64,
}

/// Chooses models from disk, or the pools of a profile.
fn choose_engine(args: &UpArgs) -> Result<EngineChoice, Vec<PreflightFault>> {
    let Some(SyntheticArg { profile: file }) = &args.engine else {
        let (target, draft) = choose_models(args).map_err(|fault| vec![fault])?;
        let is_translated = check_models(&target, &draft)?;
        let target_tokenizer = is_translated.then(|| target.clone());
        let target = TargetKind::Model(target);
        return Ok(EngineChoice { target, draft, target_tokenizer, target_workers: 1, draft_workers: 1 });
    };
    let fault = |reason: String| vec![PreflightFault::BadProfile { file: file.clone(), reason }];
    let text = std::fs::read_to_string(file).map_err(|error| fault(error.to_string()))?;
    let profile = Profile::parse(&text).map_err(|error| fault(error.to_string()))?;
    let draft = match &args.draft {
        None => DraftKind::Synthetic,
        Some(DraftArg::Ngram) => DraftKind::Ngram,
        Some(DraftArg::None) => DraftKind::None,
        Some(DraftArg::Model(_)) => {
            return Err(fault("its drafts are synthetic: omit --draft, or use ngram or none".to_owned()));
        }
    };
    Ok(EngineChoice {
        target: TargetKind::Synthetic { profile: file.clone(), time_scale: args.time_scale },
        draft,
        target_tokenizer: None,
        target_workers: profile.target.workers.into(),
        draft_workers: profile.draft.workers.into(),
    })
}

fn spec(args: UpArgs, binaries: Binaries, engine: EngineChoice) -> ClusterSpec {
    ClusterSpec {
        ballast: ballast(&args).0,
        target_workers: args.target_workers.unwrap_or(engine.target_workers) as usize,
        draft_workers: args.draft_workers.unwrap_or(engine.draft_workers) as usize,
        http: args.http,
        grpc: args.grpc,
        admin: args.admin,
        threads: args.threads,
        router_args: pair_check_args(&args, &engine),
        target_args: [
            weights_args(args.weights, matches!(engine.target, TargetKind::Model(_))),
            devices::memory_args(&args.device, args.kv_memory.as_deref(), args.gpu_memory_utilization),
        ]
        .concat(),
        draft_args: [
            weights_args(args.weights, matches!(engine.draft, DraftKind::Model(_))),
            devices::memory_args(
                &args.draft_device,
                args.draft_kv_memory.as_deref(),
                args.gpu_memory_utilization,
            ),
        ]
        .concat(),
        target_device: args.device,
        draft_device: args.draft_device,
        target_tokenizer: engine.target_tokenizer,
        api_keys: args.api_keys,
        log: Some(args.log.unwrap_or_else(|| DEFAULT_LOG.to_owned())),
        ..ClusterSpec::new(binaries, engine.target, engine.draft)
    }
}

/// A worker's argument for the weight format; none for a worker without weights.
fn weights_args(format: Option<WeightsArg>, has_weights: bool) -> Vec<String> {
    let format = format.filter(|_| has_weights);
    format.map(|format| format!("--weights={}", format.as_str())).into_iter().collect()
}

/// Router arguments for the console's Pair page: the command that it runs, which is this program on one
/// prompt per task type. Empty unless there are two models with the same tokenizer, both on the CPU, where the
/// check would run them.
fn pair_check_args(args: &UpArgs, engine: &EngineChoice) -> Vec<String> {
    let (TargetKind::Model(target), DraftKind::Model(draft)) = (&engine.target, &engine.draft) else {
        return Vec::new();
    };
    let is_on_cpu = [&args.device, &args.draft_device].iter().all(|device| **device == ComputeDevice::Cpu);
    if engine.target_tokenizer.is_some() || !is_on_cpu {
        return Vec::new();
    }
    let Ok(program) = std::env::current_exe() else { return Vec::new() };
    let [Some(program), Some(target), Some(draft)] = [&program, target, draft].map(|path| path.to_str())
    else {
        return Vec::new();
    };
    let threads =
        args.threads.or_else(|| std::thread::available_parallelism().ok()).map_or(1, NonZeroUsize::get);
    let (ballast, threads) = (ballast(args).0.to_string(), threads.to_string());
    let command = [
        [program, "check-pair"],
        ["--json", "--num-prompts=1"],
        ["--max-tokens=32", "--temperatures=0,0.7"],
        ["--target", target],
        ["--draft", draft],
        ["--ballast", &ballast],
        ["--threads", &threads],
    ];
    // In the format that is served: another one would need other memory, and accept other tokens.
    let formats = args.weights.iter().flat_map(|format| {
        ["--weights", "--draft-weights"].map(|flag| format!("{flag}={}", format.as_str()))
    });
    let command = command.as_flattened().iter().map(|argument| (*argument).to_owned()).chain(formats);
    command.map(|argument| format!("--pair-check={argument}")).collect()
}

/// A target given by the user gets no ballast by default.
fn ballast(args: &UpArgs) -> ParameterCount {
    let is_bundled = args.target.is_none() && args.engine.is_none();
    args.ballast.unwrap_or(if is_bundled { BUNDLED_BALLAST } else { ParameterCount(0) })
}

/// The bundled draft fits only the bundled target, so a target given by the user is paired with n-grams by
/// default.
fn choose_models(args: &UpArgs) -> Result<(PathBuf, DraftKind), PreflightFault> {
    let bundled = || checkpoint::bundled_pair().ok_or(PreflightFault::NoBundledPair);
    let target = match &args.target {
        Some(directory) => directory.clone(),
        None => bundled()?.join("target"),
    };
    let draft = match (&args.draft, &args.target) {
        (Some(DraftArg::Model(directory)), _) => DraftKind::Model(directory.clone()),
        (Some(DraftArg::Ngram), _) | (None, Some(_)) => DraftKind::Ngram,
        (Some(DraftArg::None), _) => DraftKind::None,
        (None, None) => DraftKind::Model(bundled()?.join("draft")),
    };
    Ok((target, draft))
}

/// Whether the draft has another tokenizer than the target, with tokens that can be mapped.
fn check_models(target: &Path, draft: &DraftKind) -> Result<bool, Vec<PreflightFault>> {
    let draft_directory = match draft {
        DraftKind::Model(directory) => Some(directory.as_path()),
        DraftKind::Ngram | DraftKind::None | DraftKind::Synthetic => None,
    };
    let named = [("--target", Some(target)), ("--draft", draft_directory)];
    let not_a_checkpoint = |flag, directory: &Path| {
        checkpoint::missing_in(directory).map(|missing| PreflightFault::NotACheckpoint {
            flag,
            directory: directory.to_owned(),
            missing,
        })
    };
    let faults = named
        .iter()
        .filter_map(|(flag, directory)| not_a_checkpoint(flag, (*directory)?))
        .collect::<Vec<_>>();
    match draft_directory {
        _ if !faults.is_empty() => Err(faults),
        Some(draft) => needs_translation(target, draft).map_err(|fault| vec![fault]),
        None => Ok(false),
    }
}

/// Whether two checkpoints number their tokens differently; an error if tokens cannot be mapped either.
fn needs_translation(target: &Path, draft: &Path) -> Result<bool, PreflightFault> {
    let [target_text, draft_text] = [CheckpointText::read(target)?, CheckpointText::read(draft)?];
    let difference = first_difference(draft_text.tokens(), target_text.tokens());
    let Some(difference) = difference else { return Ok(false) };
    let [target_file, draft_file] =
        [&target_text, &draft_text].map(|text| TokenizerFile { json: text.tokenizer(), eos_token_ids: &[] });
    match Translation::new(target_file, draft_file) {
        Ok(_) => Ok(true),
        Err(source) => Err(PreflightFault::TokenizersDiffer {
            draft: draft.to_owned(),
            target: target.to_owned(),
            difference: difference.to_string(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests;
