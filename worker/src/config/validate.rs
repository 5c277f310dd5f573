//! Validation of worker settings: collects all faults, each with what is wrong and what to do.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use engine::{ParameterCount, WeightFormat};
use scheduling::profile::Profile;
use service::config::Faults;
use service::discovery::{DiscoveryUri, address_fault, has_unspecified_host};

use super::{RawWorker, SyntheticConfig, WorkerConfig, scheme};
use crate::compute_device::ComputeDevice;
use crate::memory::{MemoryLimit, is_memory_fraction};

/// Default limit of KV cache memory on the host.
const DEFAULT_KV_MEMORY: MemoryLimit = MemoryLimit::Bytes(1 << 30);
/// Default fraction of GPU memory to use.
const DEFAULT_GPU_MEMORY_UTILIZATION: f32 = 0.9;

/// Maximum number of compute threads.
const THREADS_MAX: usize = 512;

/// Maximum time scale; its inverse is the minimum.
const TIME_SCALE_MAX: f64 = 1_000.0;

impl RawWorker {
    /// The configured checkpoint directory.
    pub fn model(&self) -> Option<&PathBuf> {
        self.model.as_ref()
    }

    /// The configured number of ranks.
    pub fn tensor_parallel(&self) -> Option<usize> {
        self.tensor_parallel
    }

    /// Whether the operator allows anyone who can connect.
    pub fn is_insecure(&self) -> bool {
        self.insecure
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
        faults.check_between("time_scale", self.time_scale, 1.0 / TIME_SCALE_MAX..=TIME_SCALE_MAX);
        let read = std::fs::read_to_string(file).map_err(|error| error.to_string());
        match read.and_then(|text| Profile::parse(&text).map_err(|error| error.to_string())) {
            Ok(profile) => Some(SyntheticConfig { profile: Arc::new(profile), time_scale: self.time_scale }),
            Err(error) => {
                faults.add("engine", format_args!("{file}: {error}"));
                None
            }
        }
    }

    /// A missing checkpoint is a fault of the configuration. Its files are checked by loading them.
    fn check_model(&self, faults: &mut Faults) {
        if let Some(directory) = &self.model {
            faults.check("model", directory.is_dir(), || {
                format!("{} is not a directory that can be read", directory.display())
            });
        }
    }

    /// Limit of KV cache memory.
    fn kv_memory(&self, device: Option<&ComputeDevice>, faults: &mut Faults) -> Option<MemoryLimit> {
        let Some(size) = &self.kv_memory else { return Some(DEFAULT_KV_MEMORY) };
        let limit = faults.parse::<MemoryLimit>("kv_memory", size)?;
        let on_gpu = matches!(device, Some(ComputeDevice::Cuda(_)));
        faults.check("kv_memory", !(limit.is_share_of_host() && on_gpu), || {
            format!("{size} is a part of the host's memory, not of a GPU's: give a size, or use --gpu-memory-utilization")
        });
        Some(limit)
    }

    /// Fraction of GPU memory to use; `None` on the CPU or if `kv_memory` gives a size.
    fn gpu_memory_utilization(&self, device: Option<&ComputeDevice>, faults: &mut Faults) -> Option<f32> {
        let given = self.gpu_memory_utilization;
        let has_effect =
            device.is_some_and(|device| device.sizes_kv_by_utilization(self.kv_memory.is_some()));
        if let Some(part) = given {
            faults.check("gpu_memory_utilization", is_memory_fraction(part), || {
                format!("{part} is not above 0 and at most 1")
            });
            faults.check("gpu_memory_utilization", has_effect, || {
                "has no effect here: it sizes the KV cache only on a GPU and without --kv-memory".to_owned()
            });
        }
        has_effect.then_some(given.unwrap_or(DEFAULT_GPU_MEMORY_UTILIZATION))
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
    pub fn validate(self, faults: &mut Faults) -> Option<WorkerConfig> {
        let device = faults.parse::<ComputeDevice>("device", &self.device);
        let weights = WeightFormat::named(&self.weights);
        faults.check("weights", weights.is_some(), || {
            format!("`{}` is unknown, expected auto, f32, bf16, fp8, int8 or int4", self.weights)
        });
        let synthetic = self.synthetic(faults);
        self.check_model(faults);
        let kv_memory = self.kv_memory(device.as_ref(), faults);
        let gpu_memory_utilization = self.gpu_memory_utilization(device.as_ref(), faults);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        let threads = self.threads.unwrap_or_else(|| default_threads(cores));
        self.check_ranges(threads, faults);
        faults.check("pin", !self.pin || matches!(device, None | Some(ComputeDevice::Cpu)), || {
            "pins CPU threads, but --device is not cpu: remove --pin, or use --device cpu".to_owned()
        });
        self.check_isa(faults);
        let tls = self.tls.validate(faults);
        let ballast = faults.parse::<ParameterCount>("ballast", &self.ballast);
        faults.check("ballast", self.needs_model() || ballast.is_none_or(|ballast| ballast.0 == 0), || {
            "a synthetic engine has no weights: remove --ballast".to_owned()
        });
        let process = self.process.validate(faults);
        let (listen, admin) = (self.listen, self.admin);
        faults.check_distinct(&[("listen", listen), ("admin", admin)]);
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
            tensor_parallel: self.tensor_parallel.unwrap_or(1),
            kv_memory: kv_memory?,
            gpu_memory_utilization,
            cuda_graphs: self.cuda_graphs,
            cuda_deterministic: self.cuda_deterministic,
            cuda_kernels: self.cuda_kernels,
            max_model_len: self.max_model_len,
            max_batch_rows: self.max_batch_rows,
            profile_steps: self.profile_steps,
            listen,
            admin,
            advertise: self.advertise,
            zone: self.zone,
            listener: self.listener.validate(faults),
            tls,
            process: process?,
        })
    }

    fn check_ranges(&self, threads: usize, faults: &mut Faults) {
        if let Some(ranks) = self.tensor_parallel {
            let is_supported = matches!(ranks, 1 | 2 | 4 | 8);
            faults.check("tensor_parallel", is_supported, || format!("{ranks} is not 1, 2, 4 or 8"));
        }
        faults.check_between("threads", threads, 1..=THREADS_MAX);
        faults.check_between("max_batch_rows", self.max_batch_rows, 1..=65_536);
        if let Some(max_model_len) = self.max_model_len {
            faults.check_positive("max_model_len", max_model_len);
        }
    }
}

