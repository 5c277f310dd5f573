//! Times steps: a forward, and a draw from each row of logits. A round runs every format for a slice of time,
//! and a memory read for another. A case consists of several rounds; its results are medians over them, with
//! the bandwidth share computed per round. The parts of a step are timed within it, never derived from other
//! runs.

use std::time::{Duration, Instant};

use engine::{Engine, EngineError, ReadProbe, SequenceRows, SlotId, StageTimes, TokenId};
use serde::Serialize;
use speculation::acceptance::guess;
use speculation::logits::{DrawError, TokenCounts};
use speculation::{SamplingParams, SequenceSpec};

use super::EngineBenchError;
use super::memory::LoadMemory;
use crate::load::statistics::median;

/// Time that one format runs before the next takes its turn.
const SLICE_TIME: Duration = Duration::from_millis(40);
/// Minimum number of rounds per case, regardless of their duration.
const MIN_ROUNDS: usize = 5;
/// Bytes read in each round.
const READ_SLICE: usize = 256 << 20;
/// Rows per forward while a context is prefilled.
const PREFILL_ROWS: usize = 512;
/// Up to this many rows all logits are needed, as in verification; more rows are a prompt, which needs only
/// the last.
const VERIFY_ROWS: usize = 64;

/// Shape of a forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Case {
    /// Rows per sequence.
    pub(super) rows: usize,
    pub(super) sequences: usize,
    /// Tokens in each sequence before the forward.
    pub(super) context: usize,
}

/// Results of one case for one format.
#[derive(Debug, Clone)]
pub(super) struct CaseResult {
    pub(super) case: Case,
    /// Median time of a forward, seconds.
    pub(super) seconds: f64,
    /// Bytes that the forward must read, relative to the bytes that the machine reads in that time.
    pub(super) bandwidth_share: f64,
    pub(super) parts: StepParts,
}

/// Time spent in each part of the steps, summed over all rounds, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StepParts {
    pub(super) attention: f64,
    pub(super) vocabulary: f64,
    pub(super) draws: f64,
    /// Forwards and draws.
    pub(super) steps: f64,
}

impl std::ops::AddAssign for StepParts {
    fn add_assign(&mut self, other: Self) {
        self.attention += other.attention;
        self.vocabulary += other.vocabulary;
        self.draws += other.draws;
        self.steps += other.steps;
    }
}

impl StepParts {
    fn add(&mut self, forward: f64, draws: f64, stages: StageTimes) {
        let (attention, vocabulary) = (stages.attention.as_secs_f64(), stages.vocabulary.as_secs_f64());
        *self += Self { attention, vocabulary, draws, steps: forward + draws };
    }
}

/// A loaded format and its results.
pub(super) struct FormatBench {
    pub(super) weights: String,
    pub(super) engine: Engine,
    pub(super) load: Duration,
    pub(super) load_memory: Option<LoadMemory>,
    slots: Vec<SlotId>,
    pub(super) measured: Vec<CaseResult>,
}

impl FormatBench {
    pub(super) fn new(
        weights: String,
        engine: Engine,
        (load, load_memory): (Duration, Option<LoadMemory>),
    ) -> Self {
        Self { weights, engine, load, load_memory, slots: Vec::new(), measured: Vec::new() }
    }

    /// Bytes that a forward must read: weights, and the keys and values that it attends to.
    pub(super) fn bytes_of(&self, case: Case) -> u64 {
        let info = self.engine.info();
        let tokens = case.sequences * (case.context + case.rows);
        info.weight_bytes + tokens as u64 * info.kv_bytes_per_token
    }

    /// Opens sequences and extends each to the context length.
    fn prepare(&mut self, case: Case) -> Result<(), EngineError> {
        while self.slots.len() < case.sequences {
            self.slots.push(self.engine.open());
        }
        for &slot in &self.slots[..case.sequences] {
            self.engine.truncate(slot, case.context as u32);
            let mut cached = self.engine.len(slot) as usize;
            while cached < case.context {
                let end = case.context.min(cached + PREFILL_ROWS);
                let ids = ids(cached, end - cached, self.engine.info().vocab_size);
                self.engine.forward(&[SequenceRows { slot, token_ids: &ids, num_logits: 0 }])?;
                cached = end;
            }
        }
        Ok(())
    }

