//! Puts a model's ranks together on a device: who loads which shard, who meets whom. Only here is a backend chosen.

use std::sync::Arc;
use std::time::Duration;

use crate::EngineError;
use crate::backend::Backend;
use crate::collective::{Alone, Collective, Meeting, shared_memory};
use crate::cpu::{Cpu, KERNEL_CLASS};
use crate::cuda::{self, CudaDevice};
use crate::kv_cache::KvShape;
use crate::llama::Llama;
use crate::model_config::ModelConfig;
use crate::options::LoadOptions;
use crate::rank::{LoneRank, Rank, Runner};
use crate::rank_group::RankGroup;
use crate::shard::Shard;
use crate::weights::{Formats, TensorSource};

/// More threads than this is a slip of the keyboard.
pub(crate) const MAX_THREADS: usize = 1024;

/// A rank that is missing for so long is lost. The longest wait between two meetings is one layer of one pass.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A model that is ready to run.
pub(crate) struct Loaded {
    /// The class of kernels whose bits are equal, and of devices.
    pub(crate) numerics: (&'static str, &'static str),
    pub(crate) runner: Box<dyn Runner>,
    /// Bytes of weights that a forward with logits reads, on all ranks.
    pub(crate) weight_bytes: u64,
    /// Bytes of keys and values of one token, on all ranks.
    pub(crate) kv_bytes_per_token: u64,
}

/// Loads all ranks of a model into this process.
pub(crate) fn load_on_cpu(
    options: &LoadOptions,
    source: &dyn TensorSource,
    (config, formats): (ModelConfig, Formats),
) -> Result<Loaded, EngineError> {
    let shards = Shard::all(options.tensor_parallel, &config)?;
    let meeting = Arc::new(Meeting::new(shards.len(), WATCHDOG));
    let ends: Vec<Box<dyn Collective<Vec<f32>>>> = match shards.len() {
        1 => vec![Box::new(Alone)],
        ranks => shared_memory(ranks, &meeting),
    };
    let (mut runners, mut weight_bytes, mut kv_bytes_per_token) = (Vec::new(), 0, 0);
    let mut embedding = None;
    for (shard, end) in shards.iter().zip(ends) {
        let cpu = Cpu::new((options.threads / shards.len()).max(1))?;
        let model = Llama::load(&cpu, source, (config.clone(), formats), *shard, embedding.take())?;
        embedding = Some(model.embedding.clone());
        let layout = shard.layout(&config);
        let shape = KvShape {
            num_layers: config.num_layers,
            num_kv_heads: layout.num_kv_heads,
            head_dim: layout.head_dim,
        };
        weight_bytes += model.weight_bytes(&cpu);
        kv_bytes_per_token += (shape.token_len() * formats.kv().size()) as u64;
        let kv = cpu.new_kv(shape, formats.kv());
        runners.push(Box::new(Rank::new(cpu, end, model, kv, shard.rank)) as Box<dyn Runner>);
    }
    let runner: Box<dyn Runner> = match runners.len() {
        1 => Box::new(LoneRank::new(runners.remove(0))),
        _ => Box::new(RankGroup::start(runners, meeting)?),
    };
    Ok(Loaded { numerics: (KERNEL_CLASS, "cpu"), runner, weight_bytes, kv_bytes_per_token })
}

/// Loads a model onto one GPU.
pub(crate) fn load_on_cuda(
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: (ModelConfig, Formats),
    ordinal: usize,
) -> Result<Loaded, EngineError> {
    if options.tensor_parallel != 1 {
        let (option, value) = ("tensor_parallel", options.tensor_parallel as u64);
        let reason = "expected 1 on a gpu: its ranks have no collective yet".to_owned();
        return Err(EngineError::BadOption { option, value, reason });
    }
    cuda::load_on(CudaDevice::open(ordinal)?, options, source, model)
}

/// Loads a model that is not split.
pub(crate) fn load_whole<B: Backend + 'static>(
    backend: B,
    kernel_class: &'static str,
    source: &dyn TensorSource,
    (config, formats): (ModelConfig, Formats),
) -> Result<Loaded, EngineError> {
    let shard = Shard::all(1, &config)?[0];
    let shape = KvShape {
        num_layers: config.num_layers,
        num_kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
    };
    let kv_bytes_per_token = (shape.token_len() * formats.kv().size()) as u64;
    let model = Llama::load(&backend, source, (config, formats), shard, None)?;
    let (weight_bytes, kv) = (model.weight_bytes(&backend), backend.new_kv(shape, formats.kv()));
    let rank = Box::new(Rank::new(backend, Box::new(Alone), model, kv, 0));
    let runner = Box::new(LoneRank::new(rank));
    Ok(Loaded { numerics: (kernel_class, "cuda"), runner, weight_bytes, kv_bytes_per_token })
}
