//! The contents of a cluster and the command line of each process.
//!
//! Pure except for the free ports that it reserves: nothing is started here. In this crate, only this file has
//! flags of the server binaries.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use speculation::Role;
use worker::compute_device::ComputeDevice::{self, Cpu, Cuda};

use super::ROUTER;
use super::error::ClusterError;
use super::ports::{free_address, resolve};
use super::process::ProcessSpec;

/// Streams get this long to finish: short, because a person waits at a terminal.
const DEFAULT_GRACE: Duration = Duration::from_secs(8);

/// The three server binaries.
#[derive(Debug, Clone)]
pub struct Binaries {
    /// `outrider-router`.
    pub router: PathBuf,
    /// `outrider-draft-worker`.
    pub draft_worker: PathBuf,
    /// `outrider-target-worker`.
    pub target_worker: PathBuf,
}

/// The draft method of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftKind {
    /// No drafts: every round is an ordinary decode step.
    None,
    /// A table of the sequence's n-grams.
    Ngram,
    /// A checkpoint.
    Model(PathBuf),
    /// The draft pool of the synthetic target's profile.
    Synthetic,
}

/// The target of a cluster.
#[derive(Debug, Clone, PartialEq)]
pub enum TargetKind {
    /// A checkpoint.
    Model(PathBuf),
    /// No model: workers reproduce the step times of a profile, multiplied by a factor.
    Synthetic {
        /// The profile's file.
        profile: PathBuf,
        /// Factor on the profile's times; 1 keeps them unchanged.
        time_scale: f64,
    },
}

impl From<PathBuf> for TargetKind {
    fn from(directory: PathBuf) -> Self {
        Self::Model(directory)
    }
}

/// How workers and the router discover each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Discovery {
    /// A file that the cluster writes.
    Static,
    /// A running service, such as `etcd://127.0.0.1:2379/outrider`.
    Uri(String),
}

/// Description of a cluster. [`ClusterSpec::new`] sets defaults.
#[derive(Debug, Clone)]
pub struct ClusterSpec {
    /// The server binaries.
    pub binaries: Binaries,
    /// The target.
    pub target: TargetKind,
    /// Ballast of the target, in parameters; 0 for none.
    pub ballast: u64,
    /// Number of target workers, each with the whole model.
    pub target_workers: usize,
    /// The draft method.
    pub draft: DraftKind,
    /// Number of draft workers; unused with [`DraftKind::None`].
    pub draft_workers: usize,
    /// The target's tokenizer.json or checkpoint, if a draft model has another tokenizer.
    pub target_tokenizer: Option<PathBuf>,
    /// The router's HTTP address; port 0 selects a free one.
    pub http: SocketAddr,
    /// The router's gRPC address; port 0 selects a free one.
    pub grpc: SocketAddr,
    /// Address of the router's console and metrics; port 0 selects a free one.
    pub admin: SocketAddr,
    /// Worker discovery.
    pub discovery: Discovery,
    /// Compute device of the target workers.
    pub target_device: ComputeDevice,
    /// Compute device of the draft workers.
    pub draft_device: ComputeDevice,
    /// Compute threads per worker on the CPU; `None` uses the worker's default.
    pub threads: Option<NonZeroUsize>,
    /// File of accepted API keys.
    pub api_keys: Option<PathBuf>,
    /// Log filter of every process; `None` uses the process's default.
    pub log: Option<String>,
    /// Grace period of the router's streams when the cluster stops, in whole seconds.
    pub grace: Duration,
    /// Additional arguments for the router.
    pub router_args: Vec<String>,
    /// Additional arguments for every draft worker.
    pub draft_args: Vec<String>,
    /// Additional arguments for every target worker.
    pub target_args: Vec<String>,
    /// Environment variables for all processes.
    pub env: Vec<(String, String)>,
}

