//! Time of a forward: from a roofline over a data sheet, or from step times that a worker profiled.
//! [`super::round`] uses either.
//!
//! The roofline: a forward takes the longer of memory reads (weights once, the KV cache of every sequence)
//! and arithmetic (every row), plus the all-reduce over the ranks, plus a fixed launch cost. The reached
//! shares of the data sheet's peaks are assumptions with flags; they are printed with every plan.

use engine::ModelShape;
use scheduling::cost::{self, BatchTimePoint, PROFILED_ROWS, StepTimePoint, StepTimes};
use scheduling::profile::{PROFILED_BATCH_ROWS, PROFILED_BATCHES, PROFILED_CONTEXTS};

use super::gpu::{Gpu, GpuSet};
use super::weights::{Format, KvFormat, WeightMemory, kv_bytes_per_token};

/// Shape of one forward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForwardBatch {
    /// Number of sequences.
    pub sequences: f64,
    /// Rows per sequence.
    pub rows_each: f64,
    /// Tokens held per sequence.
    pub context: f64,
}

/// Time of a model's forwards on some hardware.
pub trait StepCost {
    /// Time of a forward, microseconds.
    fn micros(&self, forward: ForwardBatch) -> f64;
}

/// The step times that a GPU worker with this cost measures at its start, if it has the time and the KV.
pub fn as_profiled(cost: &dyn StepCost) -> StepTimes {
    let micros = |sequences: u32, rows_each: u32, context: u32| {
        let (sequences, rows_each, context) = (sequences.into(), rows_each.into(), context.into());
        cost.micros(ForwardBatch { sequences, rows_each, context }) as u64
    };
    let of_one = |context: u32| {
        PROFILED_ROWS.map(|rows| StepTimePoint {
            rows,
            context: context.into(),
            micros: micros(1, rows, context),
        })
    };
    let of_batch = |(sequences, context): (u32, u32)| {
        PROFILED_BATCH_ROWS.map(|rows_each| BatchTimePoint {
            sequences,
            rows: sequences * rows_each,
            context: context.into(),
            micros: micros(sequences, rows_each, context),
        })
    };
    let (points, batches) = (PROFILED_CONTEXTS.map(of_one), PROFILED_BATCHES.map(of_batch));
    StepTimes::with_batches(points.as_flattened(), batches.as_flattened())
}

/// Profiled times depend on rows and on the KV cache of the sequences.
impl StepCost for StepTimes {
    fn micros(&self, forward: ForwardBatch) -> f64 {
        let ForwardBatch { sequences, rows_each, context } = forward;
        StepTimes::micros(self, cost::ForwardShape { rows: sequences * rows_each, sequences, context })
    }
}

/// Assumptions that no data sheet states.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args, serde::Serialize)]
#[command(next_help_heading = "Assumptions, each to be replaced by a measurement")]
pub struct Assumptions {
    /// Share of the memory bandwidth reached in decoding
    #[arg(long, value_name = "SHARE", default_value_t = 0.75)]
    pub bandwidth_share: f64,

    /// Share of the dense compute peak reached
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    pub compute_share: f64,

    /// Share of the memory available for weights and KV
    // The rest is for the runtime, activations and fragmentation.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    pub memory_share: f64,

    /// Fixed cost of a forward, microseconds
    // Its launch, and the scheduler between two.
    #[arg(long, value_name = "US", default_value_t = 300.0)]
    pub step_overhead_us: f64,

    /// Fixed cost of one all-reduce over a target's GPUs, microseconds; there are two per layer
    #[arg(long, value_name = "US", default_value_t = 12.0)]
    pub all_reduce_us: f64,

    /// Round-trip time from router to worker, microseconds
    #[arg(long, value_name = "US", default_value_t = 300.0)]
    pub wire_us: f64,

    /// Router time per round for each sequence beyond the first, microseconds (`make measure-router`)
    #[arg(long, value_name = "US", default_value_t = 20.0)]
    pub router_us: f64,

    /// Maximum rows per forward of a target, as set by --max-batch-rows of its workers
    #[arg(long = "max-batch-rows", value_name = "ROWS", default_value_t = 512)]
    pub rows_max: u32,
}

/// One model, split over some GPUs.
#[derive(Debug, Clone)]
pub struct Roofline {
    gpu: Gpu,
    ranks: u32,
    format: Format,
    assumed: Assumptions,
    shape: ModelShape,
    read_bytes: f64,
    kv_bytes_per_token: f64,
}

