//! What a forward takes: by a roofline over a data sheet, or by step times that a worker profiled. [`super::round`] builds on either.
//!
//! The roofline: a forward takes as long as the slower of reading (weights once, the KV of every sequence) and multiplying (every
//! row), then the ranks' sums travel, then the fixed cost of launching it. The shares of the data sheet that a real engine gets are
//! assumptions with flags of their own; they are printed with every plan.

use engine::ModelShape;
use scheduling::cost::{self, PROFILED_ROWS, StepTimePoint, StepTimes};
use scheduling::profile::PROFILED_CONTEXTS;

use super::gpu::{Gpu, GpuSet};
use super::weights::{Format, KvFormat, Weights, kv_bytes_per_token};

/// Rows of one forward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forward {
    /// Sequences in it.
    pub sequences: f64,
    /// Rows of each.
    pub rows_each: f64,
    /// Tokens that each holds.
    pub context: f64,
}

/// What a model's forward takes somewhere.
pub trait StepCost {
    /// Microseconds.
    fn micros(&self, forward: Forward) -> f64;
}

/// What a worker with such steps measures of itself when it starts, and knows from then on.
pub fn as_profiled(cost: &dyn StepCost) -> StepTimes {
    let points = PROFILED_CONTEXTS.iter().flat_map(|&context| {
        PROFILED_ROWS.iter().map(move |&rows| StepTimePoint {
            rows,
            kv_tokens: context.into(),
            micros: cost.micros(Forward {
                sequences: 1.0,
                rows_each: f64::from(rows),
                context: context.into(),
            }) as u64,
        })
    });
    StepTimes::new(&points.collect::<Vec<_>>())
}

/// Profiled times tell rows from the KV of their sequences.
impl StepCost for StepTimes {
    fn micros(&self, forward: Forward) -> f64 {
        let Forward { sequences, rows_each, context } = forward;
        StepTimes::micros(self, cost::Forward { rows: sequences * rows_each, sequences, context })
    }
}

/// The shares of a data sheet's figures that are reached, and what it does not list.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Assumptions {
    /// Of the memory bandwidth.
    pub bandwidth_share: f64,
    /// Of the arithmetic.
    pub compute_share: f64,
    /// Of the memory: the rest is the runtime's, activations', fragments'.
    pub memory_share: f64,
    /// Launching a forward, and the scheduler between two, microseconds.
    pub step_overhead_us: f64,
    /// One sum over all ranks, however small, microseconds.
    pub all_reduce_us: f64,
    /// Router to worker and back, microseconds.
    pub wire_us: f64,
    /// What the router takes of a round for each further sequence in it, microseconds.
    pub router_us: f64,
    /// Rows of one forward, at most.
    pub rows_max: u32,
}

/// One model on some GPUs that split it.
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

/// What a forward's time consists of, microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Parts {
    /// Reading weights.
    pub weights: f64,
    /// Reading keys and values.
    pub kv: f64,
    /// Arithmetic.
    pub compute: f64,
    /// Sums over the ranks.
    pub all_reduce: f64,
    /// The fixed cost.
    pub overhead: f64,
}

impl Parts {
    /// Reading and arithmetic go on at once.
    pub fn total(&self) -> f64 {
        (self.weights + self.kv).max(self.compute) + self.all_reduce + self.overhead
    }
}

impl Roofline {
    /// `shape` split over all of `gpus`.
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
            read_bytes: Weights::of(shape, format).read_gb * 1e9,
            kv_bytes_per_token: kv_bytes_per_token(shape, kv, gpus.count),
            shape: shape.clone(),
        }
    }

    /// What `forward` takes, by part.
    pub fn parts(&self, forward: Forward) -> Parts {
        let rows = forward.sequences * forward.rows_each;
        let ranks = f64::from(self.ranks);
        let bytes_per_us = ranks * self.gpu.bandwidth_gb_s * 1e3 * self.assumed.bandwidth_share;
        let kv_bytes = forward.sequences * forward.context * self.kv_bytes_per_token;
        let tera = match self.format {
            Format::F32 | Format::Bf16 => self.gpu.bf16_tflops,
            Format::Int8 | Format::Int4 => self.gpu.int8_tops,
        };
        // Keys and values are floats whatever the weights are.
        let attention = 4 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim;
        let share = ranks * self.assumed.compute_share * 1e6;
        let compute = rows * 2.0 * self.shape.multiplied() as f64 / (tera * share)
            + rows * forward.context * attention as f64 / (self.gpu.bf16_tflops * share);
        Parts {
            weights: self.read_bytes / bytes_per_us,
            kv: kv_bytes / bytes_per_us,
            compute,
            all_reduce: self.all_reduce(rows),
            overhead: self.assumed.step_overhead_us,
        }
    }

    /// Two sums a layer, bf16: each rank sends and receives (n - 1) / n of them twice.
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
    fn micros(&self, forward: Forward) -> f64 {
        self.parts(forward).total()
    }
}