impl ClusterSpec {
    /// One target worker, one draft worker, both on the CPU, free ports, static discovery, no API keys.
    pub fn new(binaries: Binaries, target: impl Into<TargetKind>, draft: DraftKind) -> Self {
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            binaries,
            target: target.into(),
            ballast: 0,
            target_workers: 1,
            draft,
            draft_workers: 1,
            target_tokenizer: None,
            http: any_port,
            grpc: any_port,
            admin: any_port,
            discovery: Discovery::Static,
            target_device: Cpu,
            draft_device: Cpu,
            threads: None,
            api_keys: None,
            log: None,
            grace: DEFAULT_GRACE,
            router_args: Vec::new(),
            draft_args: Vec::new(),
            target_args: Vec::new(),
            env: Vec::new(),
        }
    }

    /// Number of draft workers at start.
    pub fn draft_count(&self) -> usize {
        if self.draft == DraftKind::None { 0 } else { self.draft_workers }
    }

    /// Whether draft and target workers both compute on the CPU, or on a common GPU.
    fn draft_shares_device(&self) -> bool {
        match (&self.target_device, &self.draft_device) {
            (Cpu, Cpu) => true,
            (Cuda(target), Cuda(draft)) => target.iter().any(|gpu| draft.contains(gpu)),
            (Cpu, Cuda(_)) | (Cuda(_), Cpu) => false,
        }
    }
}

impl Binaries {
    /// The binaries in this executable's directory, or one directory up, where cargo puts them for a test.
    pub fn beside_this_executable() -> Result<Self, ClusterError> {
        let own = std::env::current_exe().map_err(ClusterError::OwnPath)?;
        let directory = own.parent().unwrap_or(Path::new("."));
        let directory = match directory.file_name() {
            Some(name) if name == "deps" => directory.parent().unwrap_or(directory),
            _ => directory,
        };
        Self::in_directory(directory)
    }

    /// The binaries in a directory.
    pub fn in_directory(directory: &Path) -> Result<Self, ClusterError> {
        let find = |name| {
            let path = directory.join(name);
            let missing = || ClusterError::MissingBinary { name, directory: directory.to_owned() };
            if path.is_file() { Ok(path) } else { Err(missing()) }
        };
        Ok(Self {
            router: find("outrider-router")?,
            draft_worker: find("outrider-draft-worker")?,
            target_worker: find("outrider-target-worker")?,
        })
    }
}

/// Description of one process before it starts.
#[derive(Debug, Clone)]
pub(super) struct ProcessPlan {
    pub(super) process: ProcessSpec,
    /// `None` for the router.
    pub(super) role: Option<Role>,
    /// gRPC address of the worker or router.
    pub(super) listen: SocketAddr,
    /// Address of health and metrics.
    pub(super) admin: SocketAddr,
    pub(super) ready_url: String,
}

pub(super) fn worker_plan(
    spec: &ClusterSpec,
    role: Role,
    index: usize,
    discovery_uri: &str,
) -> Result<ProcessPlan, ClusterError> {
    let (listen, admin) = (free_address()?, free_address()?);
    let mut args = Arguments::default();
    let (program, device, more) = match role {
        Role::Target => {
            match &spec.target {
                TargetKind::Model(directory) => args.pair("--model", directory),
                TargetKind::Synthetic { .. } => args.synthetic(spec),
            }
            if spec.ballast > 0 {
                args.pair("--ballast", spec.ballast.to_string());
            }
            (&spec.binaries.target_worker, &spec.target_device, &spec.target_args)
        }
        Role::Draft => {
            match &spec.draft {
                DraftKind::Model(directory) => {
                    args.pair("--model", directory);
                    spec.target_tokenizer.iter().for_each(|path| args.pair("--target-tokenizer", path));
                }
                DraftKind::Synthetic => args.synthetic(spec),
                DraftKind::Ngram | DraftKind::None => args.pair("--method", "ngram"),
            }
            (&spec.binaries.draft_worker, &spec.draft_device, &spec.draft_args)
        }
    };
    args.pair("--device", device.to_string());
    if let Some(threads) = spec.threads.filter(|_| *device == Cpu) {
        args.pair("--threads", threads.to_string());
    }
    args.pair("--listen", listen.to_string());
    args.pair("--admin", admin.to_string());
    let is_set = spec.draft_args.iter().any(|arg| arg == "--draft-ahead");
    if role == Role::Draft && spec.draft_shares_device() && !is_set {
        // Draft-ahead would slow down verification, which needs the same device.
        args.pair("--draft-ahead", "0");
    }
    args.common(spec, discovery_uri);
    let process = ProcessSpec {
        name: format!("{}-{index}", role.as_str()),
        program: program.clone(),
        args: args.with(more),
        env: spec.env.clone(),
    };
    Ok(ProcessPlan { process, role: Some(role), listen, admin, ready_url: ready_url(admin) })
}

