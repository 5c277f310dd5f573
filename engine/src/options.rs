//! What callers say and hear: load options, a batch's rows, facts and counters.

use std::path::PathBuf;

use crate::TokenId;

/// What the weights are held as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum WeightFormat {
    /// As the checkpoint stores them: bf16 where every tensor is bf16, else f32 (which loses nothing).
    #[default]
    AsStored,
    /// f32 weights, f32 activations, f32 KV.
    F32,
    /// bf16 weights, GEMM inputs rounded to bf16, bf16 KV.
    Bf16,
    /// Projections quantized to int8 by output channel, their inputs to int8; bf16 KV. The table of input
    /// embeddings stays as stored.
    Int8,
    /// Projections quantized to int4 in groups of 32, their inputs to int8; bf16 KV. The table of input
    /// embeddings stays as stored.
    Int4,
}

impl WeightFormat {
    /// The format of that name as people write it: `auto`, `f32`, `bf16`, `int8` or `int4`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::AsStored),
            "f32" => Some(Self::F32),
            "bf16" => Some(Self::Bf16),
            "int8" => Some(Self::Int8),
            "int4" => Some(Self::Int4),
            _ => None,
        }
    }
}

/// How to load a model.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// A Hugging Face checkpoint: config.json, model.safetensors or its index and shards.
    pub model_dir: PathBuf,
    /// What the weights are held as.
    pub weights: WeightFormat,
    /// Threads that compute; 1 computes on the calling thread. Ranks share them, at least one each.
    pub threads: usize,
    /// Ranks that the model is split over: 1, 2, 4 or 8. Changes no bit.
    pub tensor_parallel: usize,
    /// Ceiling of KV memory; it is taken as sequences grow.
    pub kv_memory_bytes: u64,
    /// Longest sequence. `None` takes the model's own limit, or what the KV memory holds if that is less;
    /// more than either is refused.
    pub max_model_len: Option<u32>,
}

/// Names an open sequence. Never reused, so that a stale one is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub(crate) u64);

/// What one sequence takes part with in a forward.
#[derive(Debug, Clone, Copy)]
pub struct SequenceRows<'a> {
    /// The sequence; at most once in a batch.
    pub slot: SlotId,
    /// The ids that follow what its KV holds; at least one.
    pub token_ids: &'a [TokenId],
    /// Logits are wanted for the last so many of them.
    pub num_logits: usize,
}

/// Says that the last ids of a sequence of a batch are a token tree: several ids may stand at one position, and a row attends to what
/// was there before and to its ancestors. A tree may come in several calls, each with all parents so far.
#[derive(Debug, Clone, Copy)]
pub struct TreeRows<'a> {
    /// Which sequence of the batch.
    pub sequence: usize,
    /// Rows of the tree that earlier calls stored: the last ones that the sequence holds. Where there are any, all ids of this call
    /// are of the tree.
    pub num_stored: usize,
    /// An entry for each row of the tree, the stored ones first: 0 where it stands behind what is no tree, else its parent's number,
    /// counted from 1. The rows of one call stand in order of depth.
    pub parents: &'a [u32],
}

/// What was loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineInfo {
    /// The configuration's `_name_or_path` where that is a name, else the directory's name.
    pub model_id: String,
    /// Entries of the vocabulary, padded ones included.
    pub vocab_size: u32,
    /// Longest sequence, prompt and output together.
    pub max_model_len: u32,
    /// Ids that end a text: generation_config.json's, else config.json's; may be empty.
    pub eos_token_ids: Vec<TokenId>,
    /// Engines of equal id give equal bits (docs/contract.md C4). Hashes config.json, every byte of the
    /// weight files, the shape of ballast, weight and KV formats, the kernels' class, the device's class and the contract's
    /// version.
    pub numerics_id: String,
    /// KV blocks there are.
    pub kv_blocks: u64,
    /// Tokens in one.
    pub kv_block_size: u32,
    /// Weights, tied ones counted once, ballast included.
    pub num_parameters: u64,
    /// Those of them that are ballast: they cost time and memory and change no token.
    pub ballast_parameters: u64,
    /// Bytes of weights that every forward with logits reads, however many rows it has: all but the table of
    /// input embeddings, of which a row is read for each token. A tied table is read as the last projection.
    pub weight_bytes: u64,
    /// Bytes of weights in memory: those, and the table of input embeddings where it is not the last projection too.
    pub held_bytes: u64,
    /// Bytes of keys and values of one token, all layers.
    pub kv_bytes_per_token: u64,
}

/// Counters since start, and gauges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Successful calls of [`crate::Engine::forward`] with at least one row.
    pub forwards: u64,
    /// Positions computed.
    pub rows: u64,
    /// Sum over forwards and their sequences of the tokens attended to.
    pub kv_tokens: u64,
    /// Gauge: KV blocks held by open sequences now.
    pub referenced_blocks: u64,
    /// Gauge: KV blocks that no sequence holds and that are kept for equal prefixes.
    pub cached_blocks: u64,
    /// Kept KV blocks that were reused for something else.
    pub evicted_blocks: u64,
}
