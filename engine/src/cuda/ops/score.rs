//! Log probabilities of drawn and of given tokens on the device. A few numbers per row are copied to the
//! host, which computes from them the same results as from the whole row.

use speculation::TokenLogprobs;
use speculation::logits::Normalizer;

use super::step_arrays::{Downloaded, Place};
use super::{DrawBuffers, LogitsShape, StepBuffer, take_rows};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::SCORE;

/// Request to score a row's drawn token, or a given one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScoreRow {
    /// Row of the logits.
    pub(crate) row: u32,
    /// Number of most likely tokens to return.
    pub(crate) top_n: u32,
    pub(crate) token: ScoredToken,
}

/// The token of a row that is scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScoredToken {
    /// The result of one of the latest draws.
    Drawn { draw_idx: u32 },
    /// A token of a row that is not drawn.
    Given(u32),
}

/// Marks a row whose token is given.
const NO_DRAW: u32 = u32::MAX;

/// The request in the layout of `score.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
struct ScoreRequest {
    draw: u32,
    top_n: u32,
    given: u32,
}

/// Result of a row.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
struct Scored {
    max: f64,
    log_sum: f64,
    logit: f32,
    unused: u32,
}

/// One of the most likely tokens.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
struct TopToken {
    token_id: u32,
    logit: f32,
}

/// The rows to score in a step, from before their edits until after their draws; memory is reused between
/// steps.
#[derive(Debug)]
pub(crate) struct ScoreBuffers<M> {
    rows: Vec<ScoreRow>,
    shape: LogitsShape,
    /// Rows to score, as computed by the model.
    raw: StepBuffer<M, f32>,
    which: Place<u32>,
    requests: Place<ScoreRequest>,
    scored: Place<Scored>,
    top: Place<TopToken>,
}

impl<M> Default for ScoreBuffers<M> {
    fn default() -> Self {
        Self {
            rows: Vec::new(),
            shape: LogitsShape::default(),
            raw: StepBuffer::default(),
            which: Place::EMPTY,
            requests: Place::EMPTY,
            scored: Place::EMPTY,
            top: Place::EMPTY,
        }
    }
}

impl<M> ScoreBuffers<M> {
    /// Adds rows to score to the step that [`DrawBuffers::prepare`] has begun.
    pub(crate) fn prepare(&mut self, drawing: &mut DrawBuffers<M>, rows: Vec<ScoreRow>) {
        self.shape = drawing.shape;
        let which: Vec<u32> = rows.iter().map(|row| row.row).collect();
        let requests: Vec<ScoreRequest> = rows.iter().map(|row| row.request(self.shape.vocab)).collect();
        self.which = drawing.arrays.put(&which);
        self.requests = drawing.arrays.put(&requests);
        self.scored = drawing.arrays.reserve(rows.len());
        self.top = drawing.arrays.reserve(rows.len() * width(&rows));
        self.rows = rows;
    }
}

impl ScoreRow {
    fn request(&self, vocab: usize) -> ScoreRequest {
        let (draw, given) = match self.token {
            ScoredToken::Drawn { draw_idx } => (draw_idx, 0),
            ScoredToken::Given(token_id) => (NO_DRAW, token_id),
        };
        ScoreRequest { draw, top_n: self.top_n.min(vocab as u32), given }
    }
}

/// Copies the rows to score, before edits and filters change them.
pub(crate) fn copy_raw_rows<E: Executor>(
    executor: &mut E,
    buffers: &mut ScoreBuffers<E::Memory>,
    drawing: &DrawBuffers<E::Memory>,
    logits: &Tensor<E::Memory, f32>,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let ScoreBuffers { rows, shape, raw, which, .. } = buffers;
    if rows.is_empty() {
        return Ok(());
    }
    let stride = shape.stride;
    let last = rows.iter().map(|row| row.row as usize).max().unwrap_or(0);
    let num_rows = logits.len() / stride;
    check(SCORE.kernel(0).name, ("a scored row", last), last < num_rows, format_args!("below {num_rows}"))?;
    let raw = raw.resize(executor, rows.len() * stride, "rows to score")?;
    take_rows(executor, (logits, stride), drawing.arrays.input(which), raw)
}