    /// Runs steps for a slice of time; returns the median time of a forward in seconds, and the parts of all
    /// steps.
    fn slice(&mut self, case: Case) -> Result<(f64, StepParts), EngineBenchError> {
        let ids = ids(case.context, case.rows, self.engine.info().vocab_size);
        let num_logits = if case.rows <= VERIFY_ROWS { case.rows } else { 1 };
        let slots = &self.slots[..case.sequences];
        let batch: Vec<SequenceRows<'_>> =
            slots.iter().map(|&slot| SequenceRows { slot, token_ids: &ids, num_logits }).collect();
        let (mut seconds, mut parts, begin) = (Vec::new(), StepParts::default(), Instant::now());
        while seconds.is_empty() || begin.elapsed() < SLICE_TIME {
            let before = self.engine.stage_times();
            let start = Instant::now();
            let mut logits = self.engine.forward(&batch)?;
            let forward = start.elapsed().as_secs_f64();
            let start = Instant::now();
            for row in 0..logits.rows() {
                draw(case.context + row, logits.row_mut(row))?;
            }
            let draws = start.elapsed().as_secs_f64();
            parts.add(forward, draws, self.engine.stage_times().since(&before));
            seconds.push(forward);
            slots.iter().for_each(|&slot| self.engine.truncate(slot, case.context as u32));
        }
        Ok((median(&mut seconds), parts))
    }
}

/// A coupled draw at temperature 1, without filters.
fn draw(position: usize, logits: &mut [f32]) -> Result<TokenId, DrawError> {
    let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let spec = SequenceSpec { seed: 1, sampling, ..SequenceSpec::default() };
    Ok(guess(&spec, &TokenCounts::new(0), position as u32, logits)?.token_id)
}

/// The formats and the memory probe, measured in turns.
pub(super) struct Bench {
    formats: Vec<FormatBench>,
    probe: ReadProbe,
    streams: usize,
    case_time: Duration,
    /// Bytes per second in every round of every case.
    reads: Vec<f64>,
}

/// Results of a run.
pub(super) struct BenchResults {
    pub(super) instruction_set: &'static str,
    pub(super) formats: Vec<FormatBench>,
    /// Median read bandwidth, bytes per second.
    pub(super) read: f64,
    pub(super) streams: usize,
    pub(super) probe_bytes: usize,
}

impl Bench {
    pub(super) fn new(formats: Vec<FormatBench>, mut probe: ReadProbe, case_time: Duration) -> Self {
        let streams = probe.best_streams();
        Self { formats, probe, streams, case_time, reads: Vec::new() }
    }

    /// Measures all formats on one case.
    pub(super) fn measure(&mut self, case: Case) -> Result<(), EngineBenchError> {
        for format in &mut self.formats {
            format.prepare(case)?;
            // The first forward grows buffers and is not counted.
            format.slice(case)?;
        }
        let mut seconds = vec![Vec::new(); self.formats.len()];
        let mut shares = vec![Vec::new(); self.formats.len()];
        let mut parts = vec![StepParts::default(); self.formats.len()];
        let begin = Instant::now();
        while seconds[0].len() < MIN_ROUNDS || begin.elapsed() < self.case_time {
            let read = self.probe.read(self.streams, READ_SLICE);
            self.reads.push(read);
            for (i, format) in self.formats.iter_mut().enumerate() {
                let (time, of_slice) = format.slice(case)?;
                parts[i] += of_slice;
                seconds[i].push(time);
                shares[i].push(format.bytes_of(case) as f64 / time / read);
            }
        }
        for (i, format) in self.formats.iter_mut().enumerate() {
            let (seconds, bandwidth_share) = (median(&mut seconds[i]), median(&mut shares[i]));
            format.measured.push(CaseResult { case, seconds, bandwidth_share, parts: parts[i] });
        }
        Ok(())
    }

    pub(super) fn finish(mut self) -> Result<BenchResults, EngineBenchError> {
        Ok(BenchResults {
            instruction_set: engine::instruction_set()?,
            read: median(&mut self.reads),
            streams: self.streams,
            probe_bytes: self.probe.bytes(),
            formats: self.formats,
        })
    }
}

/// Ids at positions `start..start + len` of an endless text.
fn ids(start: usize, len: usize, vocab: u32) -> Vec<TokenId> {
    (start..start + len).map(|i| ((i * 37 + 11) % vocab as usize) as TokenId).collect()
}
