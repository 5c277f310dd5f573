//! The CPU as a [`Backend`]: weights, KV and rows are in this process's memory, and every operation is a
//! `cpu_kernels` call on slices. This file decides how weights are loaded; it has no arithmetic of the
//! forward pass.

mod rows;

use std::sync::Arc;

use cpu_kernels::{
    Angles, AttentionStep, Cpu, FeedForwardStep, FloatMatrix, HeadLayout, KSlices, KvCache, KvShape, Linear,
    LinearWeights, MatrixFormat, Norm, PackedMatrix, Stage, StageTimes, Table, TokenCopy,
};

use crate::EngineError;
use crate::backend::{AttentionLayer, Backend, FeedForwardRows};
use crate::draws::DrawPlan;
use crate::forward_batch::ForwardBatch;
use crate::rope::Rope;
use crate::weights::{
    Fp8Scales, LinearFormat, LinearTensors, StackedRows, TensorPart, TensorSource, WidenedRows,
};
pub(crate) use rows::HostRows;

/// A linear layer, and the steps left to do after the ranks' partial sums are added.
#[derive(Debug)]
pub(crate) struct HostLinear {
    linear: Linear,
    /// `[width]` each, for a rank's part of a sum.
    deferred_scales: Option<Vec<f32>>,
    deferred_bias: Option<Vec<f32>>,
}

/// Cosines and sines of positions.
fn angles(rope: &Rope, positions: &[u32]) -> Angles {
    let half = rope.half_dim();
    let (mut cos, mut sin) = (vec![0.0; positions.len() * half], vec![0.0; positions.len() * half]);
    let rows = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
    for (&position, (cos, sin)) in positions.iter().zip(rows) {
        rope.angles(position, cos, sin);
    }
    Angles { cos, sin, half }
}

/// A pass, and the rope angles of its rows.
#[derive(Debug)]
pub(crate) struct HostPass<'a> {
    batch: &'a ForwardBatch<'a>,
    angles: Angles,
}

impl HostPass<'_> {
    fn step<'a>(&'a self, at: AttentionLayer, qkv: &'a [f32]) -> AttentionStep<'a> {
        let AttentionLayer { layout, layer, window } = at;
        AttentionStep { layout, layer, window, pass: self.batch.rows(), qkv }
    }
}

impl Backend for Cpu {
    type Rows = HostRows;
    type Table = Table;
    type Linear = HostLinear;
    type Norm = Norm;
    type Kv = KvCache;
    type Pass<'a> = HostPass<'a>;

    const SHARES_TABLES: bool = true;

    fn num_threads(&self) -> usize {
        self.threads().len()
    }

    fn pin(&mut self, cores: &[usize]) -> Result<(), EngineError> {
        Ok(self.threads_mut().pin(cores)?)
    }

    fn load_table(
        &self,
        source: &dyn TensorSource,
        part: &TensorPart,
        format: MatrixFormat,
    ) -> Result<Table, EngineError> {
        Ok(Table::load(format, &StackedRows::new(source, vec![part.clone()])?, self.threads())?)
    }

    fn load_tied(
        &self,
        source: &dyn TensorSource,
        part: &TensorPart,
        format: MatrixFormat,
    ) -> Result<(Table, HostLinear), EngineError> {
        let rows = StackedRows::new(source, vec![part.clone()])?;
        let slices = KSlices::whole(part.columns.len());
        let packed = Arc::new(FloatMatrix::pack(format, &rows, &slices, self.threads())?);
        let linear = Linear { weights: LinearWeights::Floats(Arc::clone(&packed)), scales: None, bias: None };
        Ok((Table::Panels(packed), HostLinear { linear, deferred_scales: None, deferred_bias: None }))
    }

    fn load_linear(&self, tensors: &LinearTensors<'_>) -> Result<HostLinear, EngineError> {
        let (mut bias, mut deferred_bias) = (tensors.bias.clone(), None);
        let (mut scales, mut deferred_scales) = (None, None);
        let weights = match tensors.format {
            LinearFormat::Float(format) => {
                let (rows, slices) = (tensors.rows()?, tensors.slices.rebased());
                LinearWeights::Floats(Arc::new(FloatMatrix::pack(format, &rows, &slices, self.threads())?))
            }
            // Widened to bf16, which is exact; this saves no memory.
            LinearFormat::Fp8(by) => {
                let rows = WidenedRows::new(tensors.rows()?, tensors.scales_per_row());
                let packed = match by {
                    Fp8Scales::Channels => {
                        let slices = tensors.slices.rebased();
                        let packed = FloatMatrix::pack(MatrixFormat::Bf16, &rows, &slices, self.threads())?;
                        scales = Some(rows.take_scales());
                        packed
                    }
                    Fp8Scales::Blocks => {
                        let scales = || rows.take_scales();
                        FloatMatrix::pack_by_block(&rows, &tensors.slices, self.threads(), scales)?
                    }
                };
                LinearWeights::Floats(Arc::new(packed))
            }
            LinearFormat::Quantized(format) => {
                // Scales are those of whole rows, so splitting K over ranks does not change a weight.
                let rows = tensors.whole_rows()?;
                let mut packed = PackedMatrix::pack(format, &tensors.slices, &rows, self.threads())?;
                packed.rebase(tensors.slices.start());
                if tensors.partial {
                    deferred_scales = packed.take_channel_scales();
                }
                LinearWeights::Packed(packed)
            }
        };
        if tensors.partial {
            deferred_bias = bias.take();
            deferred_scales = deferred_scales.or_else(|| scales.take());
        }
        Ok(HostLinear { linear: Linear { weights, scales, bias }, deferred_scales, deferred_bias })
    }