/// Scores the rows that [`copy_raw_rows`] has copied, after the step's [`draw`](super::draw()).
pub(crate) fn score<E: Executor>(
    executor: &mut E,
    buffers: &ScoreBuffers<E::Memory>,
    drawing: &DrawBuffers<E::Memory>,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let ScoreBuffers { rows, shape, raw, requests, scored, top, .. } = buffers;
    let (kernel, LogitsShape { vocab, stride }) = (SCORE.kernel(0), *shape);
    if rows.is_empty() {
        return Ok(());
    }
    check(kernel.name, ("vocab", vocab), (1..=stride).contains(&vocab), format_args!("1 to {stride}"))?;
    check_len(kernel.name, "raw", raw.len(), rows.len() * stride)?;
    let num_drawn = drawing.num_draws();
    let draw_of = |row: &ScoreRow| match row.token {
        ScoredToken::Drawn { draw_idx } => Some(draw_idx as usize),
        ScoredToken::Given(_) => None,
    };
    let last = rows.iter().filter_map(draw_of).max();
    let is_good = last.is_none_or(|last| last < num_drawn);
    check(kernel.name, ("a draw", last.unwrap_or(0)), is_good, format_args!("below {num_drawn}"))?;
    let arrays = &drawing.arrays;
    let params = Params::default().read(raw.tensor()).view(arrays.input(requests));
    let params = params.view(drawing.drawn_on_device()).view(arrays.result(scored));
    let params = params.view(arrays.result(top)).u32(vocab).u32(stride).u32(width(rows));
    // SAFETY: these are the kernel's parameters; the checks ensure that rows and draws are in bounds, and
    // `prepare` has made room for the most likely tokens.
    unsafe { executor.launch(kernel, [rows.len() as u32, 1, 1], &mut { params }) }
}

/// Capacity for the most likely tokens of a row.
fn width(rows: &[ScoreRow]) -> usize {
    rows.iter().map(|row| row.top_n as usize).max().unwrap_or(0)
}

/// Returns the results of [`score`] in the order of the rows. `redrawn[i]` is the token of row i if the host
/// has drawn it again.
pub(crate) fn scores<E: Executor>(
    executor: &mut E,
    buffers: &ScoreBuffers<E::Memory>,
    results: &Downloaded,
    redrawn: &[Option<u32>],
) -> Result<Vec<TokenLogprobs>, CudaError>
where
    E::Memory: DeviceMemory,
{
    let ScoreBuffers { rows, shape, raw, scored, top, .. } = buffers;
    let (width, LogitsShape { vocab, stride }) = (width(rows), *shape);
    let (scored, top) = (results.get(scored), results.get(top));
    let mut all = Vec::new();
    for (i, (row, scored)) in rows.iter().zip(scored).enumerate() {
        let normalizer = Normalizer { max: scored.max, log_sum: scored.log_sum };
        if !normalizer.is_usable() {
            all.push(TokenLogprobs { logprob: f32::NAN, top: Vec::new() });
            continue;
        }
        let logit = match redrawn.get(i).copied().flatten() {
            Some(id) => {
                let at = i * stride + id as usize;
                raw.tensor().read(executor, at..at + 1)?[0]
            }
            None => scored.logit,
        };
        let num_top = vocab.min(row.top_n as usize);
        let likely = |likely: &TopToken| (likely.token_id, normalizer.logprob(likely.logit));
        let top = top[i * width..i * width + num_top].iter().map(likely).collect();
        all.push(TokenLogprobs { logprob: normalizer.logprob(logit), top });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::{Emulator, HostMemory};
    use crate::cuda::ops::{DrawRow, draw};

    #[test]
    fn what_cannot_be_scored_is_refused_by_name() {
        let mut e = Emulator::build();
        let logits = Tensor::of(&mut e, &[1.0f32; 12], "logits").unwrap();
        let spec = speculation::SequenceSpec::default();
        let prepared = |e: &mut Emulator, vocab, (row, draw_idx)| {
            let mut drawing = DrawBuffers::<HostMemory>::default();
            let mut scoring = ScoreBuffers::<HostMemory>::default();
            let shape = LogitsShape { vocab, stride: 4 };
            drawing.prepare(shape, Vec::new(), vec![DrawRow::new(0, &spec, 5)]);
            let token = ScoredToken::Drawn { draw_idx };
            scoring.prepare(&mut drawing, vec![ScoreRow { row, top_n: 2, token }]);
            drawing.upload(e).unwrap();
            (drawing, scoring)
        };
        let (drawing, mut scoring) = prepared(&mut e, 4, (3, 0));
        let error = copy_raw_rows(&mut e, &mut scoring, &drawing, &logits).unwrap_err().to_string();
        assert!(error.contains("a scored row is 3, expected below 3"), "{error}");
        for (draw_idx, vocab, says) in [
            (1, 4, "a draw is 1, expected below 1"),
            (0, 5, "vocab is 5, expected 1 to 4"),
            (0, 0, "vocab is 0, expected 1 to 4"),
        ] {
            let (drawing, mut scoring) = prepared(&mut e, vocab, (2, draw_idx));
            copy_raw_rows(&mut e, &mut scoring, &drawing, &logits).unwrap();
            let error = score(&mut e, &scoring, &drawing).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let (mut drawing, mut scoring) = prepared(&mut e, 4, (2, 0));
        copy_raw_rows(&mut e, &mut scoring, &drawing, &logits).unwrap();
        draw(&mut e, &mut drawing, &logits).unwrap();
        assert_eq!(score(&mut e, &scoring, &drawing), Ok(()));
    }
}
