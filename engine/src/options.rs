//! Types of the public interface: load options, the rows of a batch, facts about the engine, counters.

use std::path::PathBuf;

use crate::TokenId;
use crate::cuda::GpuOptions;

/// Number format of the weights in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum WeightFormat {
    /// As the checkpoint stores them: fp8 if every projection is FP8, bf16 if only some are or every matrix is
    /// bf16, else f32 (which loses nothing).
    #[default]
    AsStored,
    /// f32 weights, f32 activations, f32 KV.
    F32,
    /// bf16 weights, GEMM inputs rounded to bf16, bf16 KV.
    Bf16,
    /// Projections as eight-bit floats (E4M3) with a scale per output channel or per block of 128 x 128: as
    /// stored in an FP8 checkpoint; quantized on loading, with a scale per channel, from other checkpoints. Sums
    /// as in bf16, multiplied by the scale; bf16 KV. The input embedding table is bf16, and so is the vocabulary
    /// projection unless it is stored as FP8.
    Fp8,
    /// Projections quantized to int8 per output channel, their inputs to int8; bf16 KV. The input embedding
    /// table stays as stored.
    Int8,
    /// Projections quantized to int4 in groups of 32, their inputs to int8; bf16 KV. The input embedding
    /// table stays as stored.
    Int4,
}

impl WeightFormat {
    /// Returns the format with that user-facing name: `auto`, `f32`, `bf16`, `fp8`, `int8` or `int4`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::AsStored),
            "f32" => Some(Self::F32),
            "bf16" => Some(Self::Bf16),
            "fp8" => Some(Self::Fp8),
            "int8" => Some(Self::Int8),
            "int4" => Some(Self::Int4),
            _ => None,
        }
    }

    /// The format's user-facing name.
    pub fn name(self) -> &'static str {
        match self {
            Self::AsStored => "auto",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }
}

/// How to load a model.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// A Hugging Face checkpoint directory: config.json, and model.safetensors or an index and its shards.
    pub model_dir: PathBuf,
    /// Number format of the weights.
    pub weights: WeightFormat,
    /// Number of compute threads; 1 computes on the calling thread. Ranks share them, with at least one
    /// thread each.
    pub threads: usize,
    /// Number of tensor parallel ranks, over all nodes: 1, 2, 4 or 8. Does not change results, bit for bit.
    pub tensor_parallel: usize,
    /// Upper limit of KV cache memory in bytes, over all ranks of this process. On the CPU it is allocated as
    /// sequences grow, on GPUs when the model is loaded.
    pub kv_memory_bytes: u64,
    /// Longest sequence in tokens. `None` takes the model's limit, or what the KV memory holds if that is
    /// less; a value above either is refused.
    pub max_model_len: Option<u32>,
    /// About how many weights to add that change no token (see `ballast`); 0: none. For demonstrations and
    /// benchmarks. Logits equal those without ballast (`==`); time, memory, KV and
    /// [`EngineInfo::numerics_id`] are those of the bigger model.
    pub ballast: u64,
    /// The GPUs of this machine to load the model onto, one rank each; `None`: the CPU.
    pub gpus: Option<GpuOptions>,
}

impl LoadOptions {
    /// One thread, one rank, the model's own context length, no ballast, on the CPU.
    pub fn new(model_dir: impl Into<PathBuf>, weights: WeightFormat, kv_memory_bytes: u64) -> Self {
        Self {
            model_dir: model_dir.into(),
            weights,
            threads: 1,
            tensor_parallel: 1,
            kv_memory_bytes,
            max_model_len: None,
            ballast: 0,
            gpus: None,
        }
    }

    /// These options on GPUs.
    pub fn on_gpus(&self, gpus: GpuOptions) -> Self {
        Self { gpus: Some(gpus), ..self.clone() }
    }
}

/// Id of an open sequence. An engine never reuses one, so that a stale id is detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u64);

/// One sequence's part of a forward.
#[derive(Debug, Clone, Copy)]
pub struct SequenceRows<'a> {
    /// The sequence; each may appear once in a batch.
    pub slot: SlotId,
    /// Ids to append to the sequence's KV; at least one.
    pub token_ids: &'a [TokenId],
    /// Number of trailing rows to return logits for.
    pub num_logits: usize,
}

/// Marks the last ids of a sequence in a batch as a token tree: several ids may share a position, and a row
/// attends to the tokens before the tree and to its ancestors. A tree may arrive in several calls, each with
/// all parents so far.
#[derive(Debug, Clone, Copy)]
pub struct TreeRows<'a> {
    /// Index of the sequence in the batch.
    pub sequence: usize,
    /// Number of rows of the tree that earlier calls stored: the last ones that the sequence holds. If it is
    /// not 0, all ids of this call belong to the tree.
    pub num_stored: usize,
    /// One entry per row of the tree, stored rows first: the parent's row number counted from 1, or 0 if the
    /// parent is the last token before the tree. The rows of one call are in order of depth.
    pub parents: &'a [u32],
}

/// Facts about a loaded engine.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineInfo {
    /// The model's [name](crate::model_name()).
    pub model_id: String,
    /// Number of vocabulary entries, padding included.
    pub vocab_size: u32,
    /// Longest sequence in tokens, prompt and output together.
    pub max_model_len: u32,
    /// Ids that end a text: those of generation_config.json, else of config.json; may be empty.
    pub eos_token_ids: Vec<TokenId>,
    /// Engines with equal ids produce equal bits (docs/contract.md C4). A hash of config.json, every byte of
    /// the weight files, the shape of ballast, the weight and KV formats, the kernel class, the device class
    /// and the contract's version.
    pub numerics_id: String,
    /// Total number of KV blocks.
    pub kv_blocks: u64,
    /// Tokens per KV block.
    pub kv_block_size: u32,
    /// Number of weights, tied ones counted once, ballast included.
    pub num_parameters: u64,
    /// Number of those weights that are ballast: they cost time and memory and change no token.
    pub ballast_parameters: u64,
    /// Bytes of weights that every forward with logits reads, independent of its number of rows: all but the
    /// input embedding table, of which only one row per token is read. A tied table is counted, since the
    /// vocabulary projection reads it. Over all ranks.
    pub weight_bytes: u64,
    /// Bytes of weights in memory, over all ranks: `weight_bytes`, plus the input embedding table if it is
    /// stored separately from the vocabulary projection. With several GPUs each holds the whole table.
    pub resident_bytes: u64,
    /// Bytes of keys and values per token, over all layers.
    pub kv_bytes_per_token: u64,
}

/// Counters since start, and gauges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Successful calls of [`crate::Engine::forward`] with at least one row.
    pub forwards: u64,
    /// Number of rows computed.
    pub rows: u64,
    /// Tokens attended to, summed over forwards and their sequences.
    pub kv_tokens: u64,
    /// Gauge: KV blocks that open sequences reference now.
    pub referenced_blocks: u64,
    /// Gauge: unreferenced KV blocks that are cached for prefix reuse.
    pub cached_blocks: u64,
    /// Cached KV blocks that were evicted.
    pub evicted_blocks: u64,
}
