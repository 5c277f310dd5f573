//! Times of steps of large models, with random weights generated on the device: decode of several numbers of
//! sequences against memory bandwidth, verify rows against one row, and prefill. Every step draws, as in
//! serving.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use speculation::{SequenceSpec, TokenId};

use super::products::{multiply_peak, read_bandwidth};
use super::{CheckTarget, Report};
use crate::cuda::GpuOptions;
use crate::cuda::blas::BlasLibrary;
use crate::cuda::whole_model::options;
use crate::{DrawRequest, Engine, EngineError, SequenceRows, SlotId, WeightFormat};

/// A model's shape (its config.json) and weight format.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    name: &'static str,
    config: &'static str,
    weights: WeightFormat,
}

pub(super) const LLAMA_8B: &str = include_str!("shapes/llama-3-8b.json");
pub(super) const LLAMA_70B: &str = include_str!("shapes/llama-3-70b.json");
/// A draft for the models above.
pub(super) const LLAMA_1B: &str = include_str!("shapes/llama-3.2-1b.json");
/// For dry runs.
pub(super) const TINY: &str = include_str!("shapes/tiny.json");
/// A small model whose products take operands in panels.
pub(super) const PANELS: &str = include_str!("shapes/panels.json");

pub(super) const LLAMA_8B_BF16: Shape =
    Shape { name: "llama 3 8B", config: LLAMA_8B, weights: WeightFormat::Bf16 };
pub(super) const LLAMA_8B_INT8: Shape =
    Shape { name: "llama 3 8B", config: LLAMA_8B, weights: WeightFormat::Int8 };
pub(super) const LLAMA_70B_INT8: Shape =
    Shape { name: "llama 3 70B", config: LLAMA_70B, weights: WeightFormat::Int8 };

/// Number of ids in each sequence before decode steps are timed.
const PROMPT_LEN: usize = 64;
/// Numbers of verify rows of one sequence that are compared with one row.
const VERIFY_ROWS: [usize; 4] = [2, 4, 5, 8];

/// A model whose steps are timed.
struct Timed {
    engine: Engine,
    spec: SequenceSpec,
    /// Number of timed steps.
    steps: u32,
    prefill_rows: usize,
}

/// See the module documentation.
pub(super) fn decode(target: &CheckTarget, shape: Shape, report: &mut Report<'_>) -> Result<(), EngineError> {
    let memory = read_bandwidth(&mut target.open()?, target.is_dry)?;
    let (name, config) = if target.is_dry { ("tiny", TINY) } else { (shape.name, shape.config) };
    let peak = multiply_peak(&mut target.open()?, target.is_dry)?;
    let file = write_config(config, "decode")?;
    report.say(format!("{name}, {:?}, random weights; memory is read at {memory:.0} GB/s", shape.weights));
    let mut found = Vec::new();
    for mode in modes(target, shape.weights) {
        let Mode { by, graphs, cublaslt_min_rows } = mode;
        let gpus = GpuOptions { memory_utilization: Some(0.9), graphs, cublaslt_min_rows, ..target.gpus() };
        let began = Instant::now();
        let engine = Engine::random(&options(file.clone(), shape.weights).on_gpus(gpus), 1);
        let took = began.elapsed().as_secs_f64();
        report.say(format!("{by}: made and loaded in {took:.1} s"));
        let (steps, prefill_rows) = if target.is_dry { (1, 40) } else { (20, 512) };
        let spec = SequenceSpec { max_len: u32::MAX, ..SequenceSpec::default() };
        let mut timed = Timed { engine: engine?, spec, steps, prefill_rows };
        let mut seconds = timed.sequences(by, (memory, target.is_dry), report)?;
        timed.verify(by, report)?;
        seconds.push(("prefill".to_owned(), timed.prefill(by, peak, report)?));
        found.push((mode, seconds));
    }
    report_deterministic_cost(&found, report);
    std::fs::remove_file(&file).map_err(|source| EngineError::Io { path: file, source })
}

/// A way to run steps.
struct Mode {
    by: &'static str,
    graphs: bool,
    cublaslt_min_rows: Option<usize>,
}

/// The deterministic modes, and cuBLASLt if the library is present and the weights are bf16.
fn modes(target: &CheckTarget, weights: WeightFormat) -> Vec<Mode> {
    let mut modes = vec![
        Mode { by: "launches", graphs: false, cublaslt_min_rows: None },
        Mode { by: "graphs", graphs: true, cublaslt_min_rows: None },
    ];
    if weights == WeightFormat::Bf16 && BlasLibrary::load().is_ok() {
        let from = if target.is_dry { 2 } else { GpuOptions::CUBLASLT_MIN_ROWS };
        modes.push(Mode { by: "cublaslt", graphs: false, cublaslt_min_rows: Some(from) });
    }
    modes
}

/// Reports the cost of deterministic products for each step: this crate's kernels against cuBLASLt.
fn report_deterministic_cost(found: &[(Mode, Vec<(String, f64)>)], report: &mut Report<'_>) {
    let own = found.iter().find(|(mode, _)| mode.cublaslt_min_rows.is_none() && !mode.graphs);
    let library = found.iter().find(|(mode, _)| mode.cublaslt_min_rows.is_some());
    let (Some((_, own)), Some((_, library))) = (own, library) else { return };
    for ((step, own), (_, library)) in own.iter().zip(library) {
        report
            .say(format!("deterministic mode: {step} takes {:.2} of the time with cublaslt", own / library));
    }
}

