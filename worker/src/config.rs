//! Settings common to draft and target workers. `validate` checks them.

mod validate;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use engine::WeightFormat;
use scheduling::profile::Profile;
use serde::{Deserialize, Serialize};
use service::accept::{ListenerConfig, ListenerFlags, RawListener};
use service::process::{ProcessConfig, ProcessFlags, RawProcess};
use service::tls::{ServerTls, ServerTlsFlags};

use crate::compute_device::ComputeDevice;
use crate::memory::MemoryLimit;

/// Command-line flags common to draft and target workers.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
pub struct WorkerFlags {
    /// Checkpoint directory in Hugging Face format: config.json, tokenizer.json, *.safetensors
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Engine to run: model, or synthetic:PROFILE.toml, which simulates the step times of a profile and
    /// computes nothing
    #[arg(long, value_name = "model|synthetic:FILE")]
    pub engine: Option<String>,
    /// Synthetic engine: factor by which every step time is multiplied
    #[arg(long, value_name = "FACTOR")]
    pub time_scale: Option<f64>,
    /// Model name that clients request [default: _name_or_path of config.json unless it is a path, else the
    /// repository of a snapshot in Hugging Face's cache, else the directory's name]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Compute device: cpu, a GPU as cuda:0, or several GPUs of this machine as cuda:0,1 to split the model
    /// over them
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Compute threads [default: all hardware threads, at most 512]; several workers on one machine may each
    /// use all of them, because waiting threads sleep while others need the cores
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Pin each compute thread to its own core; off by default, because it costs a third of the speed when
    /// other programs use these cores
    #[arg(long, value_name = "true|false")]
    pub pin: Option<bool>,
    /// Instruction set to use instead of the fastest one, for comparisons and debugging; results are
    /// bit-identical [default: the fastest, or OUTRIDER_ISA]
    #[arg(long, value_name = "NAME")]
    pub isa: Option<String>,
    /// Weight format: auto (as stored; FP8 checkpoints as fp8 if all projections are FP8, else as
    /// bf16), f32, bf16, fp8 (as stored in an FP8 checkpoint), or int8 or int4, quantized while loading
    #[arg(long, value_name = "FORMAT")]
    pub weights: Option<String>,
    /// Number of tensor-parallel ranks: 1, 2, 4 or 8, for a target over all its nodes; on the CPU each rank
    /// is a thread with a share of --threads [default: one for each GPU; on the CPU one, for each node]
    #[arg(long, value_name = "N")]
    pub tensor_parallel: Option<usize>,
    /// KV cache memory limit, for example 2GiB, or 60% of the memory of the machine or container [default:
    /// 1GiB; on GPUs set by --gpu-memory-utilization]
    #[arg(long, value_name = "SIZE")]
    pub kv_memory: Option<String>,
    /// On GPUs: fraction of the memory to use; the KV cache gets what weights and the workspace of a forward
    /// pass leave [default: 0.9]
    #[arg(long, value_name = "PART")]
    pub gpu_memory_utilization: Option<f32>,
    /// On GPUs: replay repeated steps as CUDA graphs
    #[arg(long, value_name = "true|false")]
    pub cuda_graphs: Option<bool>,
    /// On GPUs: the bits of a row depend only on that row, not on the rest of the batch; with false cuBLASLt
    /// computes bf16 products of many rows, which should be faster but makes the bits depend on the other
    /// rows
    #[arg(long, value_name = "true|false")]
    pub cuda_deterministic: Option<bool>,
    /// On GPUs: directory of compiled kernels, for machines without NVRTC [default: compiled at start]
    #[arg(long, value_name = "DIR")]
    pub cuda_kernels: Option<PathBuf>,
    /// Add about this many parameters, such as 250M, that change no token but cost the time and memory (2
    /// bytes each in bf16) of a larger model. For demonstrations and benchmarks
    #[arg(long, value_name = "PARAMS")]
    pub ballast: Option<String>,
    /// Maximum sequence length, prompt plus output [default: the model's]
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<u32>,
    /// Maximum rows in one forward pass
    #[arg(long, value_name = "ROWS")]
    pub max_batch_rows: Option<usize>,
    /// Measure forward times at start, for one to two seconds, so that routers can choose draft lengths
    #[arg(long, value_name = "true|false")]
    pub profile_steps: Option<bool>,
    /// Address that routers connect to
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// Address of /health and /metrics
    #[arg(long, value_name = "ADDR")]
    pub admin: Option<SocketAddr>,
    /// URL at which routers reach this worker, if not the listen address: http://HOST:PORT, or https:// with
    /// --tls-cert
    #[arg(long, value_name = "URL")]
    pub advertise: Option<String>,
    /// Zone of this worker, such as the value of topology.kubernetes.io/zone; published in its registration
    #[arg(long, value_name = "NAME")]
    pub zone: Option<String>,
    /// Listen beyond this machine without requiring client certificates of routers (--tls-client-ca): anyone
    /// who can connect can use the worker
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub listener: ListenerFlags,
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub tls: ServerTlsFlags,
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub process: ProcessFlags,
}