/// Parts of a forward's time, microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForwardParts {
    /// Reading weights.
    pub weights: f64,
    /// Reading keys and values.
    pub kv: f64,
    /// Arithmetic.
    pub compute: f64,
    /// All-reduce over the ranks.
    pub all_reduce: f64,
    /// Fixed cost.
    pub overhead: f64,
}

impl ForwardParts {
    /// Total time. Reading and arithmetic overlap.
    pub fn total(&self) -> f64 {
        (self.weights + self.kv).max(self.compute) + self.all_reduce + self.overhead
    }
}

impl Roofline {
    /// Creates the roofline of `shape` split over all of `gpus`.
    pub fn new(
        shape: &ModelShape,
        (format, kv): (Format, KvFormat),
        gpus: GpuSet,
        assumed: Assumptions,
    ) -> Self {
        Self {
            gpu: gpus.gpu,
            ranks: gpus.count,
            format,
            assumed,
            read_bytes: WeightMemory::of(shape, format).read_gb * 1e9,
            kv_bytes_per_token: kv_bytes_per_token(shape, kv, gpus.count),
            shape: shape.clone(),
        }
    }

    /// Time of `forward`, by part.
    pub fn parts(&self, forward: ForwardBatch) -> ForwardParts {
        let rows = forward.sequences * forward.rows_each;
        let ranks = f64::from(self.ranks);
        let bytes_per_us = ranks * self.gpu.bandwidth_gb_s * 1e3 * self.assumed.bandwidth_share;
        let kv_bytes = forward.sequences * forward.context * self.kv_bytes_per_token;
        let tera = match self.format {
            // FP8 weights are multiplied as bf16.
            Format::F32 | Format::Bf16 | Format::Fp8 => self.gpu.bf16_tflops,
            Format::Int8 | Format::Int4 => self.gpu.int8_tops,
        };
        // Keys and values are floats in every weight format.
        let attention = 4 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim;
        let share = ranks * self.assumed.compute_share * 1e6;
        let compute = rows * 2.0 * self.shape.multiplied() as f64 / (tera * share)
            + rows * forward.context * attention as f64 / (self.gpu.bf16_tflops * share);
        ForwardParts {
            weights: self.read_bytes / bytes_per_us,
            kv: kv_bytes / bytes_per_us,
            compute,
            all_reduce: self.all_reduce(rows),
            overhead: self.assumed.step_overhead_us,
        }
    }

    /// Two all-reduces per layer, in bf16: each rank sends and receives (n - 1) / n of the data twice.
    fn all_reduce(&self, rows: f64) -> f64 {
        if self.ranks == 1 {
            return 0.0;
        }
        let ranks = f64::from(self.ranks);
        let bytes = rows * self.shape.hidden_size as f64 * 2.0;
        let travel =
            2.0 * (ranks - 1.0) / ranks * bytes / (self.gpu.link_gb_s * 1e3 * self.assumed.bandwidth_share);
        2.0 * self.shape.num_layers as f64 * (self.assumed.all_reduce_us + travel)
    }
}

impl StepCost for Roofline {
    fn micros(&self, forward: ForwardBatch) -> f64 {
        self.parts(forward).total()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An 8B model on one H100: weights and KV are read while rows are computed, 295 of them in the time of
    /// the weights.
    struct EightB;

    impl StepCost for EightB {
        fn micros(&self, forward: ForwardBatch) -> f64 {
            let ForwardBatch { sequences, rows_each, context } = forward;
            let read = 8_320.0 + 0.068 * sequences * context;
            read.max(sequences * rows_each * (28.2 + 0.001 * context)) + 20.0
        }
    }

    /// In the hundreds of rows of one sequence the KV takes no time, because the rows take longer.
    #[test]
    fn a_profiled_worker_knows_what_long_contexts_of_many_sequences_cost() {
        let known = as_profiled(&EightB);
        for (sequences, rows_each, context) in
            [(1.0, 1.0, 8_192.0), (8.0, 5.0, 4_000.0), (32.0, 1.0, 8_192.0), (64.0, 5.0, 4_000.0)]
        {
            let forward = ForwardBatch { sequences, rows_each, context };
            let ratio = StepCost::micros(&known, forward) / EightB.micros(forward);
            assert!((ratio - 1.0).abs() < 0.1, "{sequences} x {rows_each} at {context}: {ratio}");
        }
    }
}