/// Writes a config.json to a temporary file that no other call uses.
pub(super) fn write_config(config: &str, name: &str) -> Result<PathBuf, EngineError> {
    static NUM_FILES: AtomicU64 = AtomicU64::new(0);
    let number = NUM_FILES.fetch_add(1, Ordering::Relaxed);
    let file = format!("outrider-gpu-check-{}-{number}-{name}.json", std::process::id());
    let path = std::env::temp_dir().join(file);
    match std::fs::write(&path, config) {
        Ok(()) => Ok(path),
        Err(source) => Err(EngineError::Io { path, source }),
    }
}

impl Timed {
    fn sequences(
        &mut self,
        by: &str,
        (memory, is_dry): (f64, bool),
        report: &mut Report<'_>,
    ) -> Result<Vec<(String, f64)>, EngineError> {
        let mut all = Vec::new();
        let counts: &[usize] = if is_dry { &[1, 3] } else { &[1, 8, 64, 256] };
        let bytes = self.engine.info().weight_bytes as f64;
        for &count in counts {
            let slots = self.fill(count)?;
            let seconds = self.time(&slots, 1)?;
            all.push((format!("a step of {count}"), seconds));
            let (ms, rate) = (seconds * 1e3, bytes / seconds / 1e9);
            let tokens = count as f64 / seconds;
            report.say(format!(
                "{by}, {count:>3} sequences: {ms:>9.3} ms a step, {tokens:>8.0} tokens/s, weights at {rate:>5.0} GB/s, \
                 {:.2} of memory",
                rate / memory
            ));
            slots.into_iter().for_each(|slot| self.engine.close(slot));
        }
        Ok(all)
    }

    fn verify(&mut self, by: &str, report: &mut Report<'_>) -> Result<(), EngineError> {
        let slots = self.fill(1)?;
        let one = self.time(&slots, 1)?;
        for rows in VERIFY_ROWS {
            let seconds = self.time(&slots, rows)?;
            report.say(format!(
                "{by}, {rows:>3} verify rows of one sequence: {:>9.3} ms a step, {:.2} of one row's",
                seconds * 1e3,
                seconds / one
            ));
        }
        slots.into_iter().for_each(|slot| self.engine.close(slot));
        Ok(())
    }

    fn prefill(&mut self, by: &str, peak: f64, report: &mut Report<'_>) -> Result<f64, EngineError> {
        let prompt: Vec<TokenId> = vec![5; self.prefill_rows];
        let slot = self.engine.open();
        let rows = [SequenceRows { slot, token_ids: &prompt, num_logits: 0 }];
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            self.engine.forward(&rows)?;
            // The step that draws the first id is part of the time.
            self.step(&[slot], 1)?;
            best = best.min(start.elapsed().as_secs_f64());
            self.engine.truncate(slot, 0);
        }
        self.engine.close(slot);
        let work = 2.0 * self.engine.info().num_parameters as f64 * self.prefill_rows as f64;
        report.say(format!(
            "{by}, {} prompt rows and one step: {:>9.1} ms, {:.0} rows/s, {:.1} TFLOP/s, {:.2} of what multiplying alone gives",
            self.prefill_rows,
            best * 1e3,
            self.prefill_rows as f64 / best,
            work / best / 1e12,
            work / best / 1e12 / peak
        ));
        Ok(best)
    }

    /// Opens sequences that hold a prompt.
    fn fill(&mut self, count: usize) -> Result<Vec<SlotId>, EngineError> {
        let slots: Vec<SlotId> = (0..count).map(|_| self.engine.open()).collect();
        let prompt: Vec<TokenId> = (0..PROMPT_LEN as u32).collect();
        for &slot in &slots {
            self.engine.forward(&[SequenceRows { slot, token_ids: &prompt, num_logits: 0 }])?;
        }
        Ok(slots)
    }

    /// Seconds of a step of `rows` rows of each sequence, all of which are drawn.
    fn time(&mut self, slots: &[SlotId], rows: usize) -> Result<f64, EngineError> {
        // With graphs, the second occurrence is captured and the third is replayed.
        for _ in 0..3 {
            self.step(slots, rows)?;
        }
        let start = Instant::now();
        for _ in 0..self.steps {
            self.step(slots, rows)?;
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(self.steps))
    }

    /// Runs one step, and removes the rows it appended to the sequences.
    fn step(&mut self, slots: &[SlotId], rows: usize) -> Result<(), EngineError> {
        let ids: Vec<TokenId> = vec![7; rows];
        let held: Vec<u32> = slots.iter().map(|&slot| self.engine.len(slot)).collect();
        let before: Vec<TokenId> = vec![7; held.iter().max().map_or(0, |&len| len as usize) + 1];
        let vocab_size = self.engine.info().vocab_size;
        let batch: Vec<SequenceRows<'_>> =
            slots.iter().map(|&slot| SequenceRows { slot, token_ids: &ids, num_logits: rows }).collect();
        let request = |&len: &u32| {
            let before = &before[..=len as usize];
            Some(DrawRequest {
                spec: &self.spec,
                prefix: before,
                suffix: &ids[1..],
                vocab_size,
                logprobs: None,
                prompt: None,
                candidate_rows: 0,
            })
        };
        let requests: Vec<Option<DrawRequest<'_>>> = held.iter().map(request).collect();
        self.engine.forward_and_draw(&batch, &requests)?;
        slots.iter().zip(held).for_each(|(&slot, len)| self.engine.truncate(slot, len));
        Ok(())
    }
}
