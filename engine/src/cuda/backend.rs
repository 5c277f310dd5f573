//! A GPU as a [`Backend`]: weights, KV cache and rows are in device memory, and every operation is one of
//! `ops` on them. Generic over [`Executor`], so that tests can run a whole model on the host with the kernels
//! that a GPU runs.
//!
//! Operations do not return errors. The first error is stored, later operations do nothing, and the next read
//! of results or check returns the error. Reads of drawn tokens or of logits wait for the device, and so does
//! the end of a forward that reads nothing.

mod attend;
mod drawing;
#[cfg(test)]
mod failure_tests;
mod fusion;
mod load;
mod multiply;
#[cfg(test)]
mod padding_tests;
mod pass;
mod rounding;
mod rows;
#[cfg(test)]
mod step_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tree_tests;
mod upload;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cpu_kernels::{HeadLayout, KvShape, MatrixFormat, Norm, TokenCopy};
use half::bf16;
use speculation::tree::MAX_TREE_TOKENS;

use super::CudaError;
use super::executor::{Executor, Tensor};
use super::kv_budget::{MemoryInfo, PASS_LIMITS, kv_bytes, workspace_bytes};
use super::ops::{
    CandidateBuffers, DrawBuffers, Embedding, FinishSum, NormHeads, ScoreBuffers, StepBuffer, Swiglu,
    TilingKey, WriteKv, copy_tokens, ensure_capacity, padded_rows, take_rows,
};
use crate::EngineError;
use crate::backend::{AttentionLayer, Backend, FeedForwardRows};
use crate::draws::{DrawPlan, RankOutput};
use crate::forward_batch::{ForwardBatch, PassLimits};
use crate::model_config::ModelConfig;
use crate::rope::Rope;
use crate::shard::Shard;
use crate::weights::{LinearTensors, TensorPart, TensorSource};
use fusion::DelayedOp;
pub(super) use load::check_model;
use load::{GpuLinear, GpuTable};
use pass::{GpuPass, Inputs, PassPart};
use rounding::{InputReaders, QuantizedRows, RoundedSource};
pub(crate) use rows::GpuRows;
use upload::upload_angles;

/// One device, used by one thread at a time.
pub(crate) struct Gpu<E: Executor> {
    state: Arc<Mutex<State<E>>>,
}

/// A device's state, shared with the collective of its rank.
pub(crate) struct SharedState<E: Executor>(Arc<Mutex<State<E>>>);

impl<E: Executor> SharedState<E> {
    /// Runs `between` two operations. Returns the error at once if an operation has failed: other ranks must
    /// not wait for data that this rank cannot provide.
    pub(super) fn run<T>(
        &self,
        between: impl FnOnce(&mut E) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.failed {
            return Err(error.clone().into());
        }
        state.flush_delayed()?;
        between(&mut state.executor)
    }
}

/// What operations use besides their operands.
struct State<E: Executor> {
    executor: E,
    failed: Option<CudaError>,
    /// Operation that was requested but not launched yet, because it may be fused with the next one.
    delayed: Option<DelayedOp>,
    /// How products read inputs in bf16. If any does, kernels that write f32 inputs also write them rounded
    /// to bf16.
    readers: InputReaders,
    /// The f32 numbers whose rounded copy the previous operation left in `rounded`.
    rounded_source: Option<RoundedSource>,
    /// Where the inputs of the current pass are in the arrays of `drawing`.
    inputs: Inputs,
    /// Cosines and sines of all positions, [`load_angles`](Backend::load_angles).
    angles: Option<Tensor<E::Memory, f32>>,
    drawing: DrawBuffers<E::Memory>,
    scoring: ScoreBuffers<E::Memory>,
    listing: CandidateBuffers<E::Memory>,
    /// Inputs of a product, rounded to bf16.
    rounded: Option<Tensor<E::Memory, bf16>>,
    /// Sums of groups of slices of a product.
    sums: Option<Tensor<E::Memory, f32>>,
    /// Inputs of a product, quantized.
    quantized: QuantizedRows<E::Memory>,
    /// Partial results of attention's splits.
    partial: Option<Tensor<E::Memory, f32>>,
    /// Finished blocks of attention's tiles: zeros between launches.
    arrived: Option<Tensor<E::Memory, u32>>,
    /// One layer's keys and values that single rows of token trees attend to, and the list of tokens to copy.
    own: Option<Tensor<E::Memory, bf16>>,
    copies: StepBuffer<E::Memory, u32>,
}

/// A norm's weights.
#[derive(Debug)]
pub(crate) struct GpuNorm<M> {
    weight: Tensor<M, f32>,
    eps: f32,
}

/// Blocks of keys and values, `[blocks][layers][kv heads][K | V of 16 keys]`.
#[derive(Debug)]
pub(crate) struct GpuKv<M> {
    blocks: Tensor<M, bf16>,
    shape: KvShape,
}

