//! A model on several ranks with the available GPUs, against the same model on one rank: equal logits, bit
//! for bit. Sums over peer pointers are timed against NCCL.

use std::sync::Arc;
use std::time::Duration;

use super::peer_sums::peer_sums;
use super::{CheckTarget, Report};
use crate::collective::RankBarrier;
use crate::cuda::numerics::Numerics;
use crate::cuda::ranks::{Exchange, NcclLibrary, Ranks, SumPhases, connect, load_on, on_device};
use crate::cuda::whole_model::{options, run};
use crate::cuda::{CudaDevice, GpuOptions};
use crate::{Engine, EngineError, LoadOptions, WeightFormat};

/// Runs until every step was replayed: launched while buffers grow, launched, captured, replayed.
const RUNS_WITH_REPLAYS: usize = 4;

/// Timeout for other ranks in these short runs.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Two and four shards on one device, one rank with NCCL, and 2, 4 and 8 ranks if there are as many GPUs,
/// those of more than two also with sums in two phases, and those that access each other's memory with short
/// sums over peer pointers, launched and replayed. Reports what cannot run on this machine.
pub(super) fn ranks(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let gpus = CudaDevice::count()?;
    let library = NcclLibrary::load();
    match &library {
        Ok(nccl) => report.say(format!("nccl is version {}", nccl.version)),
        Err(error) => report.skipped("nccl with 1 rank", error),
    }
    let counts: Vec<usize> = [2, 4, 8].into_iter().filter(|count| *count <= gpus).collect();
    let mut over_peers = Vec::new();
    for &count in &counts {
        if library.is_ok() && peer_sums(target, count, report)? {
            over_peers.push(count);
        }
    }
    for weights in [WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8] {
        let options = options(target.pair.1.clone(), weights);
        let expected = run(&mut Engine::load(&options.on_gpus(target.gpus()))?)?;
        let mut judge = |case: &str, runs: usize, engine: Result<Engine, EngineError>| {
            let (mut engine, mut is_good) = (engine?, true);
            for _ in 0..runs {
                is_good &= run(&mut engine)? == expected;
            }
            report.check(is_good, format!("{weights:?}, {case}: logits == one rank's"));
            Ok::<(), EngineError>(())
        };
        judge("2 shards on one device", 1, on_one_device(&options, target, (2, SumPhases::BY_SIZE)))?;
        // Two phases need more than two ranks.
        judge(
            "4 shards on one device, two phases",
            1,
            on_one_device(&options, target, (4, SumPhases::ALWAYS_TWO)),
        )?;
        if library.is_ok() {
            judge("nccl with 1 rank", 1, by_nccl(&options, target, &[target.ordinal]))?;
        }
        for &count in &counts {
            let ordinals: Vec<usize> = (0..count).collect();
            let all = GpuOptions { ordinals: ordinals.clone(), ..target.gpus() };
            judge(&format!("nccl with {count} gpus"), 1, Engine::load(&options.on_gpus(all.clone())))?;
            if count > 2 {
                let engine = by_nccl(&options, target, &ordinals);
                judge(&format!("nccl with {count} gpus, two phases"), 1, engine)?;
            }
            if !over_peers.contains(&count) {
                continue;
            }
            let gpus = GpuOptions { peer_sums: true, ..all };
            let case = format!("sums over peer pointers of {count} gpus");
            judge(&format!("{case}, launched"), 1, Engine::load(&options.on_gpus(gpus.clone())))?;
            // The sums are the same ones for every format.
            if weights == WeightFormat::Bf16 {
                let gpus = GpuOptions { graphs: true, ..gpus };
                let engine = Engine::load(&options.on_gpus(gpus));
                judge(&format!("{case}, replayed"), RUNS_WITH_REPLAYS, engine)?;
            }
        }
    }
    if gpus < 2 {
        let why = format!("the driver shows {gpus}");
        report.skipped("nccl with 2 or more gpus", &why);
        report.skipped("sums over peer pointers", &why);
    }
    Ok(())
}

fn load(options: &LoadOptions, ranks: Ranks<CudaDevice>) -> Result<Engine, EngineError> {
    Engine::load_by(options, |source, model| load_on(ranks, options, source, model))
}

fn on_one_device(
    options: &LoadOptions,
    target: &CheckTarget,
    (count, phases): (usize, SumPhases),
) -> Result<Engine, EngineError> {
    let barrier = Arc::new(RankBarrier::new(count, PATIENCE));
    let (mut members, mut capabilities) = (Vec::new(), Vec::new());
    for end in on_device(count, &barrier) {
        let device = target.open()?;
        capabilities.push(device.capability());
        members.push((device, Some(Box::new(end) as Box<dyn Exchange<CudaDevice>>)));
    }
    let numerics = Numerics::of_devices(&capabilities, None);
    load(options, Ranks { members, barrier, memory_utilization: None, numerics, phases })
}

/// A rank on each of these GPUs; sums take two phases where they can.
fn by_nccl(options: &LoadOptions, target: &CheckTarget, ordinals: &[usize]) -> Result<Engine, EngineError> {
    let barrier = Arc::new(RankBarrier::new(ordinals.len(), PATIENCE));
    let open = |&ordinal| CudaDevice::open(ordinal, target.kernels.as_deref());
    let mut devices = ordinals.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let ends = connect(&mut devices, &Arc::new(NcclLibrary::load()?), &barrier)?;
    let capabilities: Vec<(i32, i32)> = devices.iter().map(CudaDevice::capability).collect();
    let numerics = Numerics::of_devices(&capabilities, None);
    let boxed = |end| Some(Box::new(end) as Box<dyn Exchange<CudaDevice>>);
    let members = devices.into_iter().zip(ends.into_iter().map(boxed)).collect();
    let phases = SumPhases::ALWAYS_TWO;
    load(options, Ranks { members, barrier, memory_utilization: None, numerics, phases })
}