/// Unvalidated settings common to draft and target workers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RawWorker {
    model: Option<PathBuf>,
    engine: String,
    time_scale: f64,
    served_model_name: Option<String>,
    device: String,
    threads: Option<usize>,
    pin: bool,
    isa: Option<String>,
    weights: String,
    tensor_parallel: Option<usize>,
    kv_memory: Option<String>,
    gpu_memory_utilization: Option<f32>,
    cuda_graphs: bool,
    cuda_deterministic: bool,
    cuda_kernels: Option<PathBuf>,
    ballast: String,
    max_model_len: Option<u32>,
    max_batch_rows: usize,
    profile_steps: bool,
    listen: SocketAddr,
    admin: SocketAddr,
    advertise: Option<String>,
    zone: Option<String>,
    insecure: bool,
    #[serde(flatten)]
    listener: RawListener,
    #[serde(flatten)]
    tls: ServerTlsFlags,
    #[serde(flatten)]
    process: RawProcess,
}

impl RawWorker {
    /// The defaults of a role.
    pub fn new(ports: DefaultPorts) -> Self {
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        Self {
            model: None,
            engine: "model".to_owned(),
            time_scale: 1.0,
            served_model_name: None,
            device: "cpu".to_owned(),
            threads: None,
            pin: false,
            isa: None,
            weights: "auto".to_owned(),
            tensor_parallel: None,
            kv_memory: None,
            gpu_memory_utilization: None,
            cuda_graphs: false,
            cuda_deterministic: true,
            cuda_kernels: None,
            ballast: "0".to_owned(),
            max_model_len: None,
            max_batch_rows: 512,
            profile_steps: true,
            listen: local(ports.listen),
            admin: local(ports.admin),
            advertise: None,
            zone: None,
            insecure: false,
            listener: RawListener::default(),
            tls: ServerTlsFlags::default(),
            process: RawProcess::default(),
        }
    }
}

/// Default ports of a role.
#[derive(Debug, Clone, Copy)]
pub struct DefaultPorts {
    /// Port for routers.
    pub listen: u16,
    /// Port for health and metrics.
    pub admin: u16,
}

/// Validated settings common to draft and target workers.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The checkpoint directory; `None` only for a worker that needs no model.
    pub model: Option<PathBuf>,
    /// The synthetic engine, if it runs instead of a model.
    pub synthetic: Option<SyntheticConfig>,
    /// Model name that clients request; `None`: as [`engine::model_name`] finds it.
    pub served_model_name: Option<String>,
    /// The compute device.
    pub device: ComputeDevice,
    /// Number of compute threads.
    pub threads: usize,
    /// Whether each compute thread is pinned to its own core.
    pub pin: bool,
    /// The instruction set; `None`: the process's default.
    pub isa: Option<String>,
    /// The weight format.
    pub weights: WeightFormat,
    /// Approximate number of ballast parameters, which change no token; 0 except in demonstrations and
    /// benchmarks.
    pub ballast: u64,
    /// Number of tensor-parallel ranks; 1 also stands for one per GPU.
    pub tensor_parallel: usize,
    /// KV cache memory limit.
    pub kv_memory: MemoryLimit,
    /// Fraction of GPU memory to use; if set, it determines the KV cache size instead of `kv_memory`.
    pub gpu_memory_utilization: Option<f32>,
    /// Whether GPUs replay steps as CUDA graphs.
    pub cuda_graphs: bool,
    /// Whether a row's bits on GPUs depend only on that row.
    pub cuda_deterministic: bool,
    /// Directory of compiled kernels; `None`: kernels are compiled at start.
    pub cuda_kernels: Option<PathBuf>,
    /// Maximum sequence length, if shorter than the model's.
    pub max_model_len: Option<u32>,
    /// Maximum rows in one forward pass.
    pub max_batch_rows: usize,
    /// Whether to measure step times at start.
    pub profile_steps: bool,
    /// Address that routers connect to.
    pub listen: SocketAddr,
    /// Address of health and metrics.
    pub admin: SocketAddr,
    /// Advertised URL, if not the bound address.
    pub advertise: Option<String>,
    /// Zone, published in the registration.
    pub zone: Option<String>,
    /// Limits on connections and their timeouts.
    pub listener: ListenerConfig,
    /// TLS configuration of the router port; `None`: plain HTTP.
    pub tls: Option<ServerTls>,
    /// Settings common to every process.
    pub process: ProcessConfig,
}

impl WorkerConfig {
    /// URL scheme of this worker's router port.
    pub fn scheme(&self) -> &'static str {
        scheme(self.tls.as_ref())
    }
}

fn scheme(tls: Option<&ServerTls>) -> &'static str {
    if tls.is_some() { "https" } else { "http" }
}

/// Settings of a synthetic engine.
#[derive(Debug, Clone)]
pub struct SyntheticConfig {
    /// Profile of the simulated pools.
    pub profile: Arc<Profile>,
    /// Factor by which every step time is multiplied.
    pub time_scale: f64,
}
