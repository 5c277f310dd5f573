//! The CPU backend: cuts each operation into pieces that no piece's result depends on, and runs a kernel on
//! each.
//!
//! `lanes` defines the arithmetic, `x86` and `neon` implement it in registers, `dispatch` chooses; `floats` and `packed` multiply
//! with weights (of floats, of integers) that `lines` holds, `attention` and `elementwise` are the other kernels;
//! `reference` holds their naive twins, which judge them. `table` is what ids are looked up in.
#![expect(
    unsafe_code,
    reason = "vector instructions and disjoint writes by several threads; see each SAFETY note"
)]

mod attention;
mod dispatch;
mod elementwise;
mod exp;
mod floats;
mod instruction_set;
mod lanes;
pub(crate) mod lines;
mod multiply;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packed;
mod read;
pub(crate) mod reference;
mod table;
mod threads;
mod tiles;
mod transpose;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use attention::Attend;
use dispatch::Isa;
pub(crate) use elementwise::round_to_bf16;
use elementwise::{RmsNorm, RmsNormInPlace, Rotate, SiluMul};
pub(crate) use floats::FloatMatrix;
use floats::{FloatMatMul, TiledRows};
pub use instruction_set::{cpu_name, instruction_set, instruction_sets, use_instruction_set};
use lanes::Element;
pub(crate) use multiply::MultiplyAdds;
pub(crate) use packed::PackedMatrix;
use packed::{PackedMatMul, QuantizedRows};
pub(crate) use read::{READ_LINE, ReadBuffer, ReadSum};
pub(crate) use table::Table;
use threads::Shared;
pub(crate) use threads::{Patience, Threads, allowed_cores};

use crate::backend::{HeadLayout, Norm};
use crate::host::{Angles, AttentionStep, Linear, LinearWeights};
use crate::kv_cache::{KvBlocks, KvCache, KvElement};
use crate::stages::{Stage, StageClock, StageTimes};
use crate::{EngineError, TokenId};

/// The class of kernels whose bits are equal, whatever the instruction set; part of `numerics_id`. Change it
/// with the arithmetic.
pub(crate) const KERNEL_CLASS: &str = "f32-chain-2";

/// Columns that a thread takes at a time: whole panels of weights of any format.
const COLUMN_GRAIN: usize = floats::PANEL;
/// What one exponential costs, in multiply-adds.
const EXP_WORK: usize = 16;

/// The CPU as a device.
#[derive(Debug)]
pub(crate) struct Cpu {
    isa: Isa,
    threads: Threads,
    /// Those of the product under way; locked so that `linear` can take `&self`, never contended.
    activations: Mutex<Activations>,
    /// Locked for the same reason.
    stages: Mutex<StageClock>,
}

/// Inputs of a product as its kernels take them.
#[derive(Debug, Default)]
struct Activations {
    floats: TiledRows,
    quantized: QuantizedRows,
}

impl Cpu {
    pub(crate) fn new(threads: usize) -> Result<Self, EngineError> {
        Ok(Self::with(Isa::in_use()?, Threads::new(threads)?))
    }

    /// All instruction sets of this machine, for tests that compare them.
    #[cfg(test)]
    pub(crate) fn every_isa() -> Vec<Self> {
        let cpu = |isa| Self::with(isa, Threads::new(1).unwrap());
        Isa::all().into_iter().map(cpu).collect()
    }

    /// Several threads that share every piece of work, however small.
    #[cfg(test)]
    pub(crate) fn eager(threads: usize) -> Self {
        Self::with(Isa::best(), Threads::eager(threads))
    }

    fn with(isa: Isa, threads: Threads) -> Self {
        Self { isa, threads, activations: Mutex::default(), stages: Mutex::default() }
    }

    /// The threads of the engine.
    pub(crate) fn threads(&self) -> &Threads {
        &self.threads
    }

    pub(crate) fn threads_mut(&mut self) -> &mut Threads {
        &mut self.threads
    }

    pub(crate) fn begin_stages(&self) {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner).begin();
    }

    /// What was done since the last call was of this stage.
    pub(crate) fn mark(&self, stage: Stage) {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner).mark(stage);
    }

    pub(crate) fn stage_times(&self) -> StageTimes {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner).times
    }

    /// Reads memory, on the calling thread.
    pub(crate) fn read(&self, sum: ReadSum<'_>) -> u64 {
        self.isa.run(sum)
    }

    /// Multiplies and adds, on the calling thread; returns how often.
    pub(crate) fn multiply(&self, work: MultiplyAdds) -> f64 {
        self.isa.run(work)
    }

    fn attend<T: Element + KvElement>(&self, kv: &KvBlocks<T>, step: &AttentionStep<'_>, out: &mut [f32]) {
        let (tasks, work) = attention::tasks(step);
        let out = Shared::new(out);
        self.threads.for_ranges(tasks.len(), 1, work, |range| {
            self.isa.run(Attend { kv, step: *step, tasks: &tasks[range], out: &out });
        });
    }

    /// Runs `run` on ranges of whole rows of `x`.
    fn for_rows(
        &self,
        x: &mut [f32],
        width: usize,
        work: usize,
        run: impl Fn(Range<usize>, &mut [f32]) + Sync,
    ) {
        let rows = x.len() / width;
        let x = Shared::new(x);
        self.threads.for_ranges(rows, 1, work, |rows| {
            // SAFETY: ranges of rows are disjoint.
            let part = unsafe { x.slice_mut(rows.start * width..rows.end * width) };
            run(rows, part);
        });
    }
}