pub(super) fn router_plan(
    spec: &ClusterSpec,
    (http, grpc): (SocketAddr, SocketAddr),
    discovery_uri: &str,
) -> Result<ProcessPlan, ClusterError> {
    let admin = resolve(spec.admin)?;
    let mut args = Arguments::default();
    args.pair("--http", http.to_string());
    args.pair("--grpc", grpc.to_string());
    args.pair("--admin", admin.to_string());
    if let Some(file) = &spec.api_keys {
        args.pair("--api-keys", file);
    }
    args.common(spec, discovery_uri);
    let process = ProcessSpec {
        name: ROUTER.to_owned(),
        program: spec.binaries.router.clone(),
        args: args.with(&spec.router_args),
        env: spec.env.clone(),
    };
    Ok(ProcessPlan { process, role: None, listen: grpc, admin, ready_url: ready_url(admin) })
}

fn ready_url(admin: SocketAddr) -> String {
    format!("http://{admin}/health/ready")
}

/// The static discovery file that lists the workers among `plans`.
pub(super) fn workers_toml<'a>(plans: impl Iterator<Item = &'a ProcessPlan>) -> String {
    #[derive(Serialize)]
    struct File {
        worker: Vec<Entry>,
    }
    #[derive(Serialize)]
    struct Entry {
        role: &'static str,
        address: String,
    }
    let entry = |plan: &ProcessPlan| {
        plan.role.map(|role| Entry { role: role.as_str(), address: format!("http://{}", plan.listen) })
    };
    let file = File { worker: plans.filter_map(entry).collect() };
    toml::to_string(&file).expect("two strings per worker can always be written as TOML")
}