/// Number of compute threads by default, on a machine with `cores` hardware threads.
fn default_threads(cores: usize) -> usize {
    cores.min(THREADS_MAX)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::DefaultPorts;

    fn defaults() -> RawWorker {
        RawWorker::new(DefaultPorts { listen: 0, admin: 0 })
    }

    /// The resulting fraction of GPU memory; outer `None` if the settings are rejected.
    fn part(device: &str, kv_memory: Option<&str>, given: Option<f32>) -> Option<Option<f32>> {
        let raw = RawWorker {
            device: device.to_owned(),
            kv_memory: kv_memory.map(str::to_owned),
            gpu_memory_utilization: given,
            ..defaults()
        };
        let mut faults = Faults::new();
        let config = raw.validate(&mut faults);
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
        assert_eq!(part("cpu", Some("60%"), None), Some(None));
        assert_eq!(part("cuda:0", Some("60%"), None), None, "a part of the host's memory");
        for bad in [0.0, -1.0, 1.01, f32::NAN] {
            assert_eq!(part("cuda:0", None, Some(bad)), None, "{bad}");
        }
    }

    #[test]
    fn a_machine_of_any_size_starts_with_its_default_of_threads() {
        for (cores, expected) in [(1, 1), (512, 512), (513, 512), (1_024, 512)] {
            let threads = default_threads(cores);
            let mut faults = Faults::new();
            defaults().check_ranges(threads, &mut faults);
            assert!(threads == expected && faults.is_empty(), "{cores} cores");
        }
    }

    #[test]
    fn threads_are_pinned_on_the_cpu_only() {
        let raw = RawWorker { pin: true, device: "cuda:0".to_owned(), ..defaults() };
        let mut faults = Faults::new();
        raw.validate(&mut faults);
        let fault = faults.finish().unwrap_err().to_string();
        let expected = "pin: pins CPU threads, but --device is not cpu: remove --pin, or use --device cpu";
        assert!(fault.contains(expected), "{fault}");
    }

    #[test]
    fn an_instruction_set_is_one_that_the_cpu_has() {
        let fault = |isa: &str| {
            let raw = RawWorker { isa: Some(isa.to_owned()), ..defaults() };
            let mut faults = Faults::new();
            raw.validate(&mut faults);
            faults.finish().err().map(|error| error.to_string())
        };
        for isa in engine::instruction_sets() {
            assert_eq!(fault(isa), None);
        }
        let text = fault("mmx").unwrap();
        assert!(text.contains("`mmx`") && text.contains("portable"), "{text}");
    }

    #[test]
    fn a_checkpoint_is_a_directory_that_exists() {
        let fault = |model: &Path| {
            let raw = RawWorker { model: Some(model.to_owned()), ..defaults() };
            let mut faults = Faults::new();
            raw.validate(&mut faults);
            faults.finish().err().map(|error| error.to_string())
        };
        let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert_eq!(fault(crate_dir), None, "its files are checked by loading them");
        for bad in [crate_dir.join("nowhere"), crate_dir.join("Cargo.toml")] {
            let expected =
                format!("bad configuration: model: {} is not a directory that can be read", bad.display());
            assert_eq!(fault(&bad), Some(expected));
        }
    }

    #[test]
    fn a_missing_profile_is_named() {
        let raw = RawWorker { engine: "synthetic:nowhere.toml".to_owned(), ..defaults() };
        let mut faults = Faults::new();
        raw.validate(&mut faults);
        let fault = faults.finish().unwrap_err().to_string();
        assert!(fault.contains("engine: nowhere.toml: No such file"), "{fault}");
    }

    /// The faults of listening on `listen`, if any.
    fn fault(listen: &str, insecure: bool) -> Option<String> {
        let raw = RawWorker { listen: listen.parse().unwrap(), insecure, ..defaults() };
        let mut faults = Faults::new();
        raw.validate(&mut faults);
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
        let mut raw = serde_json::to_value(defaults()).unwrap();
        raw.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        let raw: RawWorker = serde_json::from_value(raw).unwrap();
        let mut faults = Faults::new();
        raw.validate(&mut faults);
        faults.finish().err().map(|error| error.to_string())
    }

    #[test]
    fn a_worker_registers_an_address_that_routers_can_connect_to() {
        let etcd = "etcd://10.0.0.2:2379/outrider";
        for listen in ["0.0.0.0:8110", "[::]:8110"] {
            let fault = advertised_fault(etcd, listen, None).unwrap();
            assert!(fault.contains("pass --advertise http://HOST:PORT"), "{fault}");
            for discovery in ["memory", "static:/dev/null"] {
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
