//! Settings common to draft and target workers.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use engine::{ParameterCount, WeightFormat};
use scheduling::profile::Profile;
use serde::{Deserialize, Serialize};
use service::accept::{ListenerConfig, ListenerFlags, RawListener};
use service::config::Faults;
use service::discovery::{DiscoveryUri, address_fault, has_unspecified_host};
use service::process::{ProcessConfig, ProcessFlags, RawProcess};
use service::tls::{RawServerTls, ServerTls, ServerTlsFlags};

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
    /// Model name that clients request [default: the directory's name]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Compute device: cpu, a GPU as cuda:0, or several GPUs of this machine as cuda:0,1 to split the model
    /// over them
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Compute threads [default: all cores]; several workers on one machine may each use all cores, because
    /// waiting threads sleep while others need the cores
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
    /// Weight format: auto (as stored), f32, bf16, fp8 (as stored in an FP8 checkpoint), or int8 or int4, quantized
    /// while loading
    #[arg(long, value_name = "FORMAT")]
    pub weights: Option<String>,
    /// Number of tensor-parallel ranks: 1, 2, 4 or 8; on the CPU each rank is a thread with a share of
    /// --threads
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
    /// rows [default: true]
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
    /// Measure forward times at start, for about a second, so that routers can choose draft lengths
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
    tensor_parallel: usize,
    kv_memory: Option<String>,
    gpu_memory_utilization: Option<f32>,
    cuda_graphs: bool,
    cuda_deterministic: bool,
    cuda_kernels: Option<PathBuf>,
    ballast: String,
    max_model_len: Option<u32>,
    max_batch_rows: usize,
    profile_steps: bool,
    listen: Option<SocketAddr>,
    admin: Option<SocketAddr>,
    advertise: Option<String>,
    zone: Option<String>,
    insecure: bool,
    #[serde(flatten)]
    listener: RawListener,
    #[serde(flatten)]
    tls: RawServerTls,
    #[serde(flatten)]
    process: RawProcess,
}

