//! Loads a model onto the GPUs of this machine: onto one GPU, or onto several that NCCL connects, with one
//! rank and one thread per GPU. The ranks of several nodes are one NCCL communicator.

use std::path::PathBuf;
use std::sync::Arc;

use super::device::CudaDevice;
use super::numerics::Numerics;
use super::ranks::{
    Exchange, NcclLibrary, RankMember, Ranks, SumPhases, check_loadable, connect, connect_nodes,
    exchange_once, load_on_node, use_peers,
};
use super::warm_up::warm_up;
use crate::EngineError;
use crate::collective::RankBarrier;
use crate::load::{Loaded, WATCHDOG};
use crate::model_config::ModelConfig;
use crate::nodes::{Nodes, ranks_of_node};
use crate::options::LoadOptions;
use crate::shard::Shard;
use crate::weights::{ModelSpec, TensorSource};

/// The GPUs that a model is loaded onto, and how they are used.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuOptions {
    /// Device numbers as the driver counts them; one rank per device.
    pub ordinals: Vec<usize>,
    /// Share of each GPU's memory that may be used in total, above 0 and at most 1. The KV cache gets what
    /// weights and a forward's workspace leave of it. `None`: the KV cache has `LoadOptions::kv_memory_bytes`
    /// over all GPUs.
    pub memory_utilization: Option<f32>,
    /// Whether repeated kernel launches are replayed as CUDA graphs.
    pub graphs: bool,
    /// Whether blocks of products share operands in clusters, on compute capability 9.0. Off in workers until
    /// it has run on a GPU (docs/adr/0096-clusters-share-operands.md).
    pub clusters: bool,
    /// Whether a kernel forms short sums over ranks, if all GPUs access each other's memory. Off in workers
    /// until it has run on several GPUs (docs/adr/0108-an-all-reduce-over-peer-pointers.md).
    pub peer_sums: bool,
    /// Minimum number of rows of bf16 products that cuBLASLt computes. `None`: this crate's deterministic
    /// kernels compute all products.
    pub cublaslt_min_rows: Option<usize>,
    /// Folder of compiled kernels, as `kernels_check --write` makes it. `None`: NVRTC compiles them.
    pub kernels: Option<PathBuf>,
}

impl GpuOptions {
    /// Default for `cublaslt_min_rows` if results need not be deterministic: prefill and large verify
    /// batches. From this number on it is faster on an H200 (docs/measurements/gpu.md).
    pub const CUBLASLT_MIN_ROWS: usize = 32;

    /// These GPUs with a fixed size of the KV cache, deterministic products, and no graphs, clusters or sums
    /// over peer pointers.
    pub fn for_devices(ordinals: &[usize]) -> Self {
        let (memory_utilization, cublaslt_min_rows, kernels) = (None, None, None);
        Self {
            ordinals: ordinals.to_vec(),
            memory_utilization,
            graphs: false,
            clusters: false,
            peer_sums: false,
            cublaslt_min_rows,
            kernels,
        }
    }
}

/// Loads a model onto GPUs. Each allocates its part of the whole KV cache.
pub(crate) fn load_on_gpus(
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: ModelSpec,
    (gpus, nodes): (&GpuOptions, Option<&Arc<Nodes>>),
) -> Result<Loaded, EngineError> {
    let ordinals = gpus.ordinals.as_slice();
    // First whatever needs no device: it is refused before minutes of compiling, connecting and loading.
    let node = nodes.map(Arc::as_ref);
    check_ranks(options, &model.config, ordinals, node)?;
    check_peer_sums(gpus, node)?;
    check_loadable(options, &model, (ordinals.len(), gpus.memory_utilization), node)?;
    let barrier = Arc::new(RankBarrier::of_node(ranks_of_node(ordinals.len(), node), WATCHDOG));
    // For the same reason before the devices are opened.
    let is_split = ordinals.len() > 1 || nodes.is_some();
    let library = is_split.then(NcclLibrary::load).transpose()?;
    let open = |&ordinal| CudaDevice::open(ordinal, gpus.kernels.as_deref());
    let mut devices = ordinals.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    if gpus.clusters {
        devices.iter_mut().for_each(CudaDevice::use_clusters);
    }
    if gpus.graphs {
        // Each node has options of its own, and ranks of other nodes need equal sizes.
        devices.iter_mut().for_each(|device| device.enable_graphs(nodes.is_none()));
    }
    if let Some(rows) = gpus.cublaslt_min_rows {
        devices.iter_mut().try_for_each(|device| device.use_cublaslt(rows))?;
        if is_split {
            warm_up(&mut devices, &model)?;
        }
    }
    let numerics = numerics_of(&devices);
    let members: Vec<RankMember<CudaDevice>> = match library {
        None => devices.into_iter().map(|device| (device, None)).collect(),
        Some(library) => {
            tracing::info!(version = library.version, gpus = ordinals.len(), "nccl connects the ranks");
            let library = Arc::new(library);
            let mut ends = match node {
                None => connect(&mut devices, &library, &barrier)?,
                Some(nodes) => connect_nodes(&mut devices, &library, &barrier, nodes)?,
            };
            if gpus.peer_sums {
                let are_used = use_peers(&mut devices, &mut ends, &barrier)?;
                tracing::info!(are_used, "short sums over peer pointers");
            }
            let boxed = |end| Some(Box::new(end) as Box<dyn Exchange<CudaDevice>>);
            let connected = exchange_once(devices, ends, &barrier)?;
            connected.into_iter().map(|(device, end)| (device, boxed(end))).collect()
        }
    };
    let memory_utilization = gpus.memory_utilization;
    let phases = SumPhases::BY_SIZE;
    let ranks = Ranks { members, barrier, memory_utilization, numerics, phases };
    load_on_node(ranks, nodes, options, source, model)
}

