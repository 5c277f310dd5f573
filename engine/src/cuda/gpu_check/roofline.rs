//! Steps of Llama 3 8B, bf16, relative to their roofline: contexts of 128, 8k and 32k; one row, and 8 and 32
//! sequences of five verify rows; a step with top-p; a prompt of 2,048 rows. A step passes if its median time
//! is at most its aim times the ideal of `cuda::roofline`, the model for docs/design/gpu.md.
//!
//! Contexts are extended in place: 460,000 tokens of prompts take most of the 93 s that the section took on an
//! H200 ([`Section::budget_seconds`](super::Section::budget_seconds) allows 100).

use std::time::Instant;

use cudarc::driver::sys;
use speculation::{SamplingParams, SequenceSpec, TokenId};

use super::decode::{LLAMA_8B, TINY, write_config};
use super::step_work::{H100, ModelSize, Rates, StepShape, rates_of};
use super::{CheckTarget, Report};
use crate::cuda::whole_model::options;
use crate::cuda::{CudaError, GpuOptions};
use crate::{DrawRequest, Engine, EngineError, SequenceRows, SlotId, WeightFormat};

/// Largest acceptable time as a multiple of the ideal, for verify and decode steps, and for a prompt.
const STEP_AIM: f64 = 1.3;
const PROMPT_AIM: f64 = 1.6;
/// Rows of a forward that extends a context.
const FILL_ROWS: usize = 2048;
/// Verify rows per sequence.
pub(super) const VERIFY_ROWS: usize = 5;
/// Layers of the model whose steps are profiled: every layer launches the same kernels.
const PROFILED_LAYERS: usize = 2;

/// Sizes of one run.
pub(super) struct Sizes {
    pub(super) contexts: [usize; 3],
    /// Sequences of the verify steps, ascending.
    pub(super) sequences: [usize; 2],
    pub(super) prompt_rows: usize,
    /// Maximum sequence length; attention's workspace grows with it.
    max_len: u32,
    /// Number of timed repetitions of a step.
    repetitions: usize,
}

const FULL: Sizes = Sizes {
    contexts: [128, 8192, 32_768],
    sequences: [8, 32],
    prompt_rows: 2048,
    max_len: 65_536,
    repetitions: 9,
};
const DRY: Sizes =
    Sizes { contexts: [20, 60, 130], sequences: [2, 3], prompt_rows: 70, max_len: 512, repetitions: 1 };

impl Sizes {
    pub(super) fn of(target: &CheckTarget) -> Self {
        if target.is_dry { DRY } else { FULL }
    }
}

/// One timed case.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) shape: StepShape,
    /// Number of drawn rows of each sequence: all of them, or the last.
    pub(super) drawn_of_each: usize,
    pub(super) top_p: f32,
    pub(super) aim: f64,
}

impl Case {
    /// A decode or verify step, which draws every row.
    pub(super) fn step(shape: StepShape, top_p: f32) -> Self {
        let StepShape { sequences, rows_of_each, context } = shape;
        let filter = if top_p < 1.0 { ", top-p" } else { "" };
        let name = format!("{sequences} x {rows_of_each} rows behind {context}{filter}");
        Self { name, shape, drawn_of_each: rows_of_each, top_p, aim: STEP_AIM }
    }

    fn prompt(rows_of_each: usize, context: usize) -> Self {
        let name = format!("prompt of {rows_of_each} rows behind {context}");
        let shape = StepShape { sequences: 1, rows_of_each, context };
        Self { name, shape, drawn_of_each: 1, top_p: 1.0, aim: PROMPT_AIM }
    }

    /// All cases with this context.
    fn of_context(sizes: &Sizes, context: usize) -> Vec<Self> {
        let verify =
            |sequences, top_p| Self::step(StepShape { sequences, rows_of_each: VERIFY_ROWS, context }, top_p);
        let [few, many] = sizes.sequences;
        vec![
            Self::step(StepShape { sequences: 1, rows_of_each: 1, context }, 1.0),
            verify(few, 1.0),
            verify(few, 0.9),
            verify(many, 1.0),
            Self::prompt(sizes.prompt_rows, context),
        ]
    }

    pub(super) fn drawn(&self) -> usize {
        self.shape.sequences * self.drawn_of_each
    }
}

/// All cases of a full run.
pub(super) fn full_cases() -> Vec<Case> {
    FULL.contexts.iter().flat_map(|&context| Case::of_context(&FULL, context)).collect()
}

