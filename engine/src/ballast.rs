//! Ballast: weights that are added in memory at load, so that a step costs as much as a bigger model's step
//! while every token stays the same. For demonstrations and benchmarks: it shows what speculative decoding
//! gains with a large target, without one.
//!
//! Ballast transforms (configuration, tensors) before any backend sees them, so it works for every device,
//! format and number of ranks. Feed-forward layers are widened by channels with random gate rows, zero up
//! rows and zero down columns; layers are added whose o_proj and down_proj are zero. Logits equal the
//! original's exactly, because sums change only by added zeros:
//!
//! - Original channels keep their K-slice and their order in it (docs/contract.md C2): each slice grows after
//!   its original columns.
//! - The activation of an added channel is silu(gate) * 0 = 0, so it changes neither a sum nor the scale of a
//!   quantized slice.
//! - A zero column changes no weight's scale: an int8 channel and an int4 group are scaled by their largest
//!   number.
//! - An added layer adds zeros to the residual stream.
//!
//! Only the sign of a zero may differ, which `==` ignores. The engine does not skip zeros: it stores, reads
//! and multiplies all weights, and keeps keys and values of all layers.

mod fp8;
mod parameter_count;

use std::ops::Range;

use cpu_kernels::{KSlices, NUM_SLICES, NumbersMut};

pub use parameter_count::ParameterCount;

use crate::EngineError;
use crate::model_config::{MAX_LAYERS, MAX_WIDTH, ModelConfig};
use crate::shard::DOWN_UNIT;
use crate::weights::{Formats, Fp8Rows, Fp8Scales, LinearFormat, RandomTensors, TensorPart, TensorSource};

/// Widths are multiples of this: all K-slices of down_proj then have the same number of whole blocks.
const WIDTH_UNIT: usize = NUM_SLICES * DOWN_UNIT;

/// Seed of the random rows. Constant, so that the same model and amount give the same ballast.
const SEED: u64 = 1;

/// Sizes of a model with ballast, and of the original.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ballast {
    hidden: usize,
    layers: usize,
    intermediate: usize,
    enlarged_layers: usize,
    enlarged_intermediate: usize,
}

impl Ballast {
    /// Plans about `parameters` more weights: added layers first, at most as many as the model has, and the
    /// rest as wider feed-forward layers.
    pub(crate) fn plan(parameters: u64, config: &ModelConfig) -> Result<Self, EngineError> {
        let (hidden, layers, intermediate) =
            (config.hidden_size, config.num_layers, config.intermediate_size);
        let with_sizes = |enlarged_layers, enlarged_intermediate| Self {
            hidden,
            layers,
            intermediate,
            enlarged_layers,
            enlarged_intermediate,
        };
        let added = |ballast: &Self| ballast.apply(config.clone()).num_parameters() - config.num_parameters();
        let per_layer = added(&with_sizes(layers + 1, intermediate)).max(1);
        let more_layers = (parameters / per_layer).min(layers.min(MAX_LAYERS - layers) as u64) as usize;
        let enlarged_layers = layers + more_layers;
        let rest = parameters - more_layers as u64 * per_layer;
        // Every K-slice must hold its original columns, and at least some ballast must be added.
        let min_width = (intermediate + usize::from(more_layers == 0)).next_multiple_of(WIDTH_UNIT);
        let column = (3 * hidden * enlarged_layers) as u64;
        let wanted = intermediate as u64 + rest / column;
        let max_width = MAX_WIDTH / WIDTH_UNIT * WIDTH_UNIT;
        if wanted > max_width as u64 || min_width > max_width {
            let max_parameters = added(&with_sizes(enlarged_layers, max_width.max(intermediate)));
            let reason = format!("expected at most {max_parameters} for this model");
            return Err(EngineError::BadOption { option: "ballast", value: parameters.to_string(), reason });
        }
        let rounded = (wanted as usize + WIDTH_UNIT / 2) / WIDTH_UNIT * WIDTH_UNIT;
        Ok(with_sizes(enlarged_layers, rounded.clamp(min_width, max_width)))
    }

    /// Refuses formats whose sums ballast would change: blocks of columns with a scale would have zeros between
    /// their columns.
    pub(crate) fn check_formats(parameters: u64, formats: Formats) -> Result<(), EngineError> {
        if formats.linear != LinearFormat::Fp8(Fp8Scales::Blocks) {
            return Ok(());
        }
        let reason =
            "the checkpoint has FP8 scales by block of 128 x 128, use `weights` bf16 with ballast".to_owned();
        Err(EngineError::BadOption { option: "ballast", value: parameters.to_string(), reason })
    }

