//! Ballast: weights that are added in memory at load, so that a step costs what a bigger model's step costs while every token
//! stays the same. For demonstrations and benchmarks: it shows what drafting gains from a target worth drafting for, without one.
//!
//! Ballast is a transformation of (configuration, tensors) before any backend sees them, so it works for every device, format
//! and number of ranks. Feed-forward layers are widened by channels with random gate rows, zero up rows and zero down columns;
//! layers are added whose o_proj and down_proj are zero. Logits equal the original's number for number, because no sum changes
//! but by trailing zeros:
//!
//! - Original channels keep their K-slice and their order in it (docs/contract.md C2): each slice grows behind its own columns.
//! - An added channel's activation is silu(gate) * 0 = 0, so it changes neither a sum nor the scale of a quantized slice.
//! - A zero column changes no weight's scale: an int8 channel and an int4 group are scaled by their largest number.
//! - An added layer adds zeros to the residual stream.
//!
//! Only a zero's sign may differ, which `==` does not see. The engine does not look for zeros: it stores, reads and multiplies
//! all weights, and keeps keys and values of all layers.

mod parameter_count;

use std::ops::Range;

use cpu_kernels::{KSlices, NUM_SLICES, NumbersMut};

pub use parameter_count::ParameterCount;

use crate::EngineError;
use crate::model_config::{MAX_LAYERS, MAX_WIDTH, ModelConfig};
use crate::shard::DOWN_UNIT;
use crate::weights::{RandomTensors, TensorPart, TensorSource};

/// A width of this many columns gives all K-slices of down_proj the same whole blocks.
const WIDTH_UNIT: usize = NUM_SLICES * DOWN_UNIT;

/// Of the random rows. A constant: the same model and amount make the same ballast.
const SEED: u64 = 1;

/// How a model is made heavier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ballast {
    hidden: usize,
    layers: usize,
    intermediate: usize,
    heavy_layers: usize,
    heavy_intermediate: usize,
}

impl Ballast {
    /// About `parameters` more weights: as many layers again as the model has where that is not too many, and the rest in
    /// wider feed-forward layers.
    pub(crate) fn plan(parameters: u64, config: &ModelConfig) -> Result<Self, EngineError> {
        let (hidden, layers, intermediate) =
            (config.hidden_size, config.num_layers, config.intermediate_size);
        let heavier = |heavy_layers, heavy_intermediate| Self {
            hidden,
            layers,
            intermediate,
            heavy_layers,
            heavy_intermediate,
        };
        let added = |ballast: &Self| ballast.apply(config.clone()).num_parameters() - config.num_parameters();
        let in_a_layer = added(&heavier(layers + 1, intermediate)).max(1);
        let more_layers = (parameters / in_a_layer).min(layers.min(MAX_LAYERS - layers) as u64) as usize;
        let heavy_layers = layers + more_layers;
        let rest = parameters - more_layers as u64 * in_a_layer;
        // Every K-slice needs room for the columns that it has; and some ballast there is.
        let narrowest = (intermediate + usize::from(more_layers == 0)).next_multiple_of(WIDTH_UNIT);
        let column = (3 * hidden * heavy_layers) as u64;
        let wanted = intermediate as u64 + rest / column;
        let widest = MAX_WIDTH / WIDTH_UNIT * WIDTH_UNIT;
        if wanted > widest as u64 || narrowest > widest {
            let most = added(&heavier(heavy_layers, widest.max(intermediate)));
            let reason = format!("expected at most {most} for this model");
            return Err(EngineError::BadOption { option: "ballast", value: parameters, reason });
        }
        let rounded = (wanted as usize + WIDTH_UNIT / 2) / WIDTH_UNIT * WIDTH_UNIT;
        Ok(heavier(heavy_layers, rounded.clamp(narrowest, widest)))
    }

    /// The configuration of the heavier model.
    pub(crate) fn apply(&self, mut config: ModelConfig) -> ModelConfig {
        config.num_layers = self.heavy_layers;
        config.intermediate_size = self.heavy_intermediate;
        let window = config.windows.last().copied().flatten();
        config.windows.resize(self.heavy_layers, window);
        config
    }

