//! The arithmetic of a forward on the CPU. Splits each operation into independent tasks and runs a kernel on
//! each. It knows rows, weights and KV blocks, but no model, file or sequence, and fails only before a kernel
//! runs. The engine's `host` makes a backend of it. It is a separate crate so that kernels are compiled once
//! and tests link them (docs/adr/0068-cpu-kernels-are-a-crate.md).
//!
//! `simd` defines the arithmetic, `x86` and `neon` implement it in registers, `dispatch` chooses. `floats`
//! and `packed` are the GEMMs with float and integer weights, stored in `lines`; `product` and
//! `feed_forward` call them.
//! `attention` and `elementwise` are the other kernels. [`reference`](mod@reference) holds the naive twins that tests compare
//! them with (`tests/twins`). `table` is the embedding table, `threads` the thread pool. `pass`, `linear`,
//! `matrix`, `kv_cache` and `k_slices` are the operands.

mod attention;
mod dispatch;
mod elementwise;
mod error;
mod exp;
mod feed_forward;
mod floats;
mod instruction_set;
mod k_slices;
mod kv_cache;
mod linear;
mod lines;
mod matrix;
mod multiply;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packed;
mod pass;
mod product;
mod read;
pub mod reference;
mod simd;
mod stages;
mod table;
mod threads;
mod tiles;
mod transpose;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

pub use error::KernelError;
pub use feed_forward::FeedForwardStep;
pub use floats::FloatMatrix;
pub use instruction_set::{cpu_name, instruction_set, instruction_sets, use_instruction_set};
pub use k_slices::{Chain, KSlices, NUM_SLICES, SCALE_BLOCK, tree_sum};
pub use kv_cache::{BLOCK_SIZE, KvCache, KvShape, KvSlot, TokenCopy};
pub use linear::{Linear, LinearWeights};
pub use matrix::{Matrix, MatrixData, MatrixFormat, NumbersMut, QuantizedFormat, RowBlocks};
pub use multiply::MultiplyAdds;
pub use packed::PackedMatrix;
pub use pass::{Angles, AttentionStep, HeadLayout, Norm, PassRows, Segment, TreeSegment};
pub use read::{READ_CHUNK, ReadBuffer, ReadSum};
pub use stages::{Stage, StageTimes};
pub use table::Table;
pub use threads::{SpinPolicy, Threads, allowed_cores};

use attention::Attend;
use dispatch::Isa;
use elementwise::{RmsNorm, RmsNormInPlace, Rotate, SiluMul};
use kv_cache::{KvBlocks, KvElement, Stored};
use product::Activations;
use simd::Element;
use stages::StageClock;
use threads::SharedSliceMut;

/// Class of kernels with equal bits, independent of the instruction set; part of `numerics_id`. Change it
/// with the arithmetic.
pub const KERNEL_CLASS: &str = "f32-chain-3";

/// Cost of one exponential in multiply-adds.
const EXP_WORK: usize = 16;

/// The CPU as a device.
#[derive(Debug)]
pub struct Cpu {
    isa: Isa,
    threads: Threads,
    /// Inputs of the current product. Locked so that `linear` can take `&self`; never contended.
    activations: Mutex<Activations>,
    /// Inputs of a feed-forward layer's second product, packed while the first is computed; locked likewise.
    gated: Mutex<Activations>,
    /// Locked for the same reason.
    stages: Mutex<StageClock>,
}

impl Cpu {
    /// Creates a device that computes with this process's instruction set on `threads` threads, the calling
    /// one included.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        Ok(Self::with(Isa::in_use()?, Threads::new(threads)?))
    }

    /// Creates one device per instruction set of this machine, each with one thread, the fastest first: for
    /// tests that compare them.
    pub fn every_isa() -> Result<Vec<Self>, KernelError> {
        Isa::all().into_iter().map(|isa| Ok(Self::with(isa, Threads::new(1)?))).collect()
    }

    /// Creates a device whose threads split even the smallest work: for tests that compare numbers of
    /// threads.
    pub fn always_parallel(threads: usize) -> Result<Self, KernelError> {
        Ok(Self::with(Isa::best(), Threads::always_parallel(threads)?))
    }

    fn with(isa: Isa, threads: Threads) -> Self {
        Self {
            isa,
            threads,
            activations: Mutex::default(),
            gated: Mutex::default(),
            stages: Mutex::default(),
        }
    }

    /// The compute threads.
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// The compute threads, mutable for pinning.
    pub fn threads_mut(&mut self) -> &mut Threads {
        &mut self.threads
    }

    /// Starts timing: time before this call belongs to no stage.
    pub fn begin_stages(&self) {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner).begin();
    }

    /// Attributes the time since the last call to `stage`.
    pub fn mark(&self, stage: Stage) {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner).mark(stage);
    }

    /// Times attributed to stages since start.
    pub fn stage_times(&self) -> StageTimes {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner).times
    }

    /// Reads memory on the calling thread and returns the sum.
    pub fn read(&self, sum: ReadSum<'_>) -> u64 {
        self.isa.run(sum)
    }

    /// Runs multiply-adds on the calling thread and returns their number.
    pub fn multiply(&self, work: MultiplyAdds) -> f64 {
        self.isa.run(work)
    }

    fn attend<T: Element + KvElement>(&self, kv: &KvBlocks<T>, step: &AttentionStep<'_>, out: &mut [f32]) {
        let (tasks, work) = attention::tasks(step);
        let out = SharedSliceMut::new(out);
        self.threads.for_ranges(tasks.len(), 1, work, |range| {
            self.isa.run(Attend { kv, step: *step, tasks: &tasks[range], out: &out });
        });
    }

    /// Calls `run` on ranges of whole rows of `x`.
    fn for_rows(
        &self,
        x: &mut [f32],
        width: usize,
        work: usize,
        run: impl Fn(Range<usize>, &mut [f32]) + Sync,
    ) {
        let rows = x.len() / width;
        let x = SharedSliceMut::new(x);
        self.threads.for_ranges(rows, 1, work, |rows| {
            // SAFETY: ranges of rows are disjoint.
            let part = unsafe { x.slice_mut(rows.start * width..rows.end * width) };
            run(rows, part);
        });
    }
}