impl<E: Executor> Gpu<E> {
    pub(super) fn new(executor: E) -> Self {
        let state = State {
            executor,
            failed: None,
            delayed: None,
            readers: InputReaders::default(),
            rounded_source: None,
            inputs: Inputs::default(),
            angles: None,
            drawing: DrawBuffers::default(),
            scoring: ScoreBuffers::default(),
            listing: CandidateBuffers::default(),
            rounded: None,
            sums: None,
            quantized: QuantizedRows::EMPTY,
            partial: None,
            arrived: None,
            own: None,
            copies: StepBuffer::default(),
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Tells how the model's layers divide attention. Called once, before the first pass.
    pub(super) fn add_tilings(&self, config: &ModelConfig, shard: Shard) {
        let (layout, mut state) = (shard.layout(config), self.lock());
        let has_warpgroups = state.executor.attends_in_panels();
        for window in &config.windows {
            state.inputs.add_tiling_key(TilingKey::of(layout, *window, has_warpgroups));
        }
    }

    /// Shares the state with the collective of this rank.
    pub(super) fn share_state(&self) -> SharedState<E> {
        SharedState(Arc::clone(&self.state))
    }

    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs an operation, unless an earlier one has failed. Launches the delayed operation first.
    fn run(&self, operation: impl FnOnce(&mut State<E>) -> Result<(), CudaError>) {
        self.run_joined(|state| {
            state.flush_delayed()?;
            operation(state)
        });
    }

    /// Runs an operation that launches or fuses the delayed operation itself.
    fn run_joined(&self, operation: impl FnOnce(&mut State<E>) -> Result<(), CudaError>) {
        let mut state = self.lock();
        if state.failed.is_none()
            && let Err(error) = operation(&mut state)
        {
            state.delayed = None;
            state.rounded_source = None;
            state.failed = Some(error);
        }
    }

    /// Locks the state and launches the delayed operation. Returns the stored error if an operation has
    /// failed.
    fn lock_flushed(&self) -> Result<MutexGuard<'_, State<E>>, EngineError> {
        let mut state = self.lock();
        if let Some(error) = state.failed.take() {
            return Err(error.into());
        }
        state.flush_delayed()?;
        Ok(state)
    }
}

impl<E: Executor + Send> Backend for Gpu<E>
where
    E::Memory: Send + Sync,
{
    type Rows = GpuRows<E::Memory>;
    type Table = GpuTable<E::Memory>;
    type Linear = GpuLinear<E::Memory>;
    type Norm = GpuNorm<E::Memory>;
    type Kv = GpuKv<E::Memory>;
    type Pass<'a> = GpuPass<'a>;

    /// Each rank is on its own device.
    const SHARES_TABLES: bool = false;

    const PASS_LIMITS: PassLimits = PASS_LIMITS;

    const DRAWS: bool = true;

    fn load_table(
        &self,
        source: &dyn TensorSource,
        part: &TensorPart,
        format: MatrixFormat,
    ) -> Result<Self::Table, EngineError> {
        load::table(&mut self.lock().executor, source, (part, format), false)
    }

    fn load_linear(&self, tensors: &LinearTensors<'_>) -> Result<Self::Linear, EngineError> {
        let linear = load::linear(&mut self.lock().executor, tensors)?;
        self.lock().readers.add(&linear.weights);
        Ok(linear)
    }

    fn linear_bytes(&self, linear: &Self::Linear) -> u64 {
        linear.bytes()
    }

    fn load_tied(
        &self,
        source: &dyn TensorSource,
        part: &TensorPart,
        format: MatrixFormat,
    ) -> Result<(Self::Table, Self::Linear), EngineError> {
        let table = load::table(&mut self.lock().executor, source, (part, format), true)?;
        let linear = table.as_linear();
        self.lock().readers.add(&linear.weights);
        Ok((table, linear))
    }

    fn load_norm(&self, norm: Norm) -> Result<Self::Norm, EngineError> {
        let weight = Tensor::of(&mut self.lock().executor, &norm.weight, "weights of a norm")?;
        Ok(GpuNorm { weight, eps: norm.eps })
    }

    fn free_kv_bytes(
        &self,
        config: &ModelConfig,
        shard: Shard,
        max_len: u32,
        utilization: f32,
    ) -> Result<u64, EngineError> {
        let memory = self.lock().executor.memory_info()?;
        let bytes = kv_bytes(memory, workspace_bytes(config, shard, max_len), utilization)?;
        let MemoryInfo { free_bytes, total_bytes } = memory;
        tracing::info!(bytes, free = free_bytes, total = total_bytes, rank = shard.rank, "kv memory");
        Ok(bytes)
    }

    fn new_kv(&self, shape: KvShape, format: MatrixFormat, num_blocks: u32) -> Result<Self::Kv, EngineError> {
        assert!(format == MatrixFormat::Bf16, "f32 weights were refused, and with them f32 keys and values");
        let State { executor, copies, .. } = &mut *self.lock();
        // Returns what was freed during loading to the device, which then has it for the cache.
        executor.memory_info()?;
        let blocks = Tensor::zeros(executor, num_blocks as usize * shape.block_len(), "kv blocks")?;
        // Allocated here, so that keeping a tree's accepted path never runs out of memory: that error would
        // only appear in the forward of another sequence.
        copies.resize(executor, 2 * MAX_TREE_TOKENS, "copies of tokens")?;
        Ok(GpuKv { blocks, shape })
    }

    fn warn_of_workspace(&self, config: &ModelConfig, shard: Shard, max_len: u32) -> Result<(), EngineError> {
        let (rank, workspace) = (shard.rank, workspace_bytes(config, shard, max_len));
        let MemoryInfo { free_bytes: free, .. } = self.lock().executor.memory_info()?;
        if free < workspace {
            tracing::warn!(
                rank,
                free,
                workspace,
                "the largest forward may need more memory than weights and KV leave: lower --kv-memory"
            );
        }
        Ok(())
    }

    fn load_angles(&self, rope: &Rope, max_len: u32) -> Result<(), EngineError> {
        let State { executor, angles, .. } = &mut *self.lock();
        *angles = Some(upload_angles(executor, rope, max_len as usize)?);
        Ok(())
    }

    fn grow_kv(&self, kv: &mut Self::Kv, num_blocks: u32) -> Result<(), EngineError> {
        let (needed, total) = (u64::from(num_blocks), (kv.blocks.len() / kv.shape.block_len()) as u64);
        if needed > total {
            return Err(EngineError::OutOfKv { needed, free: total });
        }
        Ok(())
    }

    fn copy_block(&self, kv: &mut Self::Kv, from: u32, to: u32) {
        let len = kv.shape.block_len();
        self.run(|state| {
            kv.blocks.copy_within(&mut state.executor, (from as usize * len, to as usize * len), len)
        });
    }

    fn copy_tokens(&self, kv: &mut Self::Kv, copies: &[TokenCopy]) {
        let GpuKv { blocks, shape } = kv;
        self.run(|state| {
            let State { executor, copies: held, .. } = state;
            let mut copy = |copies| copy_tokens(executor, (&mut *blocks, *shape), copies, held);
            copies.chunks(MAX_TREE_TOKENS).try_for_each(&mut copy)
        });
    }

    fn resize(&self, rows: &mut Self::Rows, len: usize) {
        // At least one number, so that a tensor always exists.
        self.run(|state| {
            ensure_capacity(&mut rows.tensor, &mut state.executor, len.max(1), "rows of a pass").map(drop)
        });
        rows.len = len;
    }

    fn check(&self) -> Result<(), EngineError> {
        self.lock_flushed().map(drop)
    }

    fn wait(&self) -> Result<(), EngineError> {
        Ok(self.lock_flushed()?.executor.wait()?)
    }

    fn append_to(&self, host: &mut Vec<f32>, rows: &mut Self::Rows, len: usize) -> Result<(), EngineError> {
        let mut state = self.lock_flushed()?;
        let (tensor, _) = rows.read();
        host.extend(tensor.read(&mut state.executor, 0..len)?);
        Ok(())
    }

    fn draw(
        &self,
        logits: &mut Self::Rows,
        num_rows: usize,
        draws: &DrawPlan,
        outputs: &mut RankOutput,
    ) -> Result<(), EngineError> {
        self.lock_flushed()?.draw(logits, num_rows, draws, outputs)
    }

    fn padded_rows(&self, rows: usize) -> Option<usize> {
        // Larger passes are prompts, which take long and are seldom alike.
        let fits = |padded: &usize| *padded <= PASS_LIMITS.logit_rows;
        Some(padded_rows(rows)).filter(|padded| fits(padded) && self.lock().executor.pads_passes())
    }

    fn begin<'a>(
        &self,
        batch: &'a ForwardBatch<'a>,
        logit_part: Option<&'a ForwardBatch<'a>>,
        draws: &DrawPlan,
        rope: &Rope,
    ) -> (GpuPass<'a>, Option<GpuPass<'a>>) {
        self.run(|state| state.begin((batch, logit_part), draws, rope));
        let of_logits = logit_part.map(|part| GpuPass::new(part, PassPart::LogitRows));
        (GpuPass::new(batch, PassPart::AllRows), of_logits)
    }