impl Default for RawWorker {
    fn default() -> Self {
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
            tensor_parallel: 1,
            kv_memory: None,
            gpu_memory_utilization: None,
            cuda_graphs: false,
            cuda_deterministic: true,
            cuda_kernels: None,
            ballast: "0".to_owned(),
            max_model_len: None,
            max_batch_rows: 512,
            profile_steps: true,
            listen: None,
            admin: None,
            advertise: None,
            zone: None,
            insecure: false,
            listener: RawListener::default(),
            tls: RawServerTls::default(),
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
    /// Model name that clients request; `None`: the directory's name.
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
    /// Number of tensor-parallel ranks.
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

/// Default limit of KV cache memory on the host.
const DEFAULT_KV_MEMORY: MemoryLimit = MemoryLimit::Bytes(1 << 30);
/// Default fraction of GPU memory to use.
const DEFAULT_GPU_MEMORY_UTILIZATION: f32 = 0.9;

/// Maximum time scale; its inverse is the minimum.
const TIME_SCALE_MAX: f64 = 1_000.0;

impl RawWorker {
    /// The configured checkpoint directory.
    pub fn model(&self) -> Option<&PathBuf> {
        self.model.as_ref()
    }

    /// Whether the engine is a model.
    pub fn needs_model(&self) -> bool {
        self.engine == "model"
    }

    fn synthetic(&self, faults: &mut Faults) -> Option<SyntheticConfig> {
        if self.needs_model() {
            return None;
        }
        let Some(file) = self.engine.strip_prefix("synthetic:") else {
            let expected = "expected model or synthetic:FILE";
            faults.add("engine", format_args!("`{}` is unknown, {expected}", self.engine));
            return None;
        };
        faults.check("model", self.model.is_none(), || {
            "a synthetic engine runs no model: remove --model".to_owned()
        });
        let in_range = (1.0 / TIME_SCALE_MAX..=TIME_SCALE_MAX).contains(&self.time_scale);
        faults.check("time_scale", in_range, || {
            format!("{} is not between {} and {TIME_SCALE_MAX}", self.time_scale, 1.0 / TIME_SCALE_MAX)
        });
        let read = std::fs::read_to_string(file).map_err(|error| error.to_string());
        match read.and_then(|text| Profile::parse(&text).map_err(|error| error.to_string())) {
            Ok(profile) => Some(SyntheticConfig { profile: Arc::new(profile), time_scale: self.time_scale }),
            Err(error) => {
                faults.add("engine", format_args!("{file}: {error}"));
                None
            }
        }
    }

    /// Fraction of GPU memory to use; `None` on the CPU or if `kv_memory` gives a size.
    fn gpu_memory_utilization(&self, device: Option<&ComputeDevice>, faults: &mut Faults) -> Option<f32> {
        let (given, sized) = (self.gpu_memory_utilization, self.kv_memory.is_some());
        let on_gpu = matches!(device, Some(ComputeDevice::Cuda(_)));
        if let Some(part) = given {
            faults.check("gpu_memory_utilization", part > 0.0 && part <= 1.0, || {
                format!("{part} is not above 0 and at most 1")
            });
            faults.check("gpu_memory_utilization", on_gpu && !sized, || {
                "has no effect here: it sizes the KV cache only on a GPU and without --kv-memory".to_owned()
            });
        }
        (on_gpu && !sized).then_some(given.unwrap_or(DEFAULT_GPU_MEMORY_UTILIZATION))
    }

    fn check_isa(&self, faults: &mut Faults) {
        let available = engine::instruction_sets();
        if let Some(isa) = self.isa.as_deref().filter(|isa| !available.contains(isa)) {
            faults.add(
                "isa",
                format_args!("`{isa}` is not supported by this CPU, which has: {}", available.join(", ")),
            );
        }
    }

    /// Anyone who can connect to a worker can use it, so a non-loopback address requires client certificates
    /// or `--insecure`.
    fn check_openness(&self, listen: SocketAddr, faults: &mut Faults) {
        let is_closed = self.tls.is_mutual() || listen.ip().is_loopback();
        faults.check("listen", is_closed || self.insecure, || {
            format!(
                "{listen} is reachable from other machines: require client certificates of routers (--tls-cert, --tls-key, --tls-client-ca), \
                 listen on 127.0.0.1, or pass --insecure if only routers can reach it"
            )
        });
    }

    /// Routers must be able to connect to the address that the worker registers.
    fn check_advertised(
        &self,
        scheme: &str,
        listen: SocketAddr,
        discovery: Option<&DiscoveryUri>,
        faults: &mut Faults,
    ) {
        let Some(url) = &self.advertise else {
            let is_registered = matches!(discovery, Some(DiscoveryUri::Etcd { .. }));
            faults.check("advertise", !is_registered || !listen.ip().is_unspecified(), || {
                format!(
                    "routers cannot connect to {listen}, which stands for all addresses of this machine: pass \
                     --advertise {scheme}://HOST:PORT with a name or an address of this machine that routers can reach"
                )
            });
            return;
        };
        let is_usable = url.starts_with(&format!("{scheme}://")) && address_fault(url).is_none();
        faults.check("advertise", is_usable, || {
            format!(
                "`{url}` is not {scheme}://HOST:PORT; the scheme is https with --tls-cert and http without it"
            )
        });
        faults.check("advertise", !has_unspecified_host(url), || {
            format!(
                "routers cannot connect to `{url}`, whose host stands for all addresses of a machine: give a name \
                 or an address of this machine that routers can reach"
            )
        });
    }

    /// Validates all settings. Faults go to `faults`; returns `None` after some of them.
    pub fn validate(self, ports: DefaultPorts, faults: &mut Faults) -> Option<WorkerConfig> {
        let device = faults.parse::<ComputeDevice>("device", &self.device);
        let weights = WeightFormat::named(&self.weights);
        faults.check("weights", weights.is_some(), || {
            format!("`{}` is unknown, expected auto, f32, bf16, fp8, int8 or int4", self.weights)
        });
        let synthetic = self.synthetic(faults);
        let kv_memory = match &self.kv_memory {
            None => Some(DEFAULT_KV_MEMORY),
            Some(size) => faults.parse::<MemoryLimit>("kv_memory", size),
        };
        let gpu_memory_utilization = self.gpu_memory_utilization(device.as_ref(), faults);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        let threads = self.threads.unwrap_or(cores);
        self.check_ranges(threads, faults);
        faults.check("pin", !self.pin || matches!(device, None | Some(ComputeDevice::Cpu)), || {
            "pins CPU threads, but --device is not cpu: remove one of them".to_owned()
        });
        self.check_isa(faults);
        let tls = self.tls.validate(faults);
        let ballast = faults.parse::<ParameterCount>("ballast", &self.ballast);
        faults.check("ballast", self.needs_model() || ballast.is_none_or(|ballast| ballast.0 == 0), || {
            "a synthetic engine has no weights: remove --ballast".to_owned()
        });
        let process = self.process.validate(faults);
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let listen = self.listen.unwrap_or_else(|| local(ports.listen));
        self.check_openness(listen, faults);
        let discovery = process.as_ref().map(|process| &process.discovery.uri);
        self.check_advertised(scheme(tls.as_ref()), listen, discovery, faults);
        Some(WorkerConfig {
            model: self.model,
            synthetic,
            served_model_name: self.served_model_name,
            device: device?,
            threads,
            pin: self.pin,
            isa: self.isa,
            weights: weights?,
            ballast: ballast?.0,
            tensor_parallel: self.tensor_parallel,
            kv_memory: kv_memory?,
            gpu_memory_utilization,
            cuda_graphs: self.cuda_graphs,
            cuda_deterministic: self.cuda_deterministic,
            cuda_kernels: self.cuda_kernels,
            max_model_len: self.max_model_len,
            max_batch_rows: self.max_batch_rows,
            profile_steps: self.profile_steps,
            listen,
            admin: self.admin.unwrap_or_else(|| local(ports.admin)),
            advertise: self.advertise,
            zone: self.zone,
            listener: self.listener.validate(faults),
            tls,
            process: process?,
        })
    }

    fn check_ranges(&self, threads: usize, faults: &mut Faults) {
        faults.check("tensor_parallel", matches!(self.tensor_parallel, 1 | 2 | 4 | 8), || {
            format!("{} is not 1, 2, 4 or 8", self.tensor_parallel)
        });
        faults
            .check("threads", (1..=512).contains(&threads), || format!("{threads} is not between 1 and 512"));
        faults.check("max_batch_rows", (1..=65_536).contains(&self.max_batch_rows), || {
            format!("{} is not between 1 and 65536", self.max_batch_rows)
        });
        faults.check("max_model_len", self.max_model_len != Some(0), || "must be at least 1".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The resulting fraction of GPU memory; outer `None` if the settings are rejected.
    fn part(device: &str, kv_memory: Option<&str>, given: Option<f32>) -> Option<Option<f32>> {
        let raw = RawWorker {
            device: device.to_owned(),
            kv_memory: kv_memory.map(str::to_owned),
            gpu_memory_utilization: given,
            ..RawWorker::default()
        };
        let mut faults = Faults::new();
        let config = raw.validate(DefaultPorts { listen: 0, admin: 0 }, &mut faults);
        faults.is_empty().then(|| config.map(|config| config.gpu_memory_utilization))?
    }

    #[test]
    fn kv_on_a_gpu_has_a_size_or_what_a_part_leaves() {
        assert_eq!(part("cpu", None, None), Some(None));
        assert_eq!(part("cuda:0", None, None), Some(Some(0.9)));
        assert_eq!(part("cuda:0,1", None, Some(0.5)), Some(Some(0.5)));
        assert_eq!(part("cuda:0", Some("4GiB"), None), Some(None));
        assert_eq!(part("cuda:0", Some("4GiB"), Some(0.5)), None);
        assert_eq!(part("cpu", None, Some(0.5)), None);
        for bad in [0.0, -1.0, 1.01, f32::NAN] {
            assert_eq!(part("cuda:0", None, Some(bad)), None, "{bad}");
        }
    }

    #[test]
    fn an_instruction_set_is_one_that_the_cpu_has() {
        let fault = |isa: &str| {
            let raw = RawWorker { isa: Some(isa.to_owned()), ..RawWorker::default() };
            let mut faults = Faults::new();
            raw.validate(DefaultPorts { listen: 0, admin: 0 }, &mut faults);
            faults.finish().err().map(|error| error.to_string())
        };
        for isa in engine::instruction_sets() {
            assert_eq!(fault(isa), None);
        }
        let text = fault("mmx").unwrap();
        assert!(text.contains("`mmx`") && text.contains("portable"), "{text}");
    }

    /// The faults of listening on `listen`, if any.
    fn fault(listen: &str, insecure: bool) -> Option<String> {
        let raw = RawWorker { listen: Some(listen.parse().unwrap()), insecure, ..RawWorker::default() };
        let mut faults = Faults::new();
        raw.validate(DefaultPorts { listen: 0, admin: 0 }, &mut faults);
        faults.finish().err().map(|error| error.to_string())
    }

    #[test]
    fn beyond_this_machine_a_worker_asks_for_certificates_or_is_told_that_it_need_not() {
        for local in ["127.0.0.1:8110", "[::1]:8110"] {
            assert_eq!(fault(local, false), None);
        }
        for open in ["0.0.0.0:8110", "[::]:8110", "10.0.0.7:8110"] {
            let fault_of = fault(open, false).unwrap();
            assert!(fault_of.contains("--tls-client-ca") && fault_of.contains("--insecure"), "{fault_of}");
            assert_eq!(fault(open, true), None);
        }
    }

    /// The faults of a worker that listens on `listen`, registers there and advertises `advertise`, if any.
    fn advertised_fault(discovery: &str, listen: &str, advertise: Option<&str>) -> Option<String> {
        let settings = serde_json::json!({
            "discovery": discovery, "listen": listen, "advertise": advertise, "insecure": true
        });
        let mut raw = serde_json::to_value(RawWorker::default()).unwrap();
        raw.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        let raw: RawWorker = serde_json::from_value(raw).unwrap();
        let mut faults = Faults::new();
        raw.validate(DefaultPorts { listen: 0, admin: 0 }, &mut faults);
        faults.finish().err().map(|error| error.to_string())
    }

    #[test]
    fn a_worker_registers_an_address_that_routers_can_connect_to() {
        let etcd = "etcd://10.0.0.2:2379/outrider";
        for listen in ["0.0.0.0:8110", "[::]:8110"] {
            let fault = advertised_fault(etcd, listen, None).unwrap();
            assert!(fault.contains("pass --advertise http://HOST:PORT"), "{fault}");
            for discovery in ["memory", "static:workers.toml"] {
                assert_eq!(
                    advertised_fault(discovery, listen, None),
                    None,
                    "such a worker does not register"
                );
            }
            for usable in ["http://10.0.0.7:8110", "http://target-0:8110/", "http://[fd00::7]:8110"] {
                assert_eq!(advertised_fault(etcd, listen, Some(usable)), None);
            }
            for (bad, expected) in [
                ("http://10.0.0.7", "is not http://HOST:PORT"),
                ("https://10.0.0.7:8110", "is not http://HOST:PORT"),
                ("10.0.0.7:8110", "is not http://HOST:PORT"),
                ("http://10.0.0.7:8110/v1", "is not http://HOST:PORT"),
                ("http://0.0.0.0:8110", "routers cannot connect to"),
                ("http://[::]:8110", "routers cannot connect to"),
            ] {
                let fault = advertised_fault(etcd, listen, Some(bad)).unwrap();
                assert!(fault.contains(bad) && fault.contains(expected), "{fault}");
            }
        }
        for listen in ["127.0.0.1:8110", "10.0.0.7:8110"] {
            assert_eq!(advertised_fault(etcd, listen, None), None);
        }
    }
}