    fn linear_bytes(&self, linear: &HostLinear) -> u64 {
        linear.linear.bytes()
    }

    fn load_norm(&self, norm: Norm) -> Result<Norm, EngineError> {
        Ok(norm)
    }

    fn new_kv(&self, shape: KvShape, format: MatrixFormat, num_blocks: u32) -> Result<KvCache, EngineError> {
        Ok(KvCache::new(shape, format, num_blocks))
    }

    fn grow_kv(&self, kv: &mut KvCache, num_blocks: u32) -> Result<(), EngineError> {
        Ok(kv.grow_to(num_blocks)?)
    }

    fn copy_block(&self, kv: &mut KvCache, from: u32, to: u32) {
        kv.copy_block(from, to);
    }

    fn copy_tokens(&self, kv: &mut KvCache, copies: &[TokenCopy]) {
        copies.iter().for_each(|&copy| kv.copy_token(copy));
    }

    fn resize(&self, rows: &mut HostRows, len: usize) {
        rows.resize(len);
    }

    fn append_to(&self, host: &mut Vec<f32>, rows: &mut HostRows, len: usize) -> Result<(), EngineError> {
        if host.is_empty() {
            *host = rows.take();
            host.truncate(len);
        } else {
            host.extend_from_slice(&rows[..len]);
        }
        Ok(())
    }

    fn begin<'a>(
        &self,
        batch: &'a ForwardBatch<'a>,
        logit_part: Option<&'a ForwardBatch<'a>>,
        _draws: &DrawPlan,
        rope: &Rope,
    ) -> (HostPass<'a>, Option<HostPass<'a>>) {
        self.begin_stages();
        let pass = |batch: &'a ForwardBatch<'a>| HostPass { batch, angles: angles(rope, &batch.positions) };
        (pass(batch), logit_part.map(pass))
    }

    fn mark(&self, stage: Stage) {
        Cpu::mark(self, stage);
    }

    fn stage_times(&self) -> StageTimes {
        Cpu::stage_times(self)
    }

    fn embed(&self, table: &Table, pass: &HostPass<'_>, out: &mut HostRows) {
        Cpu::embed(self, table, &pass.batch.token_ids, out);
    }

    fn add(&self, hidden: &mut HostRows, delta: &HostRows) {
        Cpu::add(self, hidden, delta);
    }

    fn rms_norm(&self, norm: &Norm, x: &HostRows, out: &mut HostRows) {
        Cpu::rms_norm(self, norm, x, out);
    }

    fn norm_heads(&self, layout: HeadLayout, norms: (&Norm, &Norm), qkv: &mut HostRows) {
        Cpu::norm_heads(self, layout, norms, qkv);
    }

    fn rotate(&self, layout: HeadLayout, pass: &HostPass<'_>, qkv: &mut HostRows) {
        Cpu::rotate(self, layout, &pass.angles, qkv);
    }

    fn linear(&self, linear: &HostLinear, x: &mut HostRows, out: &mut HostRows) {
        Cpu::linear(self, &linear.linear, x, out);
    }

    fn finish_sum(&self, linear: &HostLinear, sum: &mut HostRows) {
        let rows = sum.chunks_exact_mut(linear.linear.width());
        for row in rows {
            if let Some(scales) = &linear.deferred_scales {
                row.iter_mut().zip(scales).for_each(|(x, scale)| *x *= scale);
            }
            if let Some(bias) = &linear.deferred_bias {
                row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
        }
    }

    fn write_kv(&self, kv: &mut KvCache, at: AttentionLayer, pass: &HostPass<'_>, qkv: &HostRows) {
        Cpu::write_kv(self, kv, &pass.step(at, qkv));
    }

    fn attention(
        &self,
        kv: &KvCache,
        at: AttentionLayer,
        (pass, qkv): (&HostPass<'_>, &HostRows),
        out: &mut HostRows,
    ) {
        Cpu::attention(self, kv, &pass.step(at, qkv), out);
    }

    fn feed_forward(&self, gate_up: &HostLinear, down: &HostLinear, rows: FeedForwardRows<'_, HostRows>) {
        let (gate_up, down) = (&gate_up.linear, &down.linear);
        let FeedForwardRows { x, gates_and_ups, gated, out } = rows;
        Cpu::feed_forward(self, FeedForwardStep { gate_up, down, x, gates_and_ups, gated, out });
    }

    fn take_logit_rows(&self, pass: &HostPass<'_>, width: usize, x: &HostRows, out: &mut HostRows) {
        let rows = pass.batch.logit_rows.iter().map(|row| &x[row * width..(row + 1) * width]);
        out.chunks_exact_mut(width).zip(rows).for_each(|(out, row)| out.copy_from_slice(row));
    }
}