    fn embed(&self, table: &Self::Table, pass: &Self::Pass<'_>, out: &mut Self::Rows) {
        self.run(|state| {
            let (out, _) = out.write();
            let GpuTable { numbers: table, columns: hidden, is_tiled, .. } = table;
            let State { executor, inputs, drawing, .. } = state;
            let (token_ids, is_tiled) = (drawing.arrays.input(&inputs.rows.token_ids), *is_tiled);
            Embedding { table, is_tiled, token_ids, out }.launch(executor, pass.rows(), *hidden)
        });
    }

    fn add(&self, hidden: &mut Self::Rows, delta: &Self::Rows) {
        self.run_joined(|state| {
            let (sum, len) = hidden.write();
            state.delay_add(sum, delta.read().0, len)
        });
    }

    fn rms_norm(&self, norm: &Self::Norm, x: &Self::Rows, out: &mut Self::Rows) {
        self.run_joined(|state| state.rms_norm(norm, x.read(), out.write().0));
    }

    fn norm_heads(&self, layout: HeadLayout, (q, k): (&Self::Norm, &Self::Norm), qkv: &mut Self::Rows) {
        self.run(|state| {
            let (qkv, len) = qkv.write();
            let (q_weight, q_eps, k_weight, k_eps) = (&q.weight, q.eps, &k.weight, k.eps);
            NormHeads { qkv, layout, q_weight, q_eps, k_weight, k_eps }
                .launch(&mut state.executor, len / layout.row_width())
        });
    }