    /// The configuration of the enlarged model.
    pub(crate) fn apply(&self, mut config: ModelConfig) -> ModelConfig {
        config.num_layers = self.enlarged_layers;
        config.intermediate_size = self.enlarged_intermediate;
        let window = config.windows.last().copied().flatten();
        config.windows.resize(self.enlarged_layers, window);
        config
    }

    /// The tensors of the enlarged model, built on those of the original.
    pub(crate) fn wrap<'a>(&'a self, original: &'a dyn TensorSource) -> BallastTensors<'a> {
        BallastTensors { ballast: self, original, random: RandomTensors { seed: SEED } }
    }

    /// Text that is hashed into `numerics_id`.
    pub(crate) fn name(&self) -> String {
        format!("ballast: {} layers, feed-forward {}", self.enlarged_layers, self.enlarged_intermediate)
    }

    /// Channels `wanted` of a widened feed-forward layer in order: alternating runs of original and ballast
    /// channels.
    fn runs(&self, wanted: Range<usize>) -> Vec<Run> {
        let slices = |width| KSlices::eighths(width, DOWN_UNIT).ranges().to_vec();
        let mut runs = Vec::new();
        for (own, enlarged) in slices(self.intermediate).into_iter().zip(slices(self.enlarged_intermediate)) {
            let boundary = enlarged.start + own.len();
            let clip = |run: Range<usize>| run.start.max(wanted.start)..run.end.min(wanted.end);
            let (kept, added) = (clip(enlarged.start..boundary), clip(boundary..enlarged.end));
            if !kept.is_empty() {
                let from = own.start + (kept.start - enlarged.start);
                runs.push(Run { channels: kept, from: Some(from) });
            }
            if !added.is_empty() {
                runs.push(Run { channels: added, from: None });
            }
        }
        runs
    }
}

/// Consecutive channels of a widened feed-forward layer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    channels: Range<usize>,
    /// Index of the first one in the original; `None` for ballast.
    from: Option<usize>,
}

/// Content of a tensor of the enlarged model.
enum Content {
    /// The original tensor of that name.
    Original,
    /// The original's rows, with ballast rows between them: random numbers or zeros.
    MoreRows {
        random: bool,
    },
    /// The original's columns, with zeros between them.
    MoreColumns,
    /// Random rows.
    Random,
    Zeros,
}

/// Wraps a slice as the destination of a read.
type AsNumbersMut<T> = fn(&mut [T]) -> NumbersMut<'_>;

/// Tensors of a model with ballast.
pub(crate) struct BallastTensors<'a> {
    ballast: &'a Ballast,
    original: &'a dyn TensorSource,
    random: RandomTensors,
}

impl BallastTensors<'_> {
    fn content(&self, name: &str) -> Content {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let Some((Ok(layer), module)) = layer.map(|(layer, module)| (layer.parse::<usize>(), module)) else {
            return Content::Original;
        };
        let is_added = layer >= self.ballast.layers;
        match module {
            "self_attn.o_proj.weight" | "mlp.down_proj.weight" if is_added => Content::Zeros,
            _ if is_added => Content::Random,
            "mlp.gate_proj.weight" => Content::MoreRows { random: true },
            "mlp.up_proj.weight" | "mlp.gate_proj.bias" | "mlp.up_proj.bias" => {
                Content::MoreRows { random: false }
            }
            "mlp.down_proj.weight" => Content::MoreColumns,
            _ => Content::Original,
        }
    }

    /// The given part of the original's matrix of that name.
    fn original_part(&self, part: &TensorPart, [rows, columns]: [Range<usize>; 2]) -> TensorPart {
        let Ballast { hidden, intermediate, .. } = *self.ballast;
        let shape = match self.content(&part.name) {
            Content::MoreRows { .. } => [intermediate, hidden],
            Content::MoreColumns => [hidden, intermediate],
            Content::Original | Content::Random | Content::Zeros => part.shape,
        };
        TensorPart { name: part.name.clone(), shape, rows, columns }
    }

    /// Reads rows of gate_proj and up_proj; `rows` counts from the tensor's first row.
    fn read_more_rows(
        &self,
        part: &TensorPart,
        rows: Range<usize>,
        mut out: NumbersMut<'_>,
        random: bool,
    ) -> Result<(), EngineError> {
        let columns = part.columns.clone();
        for run in self.ballast.runs(rows.clone()) {
            let offsets = |row: usize| (row - rows.start) * columns.len();
            let mut out = out.part(offsets(run.channels.start)..offsets(run.channels.end));
            match run.from {
                Some(from) => {
                    let count = run.channels.len();
                    let original = self.original_part(part, [from..from + count, columns.clone()]);
                    self.original.read(&original, 0..count, out)?;
                }
                None if random => {
                    let all = TensorPart { rows: 0..part.shape[0], ..part.clone() };
                    self.random.read(&all, run.channels, out)?;
                }
                None => out.fill_with_zeros(),
            }
        }
        Ok(())
    }

    /// Reads the part's columns of down_proj rows; `rows` counts from the tensor's first row.
    fn read_more_columns<T: Copy + Default>(
        &self,
        part: &TensorPart,
        rows: Range<usize>,
        (out, as_numbers_mut): (&mut [T], AsNumbersMut<T>),
    ) -> Result<(), EngineError> {
        let width = part.columns.len();
        out.fill(T::default());
        let mut numbers = Vec::new();
        for Run { channels, from } in self.ballast.runs(part.columns.clone()) {
            let Some(from) = from else { continue };
            let count = channels.len();
            let original = self.original_part(part, [rows.clone(), from..from + count]);
            numbers.resize(rows.len() * count, T::default());
            self.original.read(&original, 0..rows.len(), as_numbers_mut(&mut numbers))?;
            let at = channels.start - part.columns.start;
            for (out, row) in out.chunks_exact_mut(width).zip(numbers.chunks_exact(count)) {
                out[at..at + count].copy_from_slice(row);
            }
        }
        Ok(())
    }
}