/// The operations of `backend`, on slices.
impl Cpu {
    pub(crate) fn embed(&self, table: &Table, token_ids: &[TokenId], out: &mut [f32]) {
        for (&id, out) in token_ids.iter().zip(out.chunks_exact_mut(table.columns())) {
            table.row(id as usize, out);
        }
    }

    pub(crate) fn add(&self, hidden: &mut [f32], delta: &[f32]) {
        hidden.iter_mut().zip(delta).for_each(|(hidden, delta)| *hidden += delta);
    }

    pub(crate) fn rms_norm(&self, norm: &Norm, x: &[f32], out: &mut [f32]) {
        let width = norm.weight.len();
        self.for_rows(out, width, 2 * x.len(), |rows, out| {
            let x = &x[rows.start * width..rows.end * width];
            self.isa.run(RmsNorm { x, weight: &norm.weight, eps: norm.eps, out });
        });
    }

    pub(crate) fn norm_heads(&self, layout: HeadLayout, norms: (&Norm, &Norm), qkv: &mut [f32]) {
        let (q, k) = norms;
        self.for_rows(qkv, layout.row_width(), 2 * qkv.len(), |_, rows| {
            for row in rows.chunks_exact_mut(layout.row_width()) {
                let (queries, rest) = row.split_at_mut(layout.q_width());
                let keys = &mut rest[..layout.kv_width()];
                self.isa.run(RmsNormInPlace { x: queries, weight: &q.weight, eps: q.eps });
                self.isa.run(RmsNormInPlace { x: keys, weight: &k.weight, eps: k.eps });
            }
        });
    }

    pub(crate) fn rotate(&self, layout: HeadLayout, angles: &Angles, qkv: &mut [f32]) {
        let half = angles.half;
        self.for_rows(qkv, layout.row_width(), 2 * qkv.len(), |rows, part| {
            for (row, numbers) in rows.zip(part.chunks_exact_mut(layout.row_width())) {
                let angle = row * half..(row + 1) * half;
                self.isa.run(Rotate {
                    heads: &mut numbers[..layout.q_width() + layout.kv_width()],
                    cos: &angles.cos[angle.clone()],
                    sin: &angles.sin[angle],
                });
            }
        });
    }

    pub(crate) fn linear(&self, linear: &Linear, x: &mut [f32], out: &mut [f32]) {
        let (k, width) = (linear.k(), linear.width());
        let rows = x.len() / k;
        assert!(
            x.len() == rows * k && out.len() == rows * width,
            "a linear's input and output disagree on rows"
        );
        let (out, bias) = (&Shared::new(out), linear.bias.as_deref());
        let work = rows * k * width;
        let mut activations = self.activations.lock().unwrap_or_else(PoisonError::into_inner);
        let with = (self.isa, &self.threads);
        match &linear.weights {
            LinearWeights::Floats(weights) => {
                activations.floats.fill(weights, x, with);
                let x = &activations.floats;
                self.threads.for_ranges(width, COLUMN_GRAIN, work, |columns| {
                    self.isa.run(FloatMatMul { x, weights, bias, columns, out });
                });
            }
            LinearWeights::Packed(weights) => {
                activations.quantized.fill(weights, x, with);
                let x = &activations.quantized;
                self.threads.for_ranges(width, COLUMN_GRAIN, work, |columns| {
                    self.isa.run_dots(PackedMatMul { x, weights, bias, columns, out });
                });
            }
        }
    }

    pub(crate) fn write_kv(&self, kv: &mut KvCache, step: &AttentionStep<'_>) {
        let layout = step.layout;
        for (row, &slot) in step.qkv.chunks_exact(layout.row_width()).zip(&step.batch.slot_mapping) {
            let (keys, values) = row[layout.q_width()..].split_at(layout.kv_width());
            match kv {
                KvCache::F32(blocks) => blocks.write(step.layer, slot, keys, values),
                KvCache::Bf16(blocks) => blocks.write(step.layer, slot, keys, values),
            }
        }
    }

    pub(crate) fn attention(&self, kv: &KvCache, step: &AttentionStep<'_>, out: &mut [f32]) {
        match kv {
            KvCache::F32(blocks) => self.attend(blocks, step, out),
            KvCache::Bf16(blocks) => self.attend(blocks, step, out),
        }
    }

    pub(crate) fn silu_mul(&self, gate_up: &[f32], width: usize, out: &mut [f32]) {
        self.for_rows(out, width, gate_up.len() * EXP_WORK, |rows, out| {
            self.isa.run(SiluMul {
                gate_up: &gate_up[rows.start * 2 * width..rows.end * 2 * width],
                out,
                width,
            });
        });
    }
}

#[cfg(test)]
mod tests;
