//! What a device must be able to do for `llama`, each operation with its shapes. Results obey
//! docs/contract.md part C: a row of any output depends on that row of the inputs alone (attention: on its
//! sequence), bit for bit. Row-major throughout.
//!
//! Nothing here says where numbers lie: weights, KV and activations are types of the backend, which takes
//! weights from a [`LinearTensors`] and gives numbers back once a forward. Operations do not fail one by one: a
//! device keeps its first error and tells it in [`Backend::append_to`], which ends every forward that is read.

use cpu_kernels::{HeadLayout, KvShape, MatrixFormat, Norm, Stage, StageTimes, TokenCopy};

use crate::EngineError;
use crate::draws::{DrawPlan, Outputs};
use crate::forward_batch::{ForwardBatch, PassLimits};
use crate::model_config::ModelConfig;
use crate::rope::Rope;
use crate::shard::Shard;
use crate::weights::{LinearTensors, TensorPart, TensorSource};

/// One layer's attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionLayer {
    pub(crate) layout: HeadLayout,
    pub(crate) layer: usize,
    /// Sliding window: attend only to this many of the last positions.
    pub(crate) window: Option<u32>,
}

/// The operations of a forward, and what a model consists of on the device that does them.
pub(crate) trait Backend: Send + Sync {
    /// f32 numbers that operations read and write: the rows of a pass.
    type Rows: Default + Send;
    /// The table that token ids are looked up in.
    type Table: Clone + Send + Sync;
    /// Matrices that share their input, laid out for multiplying.
    type Linear: Send + Sync;
    /// The weights of a norm.
    type Norm: Send + Sync;
    /// Blocks of keys and values.
    type Kv: Send;
    /// One pass's ids, positions, slots and block tables, where the operations want them.
    type Pass<'a>;

    /// Whether ranks of one process can use one table.
    const SHARES_TABLES: bool;

    /// What one pass holds.
    const PASS_LIMITS: PassLimits = PassLimits::DEFAULT;

    /// Whether [`Backend::draw`] is there.
    const DRAWS: bool = false;

    /// Whether [`Backend::attention`] and [`Backend::copy_tokens`] take rows of token trees.
    const TREES: bool = false;

    /// Threads of this process that compute.
    fn num_threads(&self) -> usize {
        1
    }

    /// Keeps those threads on `cores`, at least as many, the calling one on the first. A device that computes elsewhere does
    /// nothing.
    fn pin(&mut self, _cores: &[usize]) -> Result<(), EngineError> {
        Ok(())
    }

    /// Loads a table of embeddings, as floats.
    fn load_table(
        &self,
        source: &dyn TensorSource,
        part: &TensorPart,
        format: MatrixFormat,
    ) -> Result<Self::Table, EngineError>;

    /// Loads a whole table that is a projection too, so that both are the same memory.
    fn load_tied(
        &self,
        source: &dyn TensorSource,
        part: &TensorPart,
        format: MatrixFormat,
    ) -> Result<(Self::Table, Self::Linear), EngineError>;

