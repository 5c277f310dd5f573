//! A model over several ranks on the GPUs that there are, against the same model on one: equal logits, bit for bit.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::ParityReport;
use crate::collective::Meeting;
use crate::cuda::ranks::{Exchange, NcclLibrary, Ranks, connect, load_on, on_device};
use crate::cuda::whole_model::{options, run};
use crate::cuda::{CudaDevice, GpuOptions};
use crate::{Engine, EngineError, LoadOptions, WeightFormat};

/// How long ranks of these short runs may be apart.
const PATIENCE: Duration = Duration::from_secs(60);

/// One rank connected by NCCL, two shards on the one device, and as many ranks as there are further GPUs. What cannot be run
/// here is a line that says so.
pub fn ranks(ordinal: usize, model_dir: &Path) -> Result<ParityReport, EngineError> {
    let mut report = ParityReport { lines: Vec::new(), failed: 0 };
    let gpus = CudaDevice::count()?;
    for weights in [WeightFormat::Bf16, WeightFormat::Int8] {
        let options = options(model_dir.to_owned(), weights);
        let expected = run(&mut Engine::load_on_cuda(&options, &GpuOptions::on(&[ordinal]))?)?;
        let model = format!("{} as {weights:?}", model_dir.display());
        let mut judge = |case: &str, engine: Result<Engine, EngineError>| -> Result<(), EngineError> {
            let is_good = run(&mut engine?)? == expected;
            report.failed += usize::from(!is_good);
            let verdict = if is_good { "ok" } else { "DIFFERS" };
            report.lines.push(format!("{verdict:<8}{case}, {model}: logits == one rank's"));
            Ok(())
        };
        judge("2 shards on one device", on_one_device(&options, ordinal))?;
        if NcclLibrary::load().is_ok() {
            judge("nccl with 1 rank", by_nccl(&options, ordinal))?;
        }
        for count in [2, 4, 8].into_iter().filter(|count| *count <= gpus) {
            let ordinals: Vec<usize> = (0..count).collect();
            judge(
                &format!("nccl with {count} gpus"),
                Engine::load_on_cuda(&options, &GpuOptions::on(&ordinals)),
            )?;
        }
    }
    match NcclLibrary::load() {
        Ok(nccl) => report.lines.push(format!("        nccl is version {}", nccl.version)),
        Err(error) => report.lines.push(format!("NOT RUN nccl with 1 rank: {error}")),
    }
    if gpus < 2 {
        report.lines.push(format!("NOT RUN nccl with 2 or more gpus: the driver shows {gpus}"));
    }
    Ok(report)
}

fn load(options: &LoadOptions, ranks: Ranks<CudaDevice>) -> Result<Engine, EngineError> {
    Engine::load_by(options, |source, model| load_on(ranks, options, source, model))
}

fn on_one_device(options: &LoadOptions, ordinal: usize) -> Result<Engine, EngineError> {
    let meeting = Arc::new(Meeting::new(2, PATIENCE));
    let mut members = Vec::new();
    for end in on_device(2, &meeting) {
        members.push((CudaDevice::open(ordinal)?, Some(Box::new(end) as Box<dyn Exchange<CudaDevice>>)));
    }
    load(options, Ranks { members, meeting, memory_utilization: None })
}

fn by_nccl(options: &LoadOptions, ordinal: usize) -> Result<Engine, EngineError> {
    let meeting = Arc::new(Meeting::new(1, PATIENCE));
    let mut devices = vec![CudaDevice::open(ordinal)?];
    let ends = connect(&mut devices, &Arc::new(NcclLibrary::load()?), &meeting)?;
    let boxed = |end| Some(Box::new(end) as Box<dyn Exchange<CudaDevice>>);
    let members = devices.into_iter().zip(ends.into_iter().map(boxed)).collect();
    load(options, Ranks { members, meeting, memory_utilization: None })
}