/// A command line under construction.
#[derive(Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
    fn pair(&mut self, flag: &str, value: impl Into<OsString>) {
        self.0.push(flag.into());
        self.0.push(value.into());
    }

    fn synthetic(&mut self, spec: &ClusterSpec) {
        if let TargetKind::Synthetic { profile, time_scale } = &spec.target {
            self.pair("--engine", format!("synthetic:{}", profile.display()));
            self.pair("--time-scale", time_scale.to_string());
        }
    }

    fn common(&mut self, spec: &ClusterSpec, discovery_uri: &str) {
        self.pair("--discovery", discovery_uri);
        self.pair("--grace-seconds", spec.grace.as_secs().to_string());
        if let Some(log) = &spec.log {
            self.pair("--log", log);
        }
        self.0.push("--exit-on-stdin-close".into());
    }

    fn with(mut self, more: &[String]) -> Vec<OsString> {
        self.0.extend(more.iter().map(OsString::from));
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(draft: DraftKind) -> ClusterSpec {
        let binaries = Binaries {
            router: "/bin/outrider-router".into(),
            draft_worker: "/bin/outrider-draft-worker".into(),
            target_worker: "/bin/outrider-target-worker".into(),
        };
        ClusterSpec::new(binaries, PathBuf::from("/models/target"), draft)
    }

    fn line(plan: &ProcessPlan) -> String {
        plan.process.args.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_target_worker_gets_its_model_addresses_and_extra_arguments() {
        let mut spec = spec(DraftKind::None);
        spec.threads = NonZeroUsize::new(2);
        spec.ballast = 250_000_000;
        spec.target_args = vec!["--kv-memory".to_owned(), "1048576".to_owned()];
        let plan = worker_plan(&spec, Role::Target, 3, "static:/tmp/workers.toml").unwrap();
        assert_eq!(plan.process.name, "target-3");
        let (listen, admin) = (plan.listen, plan.admin);
        assert_ne!(listen, admin);
        assert_eq!(
            line(&plan),
            format!(
                "--model /models/target --ballast 250000000 --device cpu --threads 2 --listen {listen} --admin {admin} \
                 --discovery static:/tmp/workers.toml --grace-seconds 8 --exit-on-stdin-close --kv-memory 1048576"
            )
        );
    }

    #[test]
    fn an_ngram_draft_needs_no_model() {
        let plan = worker_plan(&spec(DraftKind::Ngram), Role::Draft, 0, "memory").unwrap();
        assert!(line(&plan).starts_with("--method ngram --device cpu "), "{}", line(&plan));
        let plan =
            worker_plan(&spec(DraftKind::Model("/models/draft".into())), Role::Draft, 0, "memory").unwrap();
        assert!(line(&plan).starts_with("--model /models/draft --device cpu "), "{}", line(&plan));
        let target_tokenizer = Some("/models/target".into());
        let foreign = ClusterSpec { target_tokenizer, ..spec(DraftKind::Model("/models/draft".into())) };
        let plan = worker_plan(&foreign, Role::Draft, 0, "memory").unwrap();
        let expected = "--model /models/draft --target-tokenizer /models/target --device cpu ";
        assert!(line(&plan).starts_with(expected), "{}", line(&plan));
    }

    #[test]
    fn a_worker_on_a_gpu_gets_its_device_and_no_threads() {
        let mut spec = spec(DraftKind::Model("/models/draft".into()));
        (spec.threads, spec.target_device) = (NonZeroUsize::new(2), Cuda(vec![0, 1]));
        let target = worker_plan(&spec, Role::Target, 0, "memory").unwrap();
        let expected = "--model /models/target --device cuda:0,1 --listen ";
        assert!(line(&target).starts_with(expected), "{}", line(&target));
        let draft = worker_plan(&spec, Role::Draft, 0, "memory").unwrap();
        let expected = "--model /models/draft --device cpu --threads 2 --listen ";
        assert!(line(&draft).starts_with(expected), "{}", line(&draft));
    }

    #[test]
    fn nothing_is_drafted_ahead_on_a_device_that_the_target_needs() {
        let [gpu, both, other] = [vec![0], vec![0, 1], vec![2]].map(Cuda);
        let plan = |target_device: &ComputeDevice, draft_device: &ComputeDevice| {
            let mut spec = spec(DraftKind::Model("/models/draft".into()));
            (spec.target_device, spec.draft_device) = (target_device.clone(), draft_device.clone());
            line(&worker_plan(&spec, Role::Draft, 0, "memory").unwrap())
        };
        for (target, draft, shared) in [
            (&Cpu, &Cpu, true),
            (&gpu, &gpu, true),
            (&both, &gpu, true),
            (&gpu, &Cpu, false),
            (&Cpu, &gpu, false),
            (&both, &other, false),
        ] {
            let line = plan(target, draft);
            assert_eq!(line.contains("--draft-ahead 0"), shared, "{target} and {draft}: {line}");
        }
    }

    #[test]
    fn synthetic_workers_get_the_profile_in_place_of_a_model() {
        let mut spec = spec(DraftKind::Synthetic);
        spec.target = TargetKind::Synthetic { profile: "/p.toml".into(), time_scale: 20.0 };
        for role in [Role::Target, Role::Draft] {
            let plan = worker_plan(&spec, role, 0, "memory").unwrap();
            let expected = "--engine synthetic:/p.toml --time-scale 20 --device cpu ";
            assert!(line(&plan).starts_with(expected), "{}", line(&plan));
        }
    }

    #[test]
    fn the_discovery_file_lists_workers_and_not_the_router() {
        let spec = spec(DraftKind::Ngram);
        let address = "127.0.0.1:1".parse().unwrap();
        let plans = [
            worker_plan(&spec, Role::Target, 0, "x").unwrap(),
            worker_plan(&spec, Role::Draft, 0, "x").unwrap(),
            router_plan(&spec, (address, address), "x").unwrap(),
        ];
        let text = workers_toml(plans.iter());
        let table = text.parse::<toml::Table>().unwrap();
        let workers = table["worker"].as_array().unwrap();
        assert_eq!(workers.len(), 2);
        assert_eq!(workers[0]["role"].as_str(), Some("target"));
        assert_eq!(workers[1]["address"].as_str(), Some(format!("http://{}", plans[1].listen).as_str()));
    }

    #[test]
    fn a_missing_binary_is_named_with_the_command_that_builds_it() {
        let empty = tempfile::tempdir().unwrap();
        let message = Binaries::in_directory(empty.path()).unwrap_err().to_string();
        assert!(
            message.contains("outrider-router") && message.contains("cargo build --workspace --bins"),
            "{message}"
        );
    }
}
