//! Loads a model's ranks onto a device: assigns shards and connects the collective. `load_on_cpu` is the
//! entry point for the CPU, `cuda::load_on_gpus` for GPUs; both end in `load_ranks`.

use std::sync::Arc;
use std::time::Duration;

use cpu_kernels::{BLOCK_SIZE, Cpu, KERNEL_CLASS, KvShape};

use crate::EngineError;
use crate::backend::Backend;
use crate::collective::{Collective, RankBarrier, SingleRank, shared_memory};
use crate::host::HostRows;
use crate::host_memory::check_fits;
use crate::kv_limits::check_kv;
use crate::llama::Llama;
use crate::model_config::ModelConfig;
use crate::numerics_id::NumericsClass;
use crate::options::LoadOptions;
use crate::rank::{Rank, Runner, SingleRankRunner, panic_message};
use crate::rank_group::RankGroup;
use crate::shard::Shard;
use crate::weights::{ModelSpec, TensorSource};

/// Limit that catches typing errors.
pub(crate) const MAX_THREADS: usize = 1024;

/// A rank that is missing for this long is lost. The longest time between two barriers is one layer of one
/// pass.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

/// A loaded model.
pub(crate) struct Loaded {
    pub(crate) numerics: NumericsClass,
    pub(crate) runner: Box<dyn Runner>,
    /// Whether the device can sample rows itself.
    pub(crate) draws: bool,
    /// Whether the device can run rows of token trees.
    pub(crate) trees: bool,
    /// Bytes of weights that a forward with logits reads, over all ranks.
    pub(crate) weight_bytes: u64,
    /// Bytes of keys and values per token, over all ranks.
    pub(crate) kv_bytes_per_token: u64,
    /// Bytes available for KV, over all ranks, in whole blocks.
    pub(crate) kv_memory_bytes: u64,
}

/// Loads all ranks of a model into this process.
pub(crate) fn load_on_cpu(
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: ModelSpec,
) -> Result<Loaded, EngineError> {
    let shards = Shard::all(options.tensor_parallel, &model.config)?;
    let ModelSpec { config, formats } = &model;
    let token_len = shards.iter().map(|shard| kv_shape(shard, config).token_len() as u64).sum::<u64>();
    check_kv(options, config, token_len * formats.kv().size() as u64)?;
    check_fits(config, *formats, options.kv_memory_bytes)?;
    let barrier = Arc::new(RankBarrier::new(shards.len(), WATCHDOG));
    let ends: Vec<Box<dyn Collective<HostRows>>> = match shards.len() {
        1 => vec![Box::new(SingleRank)],
        ranks => shared_memory(ranks, &barrier),
    };
    let mut members = Vec::new();
    for end in ends {
        members.push((Cpu::new((options.threads / shards.len()).max(1))?, end));
    }
    let numerics = NumericsClass { kernel_class: KERNEL_CLASS, device_class: "cpu" };
    load_ranks(ConnectedRanks { members, barrier, numerics }, options, source, model)
}

/// A backend and its end of the collective.
type Member<B> = (B, Box<dyn Collective<<B as Backend>::Rows>>);

/// The ranks that load a model: their backends, connected to each other.
pub(crate) struct ConnectedRanks<B: Backend> {
    /// In order of rank.
    pub(crate) members: Vec<Member<B>>,
    /// Barrier of the ranks, which also reports a lost rank.
    pub(crate) barrier: Arc<RankBarrier>,
    pub(crate) numerics: NumericsClass,
}