impl TensorSource for BallastTensors<'_> {
    fn check(&self, part: &TensorPart) -> Result<(), EngineError> {
        match self.content(&part.name) {
            Content::Original => self.original.check(part),
            Content::MoreRows { .. } | Content::MoreColumns => {
                self.original.check(&self.original_part(part, [0..0, 0..0]))
            }
            Content::Random | Content::Zeros => Ok(()),
        }
    }

    fn read(&self, part: &TensorPart, rows: Range<usize>, out: NumbersMut<'_>) -> Result<(), EngineError> {
        let in_tensor = part.rows.start + rows.start..part.rows.start + rows.end;
        match (self.content(&part.name), out) {
            (Content::Original, out) => self.original.read(part, rows, out),
            (Content::MoreRows { random }, out) => self.read_more_rows(part, in_tensor, out, random),
            (Content::MoreColumns, NumbersMut::F32(out)) => {
                self.read_more_columns(part, in_tensor, (out, |numbers| NumbersMut::F32(numbers)))
            }
            (Content::MoreColumns, NumbersMut::Bf16(out)) => {
                self.read_more_columns(part, in_tensor, (out, |numbers| NumbersMut::Bf16(numbers)))
            }
            (Content::Random, out) => self.random.read(part, rows, out),
            (Content::Zeros, mut out) => {
                out.fill_with_zeros();
                Ok(())
            }
        }
    }

    fn read_fp8(
        &self,
        part: &TensorPart,
        rows: Range<usize>,
        mut out: Fp8Rows<'_>,
    ) -> Result<(), EngineError> {
        let in_tensor = part.rows.start + rows.start..part.rows.start + rows.end;
        match self.content(&part.name) {
            Content::Original => self.original.read_fp8(part, rows, out),
            Content::MoreRows { random } => self.read_more_fp8_rows(part, in_tensor, out, random),
            Content::MoreColumns => self.read_more_fp8_columns(part, in_tensor, out),
            Content::Random => self.random.read_fp8(part, rows, out),
            Content::Zeros => {
                out.fill_with_zeros();
                Ok(())
            }
        }
    }

    fn stores_fp8(&self, name: &str) -> bool {
        self.original.stores_fp8(name)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        match self.content(name) {
            Content::MoreRows { .. } => {
                let original = self.original.vector(name, self.ballast.intermediate)?;
                let mut numbers = vec![0.0; len];
                for Run { channels, from } in self.ballast.runs(0..len) {
                    let Some(from) = from else { continue };
                    let count = channels.len();
                    numbers[channels].copy_from_slice(&original[from..from + count]);
                }
                Ok(numbers)
            }
            // Biases are zero so that they add nothing; norm weights may be any number.
            Content::Random | Content::Zeros if name.ends_with("bias") => Ok(vec![0.0; len]),
            Content::Random | Content::Zeros => Ok(vec![1.0; len]),
            Content::Original | Content::MoreColumns => self.original.vector(name, len),
        }
    }
}

#[cfg(test)]
mod tests;
