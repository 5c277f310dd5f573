//! Checks the flags for devices and their memory against each other, and makes the memory arguments of the
//! workers. Pure: it does not look for GPUs.

use worker::compute_device::ComputeDevice;
use worker::memory::MemoryLimit;

use super::{EngineChoice, PreflightFault};
use crate::cluster::DraftKind;
use crate::up::args::UpArgs;

/// The workers of one role.
struct Pool<'a> {
    /// The device of each worker.
    device: &'a ComputeDevice,
    workers: u64,
    kv_memory: Option<&'a str>,
    /// The flag of `kv_memory`.
    kv_flag: &'static str,
}

/// The faults of all flags about devices.
pub(super) fn faults(args: &UpArgs, engine: &EngineChoice) -> Vec<PreflightFault> {
    let draft_is_model = matches!(engine.draft, DraftKind::Model(_));
    let no_gpu = ComputeDevice::Cpu;
    let target = Pool {
        device: &args.device,
        workers: args.target_workers.unwrap_or(engine.target_workers),
        kv_memory: args.kv_memory.as_deref(),
        kv_flag: "--kv-memory",
    };
    let draft = Pool {
        device: if draft_is_model { &args.draft_device } else { &no_gpu },
        workers: args.draft_workers.unwrap_or(engine.draft_workers),
        kv_memory: args.draft_kv_memory.as_deref(),
        kv_flag: "--draft-kv-memory",
    };
    let pools = [target, draft];
    let mut faults = Vec::new();
    if !draft_is_model && args.draft_device != ComputeDevice::Cpu {
        faults.push(PreflightFault::DraftWithoutModel { device: args.draft_device.clone() });
    }
    faults.extend(pools.iter().filter_map(part_of_host_memory));
    faults.extend(shared_gpu(&pools));
    let has_effect = |pool: &Pool<'_>| pool.device.sizes_kv_by_utilization(pool.kv_memory.is_some());
    let unused = args.gpu_memory_utilization.filter(|_| !pools.iter().any(has_effect));
    faults.extend(unused.map(|part| PreflightFault::UnusedUtilization { part }));
    faults
}

/// Arguments for the KV memory of a worker. Workers refuse a part of a GPU's memory where it has no effect.
pub(super) fn memory_args(device: &ComputeDevice, kv_memory: Option<&str>, part: Option<f32>) -> Vec<String> {
    let part = part.filter(|_| device.sizes_kv_by_utilization(kv_memory.is_some()));
    let size = kv_memory.map(|size| format!("--kv-memory={size}"));
    let part = part.map(|part| format!("--gpu-memory-utilization={part}"));
    size.into_iter().chain(part).collect()
}

fn part_of_host_memory(pool: &Pool<'_>) -> Option<PreflightFault> {
    let size = pool.kv_memory.filter(|_| !pool.device.gpus().is_empty())?;
    let is_part = size.parse().is_ok_and(MemoryLimit::is_share_of_host);
    is_part.then(|| PreflightFault::PartOfHostMemory { flag: pool.kv_flag, size: size.to_owned() })
}

/// Workers start at the same time: without a size, each would divide the memory that the others are about to
/// take.
fn shared_gpu(pools: &[Pool<'_>]) -> Option<PreflightFault> {
    pools.iter().flat_map(|pool| pool.device.gpus()).find_map(|&gpu| {
        let there: Vec<&Pool<'_>> = pools.iter().filter(|pool| pool.device.gpus().contains(&gpu)).collect();
        let workers: u64 = there.iter().map(|pool| pool.workers).sum();
        let unsized_pools = there.iter().filter(|pool| pool.kv_memory.is_none());
        let flags: Vec<&str> = unsized_pools.map(|pool| pool.kv_flag).collect();
        let is_fault = workers > 1 && !flags.is_empty();
        is_fault.then(|| PreflightFault::SharedGpu { workers, gpu, flags: flags.join(" and ") })
    })
}