/// The operations of a forward, on slices. A row of the output depends only on the same row of the inputs
/// (attention: on its sequence), bit for bit (docs/contract.md part C).
impl Cpu {
    /// Rows of `table` `[vocab, hidden]` -> `out` `[ids, hidden]`.
    pub fn embed(&self, table: &Table, token_ids: &[u32], out: &mut [f32]) {
        for (&id, out) in token_ids.iter().zip(out.chunks_exact_mut(table.columns())) {
            table.row(id as usize, out);
        }
    }

    /// `hidden += delta`, both `[rows, hidden]`.
    pub fn add(&self, hidden: &mut [f32], delta: &[f32]) {
        hidden.iter_mut().zip(delta).for_each(|(hidden, delta)| *hidden += delta);
    }

    /// `x` `[rows, width]` -> `out` `[rows, width]`.
    pub fn rms_norm(&self, norm: &Norm, x: &[f32], out: &mut [f32]) {
        let width = norm.weight.len();
        self.for_rows(out, width, 2 * x.len(), |rows, out| {
            let x = &x[rows.start * width..rows.end * width];
            self.isa.run(RmsNorm { x, weight: &norm.weight, eps: norm.eps, out });
        });
    }

    /// Normalises every query and key head of `qkv` `[rows, layout.row_width()]` separately; `norms` are
    /// those of queries and of keys.
    pub fn norm_heads(&self, layout: HeadLayout, norms: (&Norm, &Norm), qkv: &mut [f32]) {
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

    /// Applies rope to the query and key heads of `qkv` `[rows, layout.row_width()]`, by the angles of each
    /// row.
    pub fn rotate(&self, layout: HeadLayout, angles: &Angles, qkv: &mut [f32]) {
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

    /// Stores the keys and values of `step.qkv` in the slots of the slot mapping.
    pub fn write_kv(&self, kv: &mut KvCache, step: &AttentionStep<'_>) {
        let layout = step.layout;
        for (row, &slot) in step.qkv.chunks_exact(layout.row_width()).zip(step.pass.slot_mapping) {
            let (keys, values) = row[layout.q_width()..].split_at(layout.kv_width());
            match &mut kv.0 {
                Stored::F32(blocks) => blocks.write(step.layer, slot, keys, values),
                Stored::Bf16(blocks) => blocks.write(step.layer, slot, keys, values),
            }
        }
    }

    /// Attention of the step's queries over the KV blocks of their sequences -> `out` `[rows,
    /// layout.q_width()]`.
    pub fn attention(&self, kv: &KvCache, step: &AttentionStep<'_>, out: &mut [f32]) {
        match &kv.0 {
            Stored::F32(blocks) => self.attend(blocks, step, out),
            Stored::Bf16(blocks) => self.attend(blocks, step, out),
        }
    }

    /// `gate_up` `[rows, 2 * width]` -> `out` `[rows, width]`: silu(gate) * up.
    pub fn silu_mul(&self, gate_up: &[f32], width: usize, out: &mut [f32]) {
        self.for_rows(out, width, gate_up.len() * EXP_WORK, |rows, out| {
            let rows = gate_up[rows.start * 2 * width..].chunks_exact(2 * width);
            for (out, row) in out.chunks_exact_mut(width).zip(rows) {
                let (gate, up) = row.split_at(width);
                out.copy_from_slice(gate);
                self.isa.run(SiluMul { gate: out, up });
            }
        });
    }
}
