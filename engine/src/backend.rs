//! The operations that `llama` needs from a device, with their shapes. Results obey docs/contract.md part C:
//! a row of any output depends only on the same row of the inputs (attention: on its sequence), bit for bit.
//! All matrices are row-major.
//!
//! The trait does not say where numbers are stored: weights, KV and activations are types of the backend,
//! which loads weights from a [`LinearTensors`] and returns numbers once per forward. Single operations do
//! not return errors: a device keeps its first error and returns it from [`Backend::append_to`] or
//! [`Backend::check`]; one of them, or [`Backend::wait`], ends every forward.

use cpu_kernels::{HeadLayout, KvShape, MatrixFormat, Norm, Stage, StageTimes, TokenCopy};

use crate::EngineError;
use crate::draws::{DrawPlan, RankOutput};
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

/// Rows that a feed-forward layer reads and writes.
pub(crate) struct FeedForwardRows<'a, R> {
    /// `[rows, k of gate_up]`; may be rounded in place like the input of any product.
    pub(crate) x: &'a mut R,
    /// `[rows, width of gate_up]`: overwritten, with unspecified content.
    pub(crate) gates_and_ups: &'a mut R,
    /// `[rows, k of down]`: overwritten likewise.
    pub(crate) gated: &'a mut R,
    /// `[rows, width of down]`.
    pub(crate) out: &'a mut R,
}

/// The operations of a forward, and the types of a model on the device that runs them.
pub(crate) trait Backend: Send + Sync {
    /// f32 numbers that operations read and write: the rows of a pass.
    type Rows: Default + Send;
    /// An embedding table, indexed by token id.
    type Table: Clone + Send + Sync;
    /// Matrices with the same input, in the layout that the GEMM uses.
    type Linear: Send + Sync;
    /// Weights of a norm.
    type Norm: Send + Sync;
    /// KV cache blocks.
    type Kv: Send;
    /// Ids, positions, slots and block tables of one pass, stored where the operations need them.
    type Pass<'a>;

    /// Whether ranks of one process can share a table.
    const SHARES_TABLES: bool;

    /// Maximum rows of a pass.
    const PASS_LIMITS: PassLimits = PassLimits::DEFAULT;

    /// Whether [`Backend::draw`] is implemented.
    const DRAWS: bool = false;

    /// Number of compute threads in this process.
    fn num_threads(&self) -> usize {
        1
    }

    /// Pins those threads to `cores`, which has at least one core per thread; the calling thread gets the
    /// first. Does nothing on a device that does not compute on this process's threads.
    fn pin(&mut self, _cores: &[usize]) -> Result<(), EngineError> {
        Ok(())
    }

    /// Loads an embedding table as floats.
    fn load_table(
        &self,
        source: &dyn TensorSource,
        part: &TensorPart,
        format: MatrixFormat,
    ) -> Result<Self::Table, EngineError>;

    /// Loads a whole table that also serves as a projection, so that both share memory.
    fn load_tied(
        &self,
        source: &dyn TensorSource,
        part: &TensorPart,
        format: MatrixFormat,
    ) -> Result<(Self::Table, Self::Linear), EngineError>;