    /// Loads, converts or quantizes matrices.
    fn load_linear(&self, tensors: &LinearTensors<'_>) -> Result<Self::Linear, EngineError>;

    /// The bytes that a product with these reads.
    fn linear_bytes(&self, linear: &Self::Linear) -> u64;

    /// Loads a norm.
    fn load_norm(&self, norm: Norm) -> Result<Self::Norm, EngineError>;

    /// KV without a block.
    fn new_kv(&self, shape: KvShape, format: MatrixFormat) -> Self::Kv;

    /// Bytes of this device that KV may take, where the device knows better than [`crate::LoadOptions::kv_memory_bytes`]; asked
    /// once the weights are there, for sequences of up to `max_len`.
    fn kv_memory_bytes(
        &self,
        _config: &ModelConfig,
        _shard: Shard,
        _max_len: u32,
    ) -> Result<Option<u64>, EngineError> {
        Ok(None)
    }

    /// Says how many blocks will ever be asked for; a device may take them all at once.
    fn limit_kv(&self, _num_blocks: u32) {}

    /// Makes sure that blocks 0..`num_blocks` exist.
    fn grow_kv(&self, kv: &mut Self::Kv, num_blocks: u32) -> Result<(), EngineError>;

    /// Copies a block, all layers of it.
    fn copy_block(&self, kv: &mut Self::Kv, from: u32, to: u32);

    /// Copies what single tokens left behind, one after the other.
    fn copy_tokens(&self, _kv: &mut Self::Kv, _copies: &[TokenCopy]) {
        unreachable!("an engine is given trees only where its backend takes them")
    }

    /// Sets the length of rows that are written next; what they hold is of no matter.
    fn resize(&self, rows: &mut Self::Rows, len: usize);

    /// Appends rows to `host`. What went wrong on the device since the last call is told here.
    fn append_to(&self, host: &mut Vec<f32>, rows: &mut Self::Rows) -> Result<(), EngineError>;

    /// Draws the rows of `logits` `[num_rows, width]` that `draws` names, at least one, and appends the draws and all other
    /// rows to `outputs`. Errors as [`Backend::append_to`]'s.
    fn draw(
        &self,
        _logits: &mut Self::Rows,
        _num_rows: usize,
        _draws: &DrawPlan,
        _outputs: &mut Outputs,
    ) -> Result<(), EngineError> {
        unreachable!("an engine is asked for draws only where its backend has them")
    }

    /// Says what the device did since the last call, or since the pass began. Devices that keep no time do nothing.
    fn mark(&self, _stage: Stage) {}

    /// What was marked since start.
    fn stage_times(&self) -> StageTimes {
        StageTimes::default()
    }

    /// Begins a pass; `rope` turns its positions into angles, once for all layers.
    fn begin<'a>(&self, batch: &'a ForwardBatch<'a>, rope: &Rope) -> Self::Pass<'a>;

    /// Rows of `table` `[vocab, hidden]` -> `out` `[rows, hidden]`.
    fn embed(&self, table: &Self::Table, pass: &Self::Pass<'_>, out: &mut Self::Rows);

    /// `hidden += delta`, both `[rows, hidden]`.
    fn add(&self, hidden: &mut Self::Rows, delta: &Self::Rows);

    /// `x` `[rows, width]` -> `out` `[rows, width]`.
    fn rms_norm(&self, norm: &Self::Norm, x: &Self::Rows, out: &mut Self::Rows);

    /// Normalises every query and key head of `qkv` `[rows, layout.row_width()]` by itself.
    fn norm_heads(&self, layout: HeadLayout, norms: (&Self::Norm, &Self::Norm), qkv: &mut Self::Rows);

    /// Turns the query and key heads of `qkv` by the angles of each row's position.
    fn rotate(&self, layout: HeadLayout, pass: &Self::Pass<'_>, qkv: &mut Self::Rows);

    /// `x` `[rows, k]` -> `out` `[rows, width]`. May round `x` in place to what the weights take. Where the linear
    /// is a rank's part of a sum ([`LinearTensors::partial`]), the sum of its K-slices, unfinished.
    fn linear(&self, linear: &Self::Linear, x: &mut Self::Rows, out: &mut Self::Rows);

    /// What comes after the sum of all ranks: the channels' scales, the bias. Does nothing to a linear that is
    /// whole.
    fn finish_sum(&self, linear: &Self::Linear, sum: &mut Self::Rows);

    /// Stores the pass's keys and values, of `qkv` `[rows, layout.row_width()]`, where its slot mapping says.
    fn write_kv(&self, kv: &mut Self::Kv, at: AttentionLayer, pass: &Self::Pass<'_>, qkv: &Self::Rows);

    /// The pass's queries over the KV blocks of their sequences -> `out` `[rows, layout.q_width()]`.
    fn attention(
        &self,
        kv: &Self::Kv,
        at: AttentionLayer,
        pass_and_qkv: (&Self::Pass<'_>, &Self::Rows),
        out: &mut Self::Rows,
    );

    /// `gate_up` `[rows, 2 * width]` -> `out` `[rows, width]`: silu(gate) * up.
    fn silu_mul(&self, gate_up: &Self::Rows, width: usize, out: &mut Self::Rows);

    /// The rows of `x` `[rows, width]` that want logits -> `out` `[logit rows, width]`.
    fn take_logit_rows(&self, pass: &Self::Pass<'_>, width: usize, x: &Self::Rows, out: &mut Self::Rows);
}