/// See the module documentation.
pub(super) fn roofline(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let sizes = Sizes::of(target);
    let mut steps = Steps::new(target, &sizes, None)?;
    report.say(format!("shares of the data sheet's roofline on {}, bf16, random weights", steps.device));
    for context in sizes.contexts {
        steps.context(&sizes, context, report)?;
    }
    Ok(())
}

/// Runs each step of the shortest context once in a model of [`PROFILED_LAYERS`] layers, between
/// `cuProfilerStart` and `cuProfilerStop`. `ncu --profile-from-start off` then shows the time of every kernel
/// of a step.
pub(super) fn profile(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let sizes = Sizes::of(target);
    let mut steps = Steps::new(target, &sizes, Some(PROFILED_LAYERS))?;
    for case in Case::of_context(&sizes, sizes.contexts[0]) {
        steps.fill(case.shape)?;
        // The first call allocates memory.
        steps.run(&case)?;
        profiler(true)?;
        steps.run(&case)?;
        profiler(false)?;
        report.say(format!("ran {}", case.name));
    }
    Ok(())
}

/// Starts or stops the profiler that observes this process, if one does.
fn profiler(is_on: bool) -> Result<(), CudaError> {
    // SAFETY: the engine has initialised the driver; neither call has arguments.
    let said = unsafe { if is_on { sys::cuProfilerStart() } else { sys::cuProfilerStop() } };
    said.result()
        .map_err(|error| CudaError::Driver { action: "start or stop a profiler", reason: error.to_string() })
}

/// The engine whose steps are timed.
struct Steps {
    engine: Engine,
    model: ModelSize,
    /// Name of the device.
    device: String,
    /// Rates of the device, if its data sheet is known.
    rates: Option<Rates>,
    repetitions: usize,
    /// Sequences that all cases share; their contexts only grow.
    slots: Vec<SlotId>,
}

impl Steps {
    /// A model with random weights; with `layers`, of that many layers.
    fn new(target: &CheckTarget, sizes: &Sizes, layers: Option<usize>) -> Result<Self, EngineError> {
        let device = target.open()?.properties()?.name;
        let text = if target.is_dry { TINY } else { LLAMA_8B };
        let mut config: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
        if let Some(layers) = layers {
            config["num_hidden_layers"] = layers.into();
        }
        // Random weights do not depend on positions, so a longer limit is valid.
        config["max_position_embeddings"] = sizes.max_len.into();
        let file = write_config(&config.to_string(), "roofline")?;
        // A profiler needs memory of its own.
        let share = if layers.is_some() && !target.is_dry { 0.3 } else { 0.9 };
        let gpus = GpuOptions { memory_utilization: Some(share), ..target.gpus() };
        let engine = Engine::random(&options(file.clone(), WeightFormat::Bf16).on_gpus(gpus), 1)?;
        std::fs::remove_file(&file).map_err(|source| EngineError::Io { path: file, source })?;
        let (model, rates) = (ModelSize::of(&config), rates_of(&device));
        Ok(Self { engine, model, device, rates, repetitions: sizes.repetitions, slots: Vec::new() })
    }

    /// Whether the KV cache has room for this many sequences of `context` tokens and the longest rows of a
    /// case.
    fn fits(&self, sequences: usize, context: usize, prompt_rows: usize) -> bool {
        let info = self.engine.info();
        let blocks = (context + prompt_rows).div_ceil(info.kv_block_size as usize) * sequences;
        blocks as u64 <= info.kv_blocks
    }

    /// Runs every case with this context that fits. Sequences that do not fit at this length are closed
    /// first.
    fn context(&mut self, sizes: &Sizes, context: usize, report: &mut Report<'_>) -> Result<(), EngineError> {
        while !self.slots.is_empty() && !self.fits(self.slots.len(), context, sizes.prompt_rows) {
            self.slots.pop().into_iter().for_each(|slot| self.engine.close(slot));
        }
        for case in Case::of_context(sizes, context) {
            if self.fits(case.shape.sequences, context, sizes.prompt_rows) {
                self.fill(case.shape)?;
                self.time_case(&case, report)?;
            } else {
                report.skipped(&case.name, "kv has no room for it");
            }
        }
        Ok(())
    }

    /// Opens sequences and extends them to a case's context.
    fn fill(&mut self, shape: StepShape) -> Result<(), EngineError> {
        for index in 0..shape.sequences {
            if index == self.slots.len() {
                self.slots.push(self.engine.open());
            }
            self.extend(self.slots[index], shape.context)?;
        }
        Ok(())
    }

