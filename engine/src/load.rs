//! Loads a model's ranks onto a device: assigns shards and connects the collective. `load_on_cpu` is the
//! entry point for the CPU, `cuda::load_on_gpus` for GPUs; both end in `load_ranks`.

use std::sync::Arc;
use std::time::Duration;

use cpu_kernels::{BLOCK_SIZE, Cpu, KERNEL_CLASS, KvShape};

use crate::EngineError;
use crate::backend::Backend;
use crate::collective::{Collective, RankBarrier, SingleRank, across_nodes, shared_memory};
use crate::host::HostRows;
use crate::host_memory::check_fits;
use crate::kv_limits::{KvSize, check_kv, max_model_len};
use crate::llama::Llama;
use crate::model_config::ModelConfig;
use crate::nodes::{Nodes, Sizes, ranks_of_node, remote_runners, shards_of_node};
use crate::numerics_id::NumericsClass;
use crate::options::LoadOptions;
use crate::rank::{Rank, Runner, SingleRankRunner, on_threads};
use crate::rank_group::RankGroup;
use crate::shard::Shard;
use crate::weights::{ModelSpec, TensorSource};

/// Limit that catches typing errors.
pub(crate) const MAX_THREADS: usize = 1024;

/// A rank that is missing for this long is lost. On CPUs the longest time between two barriers is that of one
/// layer of one pass. GPUs enqueue exchanges, and the first rank then waits for a whole forward.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

/// A loaded model.
pub(crate) struct Loaded {
    pub(crate) numerics: NumericsClass,
    pub(crate) runner: Box<dyn Runner>,
    /// Whether the device can sample rows itself.
    pub(crate) draws: bool,
    /// Bytes of weights that a forward with logits reads, over all ranks.
    pub(crate) weight_bytes: u64,
    /// Bytes of embedding tables beside the vocabulary projection, over all ranks.
    pub(crate) table_bytes: u64,
    /// Bytes of keys and values per token, over all ranks.
    pub(crate) kv_bytes_per_token: u64,
    /// The setting that determined `kv_blocks`.
    pub(crate) kv_size: KvSize,
    /// Number of KV blocks; every rank holds its part of each.
    pub(crate) kv_blocks: u32,
}

/// Loads all ranks of a model into this process, or with `nodes` those of this node.
pub(crate) fn load_on_cpu(
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: ModelSpec,
    nodes: Option<&Arc<Nodes>>,
) -> Result<Loaded, EngineError> {
    let ranks = ranks_per_node(options, nodes.map_or(1, |nodes| nodes.count()))?;
    let kv_size = KvSize::new(options, None);
    check_kv_options(kv_size, options, &model, (ranks, nodes.map(Arc::as_ref)))?;
    check_fits(
        &model.config,
        model.formats,
        options.kv_memory_bytes,
        nodes.map_or(1, |nodes| nodes.count()),
    )?;
    let of_node = ranks_of_node(ranks, nodes.map(Arc::as_ref));
    let barrier = Arc::new(RankBarrier::of_node(of_node, WATCHDOG));
    let ends: Vec<Box<dyn Collective<HostRows>>> = match (nodes, ranks) {
        (Some(nodes), ranks) => across_nodes(nodes, ranks, &barrier),
        (None, 1) => vec![Box::new(SingleRank)],
        (None, ranks) => shared_memory(ranks, &barrier),
    };
    let mut members = Vec::new();
    for end in ends {
        members.push((Cpu::new((options.threads / ranks).max(1))?, end));
    }
    let numerics = NumericsClass { kernel_class: KERNEL_CLASS, device_class: "cpu" };
    load_ranks(ConnectedRanks { members, barrier, numerics, kv_size }, nodes, options, source, model)
}

/// Number of CPU ranks of a node.
fn ranks_per_node(options: &LoadOptions, nodes: usize) -> Result<usize, EngineError> {
    let ranks = options.tensor_parallel;
    if ranks.is_multiple_of(nodes) {
        return Ok(ranks / nodes);
    }
    let reason = format!("expected a multiple of {nodes}, the number of nodes");
    Err(EngineError::BadOption { option: "tensor_parallel", value: ranks.to_string(), reason })
}

/// Refuses a model that cannot be split over this many ranks per node, and KV options that do not suit it.
/// Reads no weights and uses no device.
pub(crate) fn check_kv_options(
    kv_size: KvSize,
    options: &LoadOptions,
    model: &ModelSpec,
    (ranks, nodes): (usize, Option<&Nodes>),
) -> Result<(), EngineError> {
    let shards = shards_of_node(ranks, nodes, &model.config)?;
    let block_bytes = shards.iter().map(|shard| kv_block_bytes(*shard, model)).sum();
    check_kv(kv_size, options, &model.config, block_bytes)
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
    /// What determines the size of the KV cache.
    pub(crate) kv_size: KvSize,
}