/// The kernel and device class that determine the bits of results.
fn numerics_of(devices: &[CudaDevice]) -> Numerics {
    let capabilities: Vec<(i32, i32)> = devices.iter().map(CudaDevice::capability).collect();
    Numerics::of_devices(&capabilities, devices[0].library_version())
}

/// Peer pointers do not reach the GPUs of other nodes.
fn check_peer_sums(gpus: &GpuOptions, nodes: Option<&Nodes>) -> Result<(), EngineError> {
    if gpus.peer_sums && nodes.is_some() {
        let reason = "gpus do not access the memory of other nodes: leave these sums to NCCL".to_owned();
        return Err(EngineError::BadOption { option: "peer_sums", value: "true".to_owned(), reason });
    }
    Ok(())
}

/// Checks that a model can be split over these devices, the same number on each node: one rank per device,
/// each device once.
fn check_ranks(
    options: &LoadOptions,
    config: &ModelConfig,
    ordinals: &[usize],
    nodes: Option<&Nodes>,
) -> Result<(), EngineError> {
    let refuse = |value: usize, reason: String| {
        Err(EngineError::BadOption { option: "tensor_parallel", value: value.to_string(), reason })
    };
    let gpus = ordinals.len() * nodes.map_or(1, Nodes::count);
    if options.tensor_parallel != 1 && options.tensor_parallel != gpus {
        return refuse(
            options.tensor_parallel,
            format!("expected {gpus}, a rank for each gpu, or none given"),
        );
    }
    if let Some(twice) = ordinals.iter().enumerate().find(|(i, gpu)| ordinals[..*i].contains(gpu)) {
        return refuse(ordinals.len(), format!("cuda:{} is named twice, expected every gpu once", twice.1));
    }
    Shard::all(gpus, config).map(drop)
}

#[cfg(test)]
mod tests {
    use cpu_kernels::MatrixFormat;

    use super::*;
    use crate::WeightFormat;
    use crate::weights::{Formats, RandomTensors};

    fn options(tensor_parallel: usize) -> LoadOptions {
        LoadOptions { tensor_parallel, ..LoadOptions::new("", WeightFormat::Bf16, 1) }
    }

    /// The driver and NCCL are loaded later: without them, their absence would be the error.
    #[test]
    fn an_impossible_model_is_refused_before_a_library_is_loaded() {
        let refused = |head_dim, weights, ordinals: &[usize]| {
            let mut config = crate::model_config::tests::tiny();
            config.head_dim = head_dim;
            let model = ModelSpec { config, formats: Formats::resolve(weights, MatrixFormat::Bf16) };
            let gpus = GpuOptions::for_devices(ordinals);
            let loaded = load_on_gpus(&options(1), &RandomTensors { seed: 1 }, model, (&gpus, None));
            loaded.map(drop).unwrap_err().to_string()
        };
        for ordinals in [&[0][..], &[0, 1]] {
            for (head_dim, weights, says) in [
                (80, WeightFormat::Bf16, "head_dim is 80, expected one of"),
                (16, WeightFormat::F32, "f32 weights have no cuda kernels"),
                (16, WeightFormat::Bf16, "option kv_memory_bytes is 1: 1 bytes for KV are less than one"),
            ] {
                let error = refused(head_dim, weights, ordinals);
                assert!(error.contains(says), "{error}");
            }
        }
    }

    #[test]
    fn gpus_are_counted_and_named_once() {
        let config = crate::model_config::tests::tiny();
        let check = |ranks, ordinals: &[usize]| {
            check_ranks(&options(ranks), &config, ordinals, None).map_err(|error| error.to_string())
        };
        assert_eq!(check(1, &[3]), Ok(()));
        for (ranks, ordinals, says) in [
            (2, &[0][..], "tensor_parallel is 2: expected 1, a rank for each gpu"),
            (1, &[0, 1, 0, 2], "cuda:0 is named twice"),
            (1, &[0, 1, 2], "expected 1, 2, 4 or 8"),
        ] {
            let error = check(ranks, ordinals).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