    fn extend(&mut self, slot: SlotId, context: usize) -> Result<(), EngineError> {
        let ids: Vec<TokenId> = (self.engine.len(slot)..context as u32).map(|i| i % 251).collect();
        for token_ids in ids.chunks(FILL_ROWS) {
            self.engine.forward(&[SequenceRows { slot, token_ids, num_logits: 0 }])?;
        }
        Ok(())
    }

    /// Seconds of one call. Removes the rows that it appended.
    fn run(&mut self, case: &Case) -> Result<f64, EngineError> {
        let slots = &self.slots[..case.shape.sequences];
        run_case(&mut self.engine, slots, case)
    }

    fn time_case(&mut self, case: &Case, report: &mut Report<'_>) -> Result<(), EngineError> {
        // The first call allocates memory.
        self.run(case)?;
        let mut seconds: Vec<f64> = Vec::with_capacity(self.repetitions);
        for _ in 0..self.repetitions {
            seconds.push(self.run(case)?);
        }
        seconds.sort_by(f64::total_cmp);
        let median = seconds[seconds.len() / 2];
        let work = self.model.work(case.shape, case.drawn());
        let ideal = work.ideal(self.rates.unwrap_or(H100));
        let line = share_line(&case.name, median, ideal, case.aim);
        match self.rates {
            Some(_) => report.check_speed(median <= case.aim * ideal, line),
            None => report.say(format!("UNJUDGED {line}")),
        }
        Ok(())
    }
}

/// Seconds of one call of a case whose sequences, as long as its context, are `slots`. Removes the rows that
/// it appended.
pub(super) fn run_case(engine: &mut Engine, slots: &[SlotId], case: &Case) -> Result<f64, EngineError> {
    let StepShape { sequences, rows_of_each, context } = case.shape;
    let drawn = case.drawn_of_each;
    let ids: Vec<TokenId> = vec![7; rows_of_each];
    let before: Vec<TokenId> = vec![7; context + rows_of_each - drawn + 1];
    // Random weights give nearly equal logits. A low temperature makes the nucleus as small as a trained
    // model's.
    let temperature = if case.top_p < 1.0 { 0.05 } else { 1.0 };
    let sampling = SamplingParams { top_p: case.top_p, temperature, ..SamplingParams::default() };
    let spec = SequenceSpec { max_len: u32::MAX, sampling, ..SequenceSpec::default() };
    let vocab_size = engine.info().vocab_size;
    let rows = |&slot: &SlotId| SequenceRows { slot, token_ids: &ids, num_logits: drawn };
    let batch: Vec<SequenceRows<'_>> = slots.iter().map(rows).collect();
    let suffix = &ids[..drawn - 1];
    let request = DrawRequest {
        spec: &spec,
        prefix: &before,
        suffix,
        vocab_size,
        logprobs: None,
        prompt: None,
        candidate_rows: 0,
    };
    let requests = vec![Some(request); sequences];
    let start = Instant::now();
    engine.forward_and_draw(&batch, &requests)?;
    let seconds = start.elapsed().as_secs_f64();
    slots.iter().for_each(|&slot| engine.truncate(slot, context as u32));
    Ok(seconds)
}

fn share_line(case: &str, seconds: f64, ideal: f64, aim: f64) -> String {
    let [ms, ideal_ms] = [seconds, ideal].map(|seconds| seconds * 1e3);
    format!(
        "{case:<36}{ms:>10.2} ms, ideal {ideal_ms:.2}, {:.2} of the roofline, aim {:.2}",
        ideal / seconds,
        1.0 / aim
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_the_share_and_the_aim() {
        let line = share_line("a step", 2.0e-3, 1.0e-3, STEP_AIM);
        assert!(line.ends_with("2.00 ms, ideal 1.00, 0.50 of the roofline, aim 0.77"), "{line}");
    }

    #[test]
    fn a_full_run_has_every_case() {
        let names: Vec<String> = full_cases().into_iter().map(|case| case.name).collect();
        for context in ["128", "8192", "32768"] {
            for step in ["1 x 1 rows", "8 x 5 rows", "32 x 5 rows", "prompt of 2048 rows"] {
                assert!(names.contains(&format!("{step} behind {context}")), "{names:?}");
            }
            assert!(names.contains(&format!("8 x 5 rows behind {context}, top-p")), "{names:?}");
        }
    }
}