/// Loads a model onto backends, one rank each. Ranks load in parallel if each has its own memory.
pub(crate) fn load_ranks<B: Backend + 'static>(
    ranks: ConnectedRanks<B>,
    nodes: Option<&Arc<Nodes>>,
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: ModelSpec,
) -> Result<Loaded, EngineError> {
    let ConnectedRanks { members, barrier, numerics, kv_size } = ranks;
    let shards = shards_of_node(members.len(), nodes.map(Arc::as_ref), &model.config)?;
    let backends: Vec<&B> = members.iter().map(|(backend, _)| backend).collect();
    let models = load_shards(&backends, &shards, source, &model)?;
    let weight_bytes = models.iter().zip(&backends).map(|(part, backend)| part.weight_bytes(backend)).sum();
    let block_bytes: u64 = shards.iter().map(|shard| kv_block_bytes(*shard, &model)).sum();
    // All devices are measured before any of them allocates: ranks may share one.
    let kv_blocks = match kv_size {
        KvSize::Bytes(bytes) => kv_size.num_blocks(bytes, block_bytes)?,
        KvSize::Utilization(utilization) => {
            let ranks = shards.iter().copied().zip(backends.iter().copied());
            fewest_kv_blocks(utilization, ranks, options, &model)?
        }
    };
    let table_bytes = table_bytes::<B>(&model, &shards);
    let sizes = Sizes { kv_blocks, weight_bytes, table_bytes, block_bytes }.agree(nodes.map(Arc::as_ref))?;
    let longest = max_model_len(options, &model.config, Some((kv_size, sizes.kv_blocks)))?;
    let mut runners: Vec<(usize, Box<dyn Runner>)> = Vec::new();
    for ((shard, part), (backend, end)) in shards.iter().zip(models).zip(members) {
        let kv = backend.new_kv(kv_shape(*shard, &model.config), model.formats.kv(), sizes.kv_blocks);
        let kv = kv.map_err(|error| kv_size.failed_to_allocate(error, shard.rank))?;
        backend.warn_of_workspace(&model.config, *shard, max_len(options, &model))?;
        backend.load_angles(&model.config.rope, longest)?;
        runners.push((shard.rank, Box::new(Rank::new(backend, end, part, kv, shard.rank))));
    }
    if let Some(nodes) = nodes {
        runners.extend(remote_runners(nodes, shards.len(), &barrier));
    }
    let runner: Box<dyn Runner> = match runners.len() {
        1 => {
            let (rank, runner) = runners.remove(0);
            Box::new(SingleRankRunner::new(rank, runner))
        }
        _ => Box::new(RankGroup::start(runners, barrier)?),
    };
    Ok(Loaded {
        numerics,
        runner,
        draws: B::DRAWS,
        weight_bytes: sizes.weight_bytes,
        table_bytes: sizes.table_bytes,
        kv_bytes_per_token: sizes.block_bytes / BLOCK_SIZE as u64,
        kv_size,
        kv_blocks: sizes.kv_blocks,
    })
}

/// Number of KV blocks of the rank whose device has memory for the fewest.
fn fewest_kv_blocks<'a, B: Backend + 'a>(
    utilization: f32,
    ranks: impl Iterator<Item = (Shard, &'a B)>,
    options: &LoadOptions,
    model: &ModelSpec,
) -> Result<u32, EngineError> {
    let mut fewest = u32::MAX;
    for (shard, backend) in ranks {
        let bytes = backend.free_kv_bytes(&model.config, shard, max_len(options, model), utilization)?;
        let blocks = KvSize::Utilization(utilization).num_blocks(bytes, kv_block_bytes(shard, model))?;
        fewest = fewest.min(blocks);
    }
    Ok(fewest)
}

/// Upper bound of the length of a sequence.
fn max_len(options: &LoadOptions, model: &ModelSpec) -> u32 {
    options.max_model_len.unwrap_or(model.config.max_len)
}

/// Shape of the KV that a rank holds.
fn kv_shape(shard: Shard, config: &ModelConfig) -> KvShape {
    let layout = shard.layout(config);
    KvShape { num_layers: config.num_layers, num_kv_heads: layout.num_kv_heads, head_dim: layout.head_dim }
}

/// Bytes of a rank's part of a KV block.
fn kv_block_bytes(shard: Shard, model: &ModelSpec) -> u64 {
    (kv_shape(shard, &model.config).block_len() * model.formats.kv().size()) as u64
}

/// Bytes of the embedding tables of these ranks that are not vocabulary projections at the same time.
fn table_bytes<B: Backend>(model: &ModelSpec, shards: &[Shard]) -> u64 {
    let ModelSpec { config, formats } = model;
    let tables = match shards {
        [shard] if !shard.is_split() && config.tie_word_embeddings && formats.ties() => 0,
        _ if B::SHARES_TABLES => 1,
        shards => shards.len(),
    };
    (tables * config.vocab_size * config.hidden_size * formats.embedding.size()) as u64
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
    on_threads(ranks, |_, (shard, backend)| load(shard, backend, None))
}