    /// Loads matrices, converted or quantized as needed.
    fn load_linear(&self, tensors: &LinearTensors<'_>) -> Result<Self::Linear, EngineError>;

    /// Number of bytes that a product with these matrices reads.
    fn linear_bytes(&self, linear: &Self::Linear) -> u64;

    /// Loads a norm.
    fn load_norm(&self, norm: Norm) -> Result<Self::Norm, EngineError>;

    /// Bytes of device memory for KV if a share of `utilization` of it may be used in total, with sequences
    /// of up to `max_len` tokens. Called after the weights are loaded.
    fn free_kv_bytes(
        &self,
        _config: &ModelConfig,
        _shard: Shard,
        _max_len: u32,
        _utilization: f32,
    ) -> Result<u64, EngineError> {
        unreachable!("only KV on GPUs is sized by a utilization")
    }

    /// Creates a KV cache for `num_blocks` blocks. A device allocates them now, or later in
    /// [`Backend::grow_kv`].
    fn new_kv(&self, shape: KvShape, format: MatrixFormat, num_blocks: u32) -> Result<Self::Kv, EngineError>;

    /// Loads the angles of all positions of a sequence of up to `max_len` tokens, if the device keeps them.
    fn load_angles(&self, _rope: &Rope, _max_len: u32) -> Result<(), EngineError> {
        Ok(())
    }

    /// Logs a warning if weights and KV leave less memory than the largest forward may need, with sequences
    /// of up to `max_len` tokens.
    fn warn_of_workspace(
        &self,
        _config: &ModelConfig,
        _shard: Shard,
        _max_len: u32,
    ) -> Result<(), EngineError> {
        Ok(())
    }

    /// Allocates blocks 0..`num_blocks` if they do not exist.
    fn grow_kv(&self, kv: &mut Self::Kv, num_blocks: u32) -> Result<(), EngineError>;

    /// Copies a block in all layers.
    fn copy_block(&self, kv: &mut Self::Kv, from: u32, to: u32);

    /// Copies the KV of single tokens, in order.
    fn copy_tokens(&self, kv: &mut Self::Kv, copies: &[TokenCopy]);

    /// Sets the length of rows that will be overwritten next; their content is unspecified.
    fn resize(&self, rows: &mut Self::Rows, len: usize);

    /// Returns the device's first error since the last call of a function that returns it. Does not wait.
    fn check(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Waits until all requested operations are done. Returns errors like [`Backend::check`].
    fn wait(&self) -> Result<(), EngineError> {
        self.check()
    }

    /// Appends the first `len` numbers of rows to `host`. Returns errors like [`Backend::check`].
    fn append_to(&self, host: &mut Vec<f32>, rows: &mut Self::Rows, len: usize) -> Result<(), EngineError>;

    /// Draws the rows of `logits` `[num_rows, width]`, behind which there may be others, that `draws` lists,
    /// at least one; the pass was begun with the same `draws`. Appends the draws, and the logits of all other
    /// rows, to `outputs`. Returns errors like [`Backend::check`].
    fn draw(
        &self,
        _logits: &mut Self::Rows,
        _num_rows: usize,
        _draws: &DrawPlan,
        _outputs: &mut RankOutput,
    ) -> Result<(), EngineError> {
        unreachable!("callers check Backend::DRAWS first")
    }

    /// Attributes the time since the last call, or since the pass began, to `stage`. Does nothing on devices
    /// that do not measure time.
    fn mark(&self, _stage: Stage) {}

    /// Times attributed to stages since start.
    fn stage_times(&self) -> StageTimes {
        StageTimes::default()
    }

    /// Number of rows to run a pass of `rows` rows with, if passes are padded: similar passes that are equal
    /// then take less time. `None`: they are not.
    fn padded_rows(&self, _rows: usize) -> Option<usize> {
        None
    }

    /// Begins a pass over all rows of `batch`, and if some have no logits, a second one over `logit_part`, the
    /// others. `draws` are those that [`Backend::draw`] makes when both have run; empty if it has none. `rope`
    /// computes the angles of positions, once for all layers, unless they are loaded.
    fn begin<'a>(
        &self,
        batch: &'a ForwardBatch<'a>,
        logit_part: Option<&'a ForwardBatch<'a>>,
        draws: &DrawPlan,
        rope: &Rope,
    ) -> (Self::Pass<'a>, Option<Self::Pass<'a>>);

    /// Rows of `table` `[vocab, hidden]` -> `out` `[rows, hidden]`.
    fn embed(&self, table: &Self::Table, pass: &Self::Pass<'_>, out: &mut Self::Rows);

    /// `hidden += delta`, both `[rows, hidden]`.
    fn add(&self, hidden: &mut Self::Rows, delta: &Self::Rows);

    /// `x` `[rows, width]` -> `out` `[rows, width]`.
    fn rms_norm(&self, norm: &Self::Norm, x: &Self::Rows, out: &mut Self::Rows);

    /// Normalises every query and key head of `qkv` `[rows, layout.row_width()]` separately.
    fn norm_heads(&self, layout: HeadLayout, norms: (&Self::Norm, &Self::Norm), qkv: &mut Self::Rows);

    /// Applies rope to the query and key heads of `qkv`, by the angles of each row's position.
    fn rotate(&self, layout: HeadLayout, pass: &Self::Pass<'_>, qkv: &mut Self::Rows);

    /// `x` `[rows, k]` -> `out` `[rows, width]`. May round `x` in place to the input format of the weights.
    /// If the linear is a rank's part of a sum ([`LinearTensors::partial`]), `out` is the unfinished sum of
    /// its K-slices.
    fn linear(&self, linear: &Self::Linear, x: &mut Self::Rows, out: &mut Self::Rows);

    /// Applies what follows the sum over all ranks: channel scales and bias. Does nothing for a linear that
    /// is not split.
    fn finish_sum(&self, linear: &Self::Linear, sum: &mut Self::Rows);

    /// Stores the pass's keys and values, taken from `qkv` `[rows, layout.row_width()]`, in the slots of its
    /// slot mapping.
    fn write_kv(&self, kv: &mut Self::Kv, at: AttentionLayer, pass: &Self::Pass<'_>, qkv: &Self::Rows);

    /// Attention of the pass's queries over the KV blocks of their sequences -> `out` `[rows,
    /// layout.q_width()]`.
    fn attention(
        &self,
        kv: &Self::Kv,
        at: AttentionLayer,
        pass_and_qkv: (&Self::Pass<'_>, &Self::Rows),
        out: &mut Self::Rows,
    );

    /// `x` times `gate_up`, whose outputs are `[gate | up]`, then silu(gate) * up times `down` -> `out`, as
    /// by `linear`.
    fn feed_forward(
        &self,
        gate_up: &Self::Linear,
        down: &Self::Linear,
        rows: FeedForwardRows<'_, Self::Rows>,
    );

    /// Copies the rows of `x` `[rows, width]` that need logits -> `out` `[logit rows, width]`.
    fn take_logit_rows(&self, pass: &Self::Pass<'_>, width: usize, x: &Self::Rows, out: &mut Self::Rows);
}