    fn rotate(&self, layout: HeadLayout, pass: &Self::Pass<'_>, qkv: &mut Self::Rows) {
        self.run(|state| state.delay_rotate(qkv.write().0, pass, layout));
    }

    fn linear(&self, linear: &Self::Linear, x: &mut Self::Rows, out: &mut Self::Rows) {
        self.run_joined(|state| state.multiply(linear, x.read(), out.write().0));
    }

    fn finish_sum(&self, linear: &Self::Linear, sum: &mut Self::Rows) {
        let (scales, bias) = (linear.scales_after.as_ref(), linear.bias_after.as_ref());
        if scales.is_none() && bias.is_none() {
            return;
        }
        self.run(|state| {
            let (sum, len) = sum.write();
            FinishSum { sum, scales, bias }.launch(&mut state.executor, len / linear.n, linear.n)
        });
    }

    fn write_kv(&self, kv: &mut Self::Kv, at: AttentionLayer, pass: &Self::Pass<'_>, qkv: &Self::Rows) {
        let (layer, kv) = ((at.layer, kv.shape.num_layers), &mut kv.blocks);
        self.run_joined(|state| {
            let turn = state.take_delayed_rotate(qkv.read().0, pass.rows())?;
            let State { executor, inputs, angles, drawing, .. } = state;
            let (qkv, slots) = (qkv.read().0, drawing.arrays.input(&inputs.rows.slots));
            let write = WriteKv { qkv, slots, kv, layout: at.layout, layer };
            if !turn {
                return write.launch(executor, pass.rows());
            }
            let angles = inputs.part(pass.part).angles(&drawing.arrays, angles.as_ref());
            // SAFETY: the queries are turned for `rotate`, which had qkv to write and was delayed until now.
            unsafe { write.launch_with_rotate(executor, &angles, pass.rows()) }
        });
    }

    fn attention(
        &self,
        kv: &Self::Kv,
        at: AttentionLayer,
        (pass, qkv): (&Self::Pass<'_>, &Self::Rows),
        out: &mut Self::Rows,
    ) {
        self.run(|state| state.attend(kv, at, (pass, qkv.read().0), out));
    }

    fn feed_forward(
        &self,
        gate_up: &Self::Linear,
        down: &Self::Linear,
        rows: FeedForwardRows<'_, Self::Rows>,
    ) {
        let FeedForwardRows { x, gates_and_ups, gated, out } = rows;
        self.linear(gate_up, x, gates_and_ups);
        self.run(|state| {
            let ((product, len), width) = (gated.write(), down.k);
            let (rows, address) = (len / width, product.address());
            let layout = state.ensure_rounded((rows, width))?;
            let rounded = state.rounded.as_mut().zip(layout);
            Swiglu { gate_up: gates_and_ups.read().0, out: product, rounded }.launch(
                &mut state.executor,
                rows,
                width,
            )?;
            state.set_rounded_source(address, (rows, width), layout);
            Ok(())
        });
        self.linear(down, gated, out);
    }

    fn take_logit_rows(&self, _pass: &Self::Pass<'_>, width: usize, x: &Self::Rows, out: &mut Self::Rows) {
        self.run(|state| {
            let State { executor, inputs, drawing, .. } = state;
            let logit_rows = drawing.arrays.input(&inputs.rows.logit_rows);
            take_rows(executor, (x.read().0, width), logit_rows, out.write().0)
        });
    }
}

/// Borders, on the device and on the host, shared by products with equal borders.
type Borders<M> = Arc<(Tensor<M, u32>, Vec<u32>)>;