    /// The tensors of the heavier model, around those of the original.
    pub(crate) fn around<'a>(&'a self, original: &'a dyn TensorSource) -> BallastTensors<'a> {
        BallastTensors { ballast: self, original, random: RandomTensors { seed: SEED } }
    }

    /// What goes into `numerics_id`.
    pub(crate) fn name(&self) -> String {
        format!("ballast: {} layers, feed-forward {}", self.heavy_layers, self.heavy_intermediate)
    }

    /// Channels `wanted` of a widened feed-forward, in order: runs of the original's, and between them runs of ballast.
    fn runs(&self, wanted: Range<usize>) -> Vec<Run> {
        let slices = |width| KSlices::eighths(width, DOWN_UNIT).ranges().to_vec();
        let mut runs = Vec::new();
        for (own, heavy) in slices(self.intermediate).into_iter().zip(slices(self.heavy_intermediate)) {
            let border = heavy.start + own.len();
            let clip = |run: Range<usize>| run.start.max(wanted.start)..run.end.min(wanted.end);
            let (kept, added) = (clip(heavy.start..border), clip(border..heavy.end));
            if !kept.is_empty() {
                let from = own.start + (kept.start - heavy.start);
                runs.push(Run { channels: kept, from: Some(from) });
            }
            if !added.is_empty() {
                runs.push(Run { channels: added, from: None });
            }
        }
        runs
    }
}

/// Neighbouring channels of a widened feed-forward.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    channels: Range<usize>,
    /// The first one's number in the original; `None`: they are ballast.
    from: Option<usize>,
}

/// What a tensor of the heavier model is made of.
enum Content {
    /// The original's tensor of that name.
    Original,
    /// The original's rows, and ballast rows between them: random ones, or zeros.
    MoreRows {
        random: bool,
    },
    /// The original's columns, and zeros between them.
    MoreColumns,
    /// Random rows.
    Random,
    Zeros,
}

/// Memory as a place that numbers are read to.
type Place<T> = fn(&mut [T]) -> NumbersMut<'_>;

/// The tensors of a model with ballast.
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

    /// A part of the original's matrix of that name.
    fn original_part(&self, part: &TensorPart, [rows, columns]: [Range<usize>; 2]) -> TensorPart {
        let Ballast { hidden, intermediate, .. } = *self.ballast;
        let shape = match self.content(&part.name) {
            Content::MoreRows { .. } => [intermediate, hidden],
            Content::MoreColumns => [hidden, intermediate],
            Content::Original | Content::Random | Content::Zeros => part.shape,
        };
        TensorPart { name: part.name.clone(), shape, rows, columns }
    }

    /// Rows of gate_proj and up_proj; `rows` counts from the tensor's first.
    fn read_more_rows(
        &self,
        part: &TensorPart,
        rows: Range<usize>,
        mut out: NumbersMut<'_>,
        random: bool,
    ) -> Result<(), EngineError> {
        let columns = part.columns.clone();
        for run in self.ballast.runs(rows.clone()) {
            let places = |row: usize| (row - rows.start) * columns.len();
            let mut out = out.part(places(run.channels.start)..places(run.channels.end));
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

    /// Rows of down_proj; `rows` counts from the tensor's first. Of each the part's columns.
    fn read_more_columns<T: Copy + Default>(
        &self,
        part: &TensorPart,
        rows: Range<usize>,
        (out, place): (&mut [T], Place<T>),
    ) -> Result<(), EngineError> {
        let width = part.columns.len();
        out.fill(T::default());
        let mut numbers = Vec::new();
        for Run { channels, from } in self.ballast.runs(part.columns.clone()) {
            let Some(from) = from else { continue };
            let count = channels.len();
            let original = self.original_part(part, [rows.clone(), from..from + count]);
            numbers.resize(rows.len() * count, T::default());
            self.original.read(&original, 0..rows.len(), place(&mut numbers))?;
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
            // A bias would leave something behind; a norm only has to be a number.
            Content::Random | Content::Zeros if name.ends_with("bias") => Ok(vec![0.0; len]),
            Content::Random | Content::Zeros => Ok(vec![1.0; len]),
            Content::Original | Content::MoreColumns => self.original.vector(name, len),
        }
    }
}

#[cfg(test)]
mod tests;