/// Loads a model onto backends, one rank each. Ranks load in parallel if each has its own memory.
pub(crate) fn load_ranks<B: Backend + 'static>(
    ranks: ConnectedRanks<B>,
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: ModelSpec,
) -> Result<Loaded, EngineError> {
    let ConnectedRanks { members, barrier, numerics } = ranks;
    let shards = Shard::all(members.len(), &model.config)?;
    let (mut ranks, mut weight_bytes, mut kv_bytes_per_token) = (Vec::new(), 0, 0);
    let backends: Vec<&B> = members.iter().map(|(backend, _)| backend).collect();
    let models = load_shards(&backends, &shards, source, &model)?;
    let ModelSpec { config, formats } = model;
    for ((shard, model), (backend, end)) in shards.into_iter().zip(models).zip(members) {
        let shape = kv_shape(&shard, &config);
        weight_bytes += model.weight_bytes(&backend);
        kv_bytes_per_token += (shape.token_len() * formats.kv().size()) as u64;
        ranks.push((backend, end, model, shape));
    }
    let block_bytes = kv_bytes_per_token * BLOCK_SIZE as u64;
    let max_len = options.max_model_len.unwrap_or(config.max_len);
    let mut measured: Option<u64> = None;
    for (rank, (backend, _, _, shape)) in ranks.iter().enumerate() {
        let shard = Shard { rank, ranks: ranks.len() };
        let on_rank = (shape.block_len() * formats.kv().size()) as u64;
        let blocks = backend.kv_memory_bytes(&config, shard, max_len)?.map(|bytes| bytes / on_rank);
        measured = blocks.into_iter().chain(measured).min();
    }
    let kv_blocks = measured.unwrap_or(options.kv_memory_bytes / block_bytes);
    let runner = |(rank, (backend, end, model, shape)): (usize, (B, _, _, _))| {
        backend.limit_kv(u32::try_from(kv_blocks).unwrap_or(u32::MAX));
        let kv = backend.new_kv(shape, formats.kv());
        Box::new(Rank::new(backend, end, model, kv, rank)) as Box<dyn Runner>
    };
    let mut runners: Vec<Box<dyn Runner>> = ranks.into_iter().enumerate().map(runner).collect();
    let runner: Box<dyn Runner> = match runners.len() {
        1 => Box::new(SingleRankRunner::new(runners.remove(0))),
        _ => Box::new(RankGroup::start(runners, barrier)?),
    };
    let kv_memory_bytes = kv_blocks * block_bytes;
    let (draws, trees) = (B::DRAWS, B::TREES);
    Ok(Loaded { numerics, runner, draws, trees, weight_bytes, kv_bytes_per_token, kv_memory_bytes })
}

/// Shape of the KV that a rank holds.
fn kv_shape(shard: &Shard, config: &ModelConfig) -> KvShape {
    let layout = shard.layout(config);
    KvShape { num_layers: config.num_layers, num_kv_heads: layout.num_kv_heads, head_dim: layout.head_dim }
}

/// Loads each rank's part of a model.
fn load_shards<B: Backend>(
    backends: &[&B],
    shards: &[Shard],
    source: &dyn TensorSource,
    model: &ModelSpec,
) -> Result<Vec<Llama<B>>, EngineError> {
    let load =
        |shard: Shard, backend: &B, embedding| Llama::load(backend, source, model.clone(), shard, embedding);
    let ranks = shards.iter().copied().zip(backends.iter().copied());
    if B::SHARES_TABLES || backends.len() == 1 {
        let mut embedding = None;
        return ranks
            .map(|(shard, backend)| {
                let model = load(shard, backend, embedding.take())?;
                embedding = B::SHARES_TABLES.then(|| model.embedding.clone());
                Ok(model)
            })
            .collect();
    }
    std::thread::scope(|scope| {
        let load = &load;
        let loading: Vec<_> =
            ranks.map(|(shard, backend)| scope.spawn(move || load(shard, backend, None))).collect();
        let loaded = loading.into_iter().enumerate().map(|(rank, loading)| {
            let lost = |panic: Box<dyn std::any::Any + Send>| {
                Err(EngineError::RankLost { rank, reason: panic_message(panic.as_ref()) })
            };
            loading.join().unwrap_or_else(lost)
        });
        loaded.collect()
    })
}
