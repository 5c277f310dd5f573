//! Log probabilities of drawn and of given tokens on the device. A few numbers per row are copied to the
//! host, which computes from them the same results as from the whole row.

use speculation::TokenLogprobs;
use speculation::logits::Normalizer;

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

/// Buffers for scoring between a row's edits and its draw, and after it; reused between steps.
#[derive(Debug)]
pub(crate) struct ScoreBuffers<M> {
    /// Rows to score, as computed by the model.
    raw: StepBuffer<M, f32>,
    which: StepBuffer<M, u32>,
    requests: StepBuffer<M, ScoreRequest>,
    scored: StepBuffer<M, Scored>,
    top: StepBuffer<M, TopToken>,
}

impl<M> Default for ScoreBuffers<M> {
    fn default() -> Self {
        Self {
            raw: StepBuffer::default(),
            which: StepBuffer::default(),
            requests: StepBuffer::default(),
            scored: StepBuffer::default(),
            top: StepBuffer::default(),
        }
    }
}

/// Copies the rows to score, before edits and filters change them.
pub(crate) fn copy_raw_rows<E: Executor>(
    executor: &mut E,
    buffers: &mut ScoreBuffers<E::Memory>,
    logits: &Tensor<E::Memory, f32>,
    (rows, stride): (&[ScoreRow], usize),
) -> Result<(), CudaError> {
    if rows.is_empty() {
        return Ok(());
    }
    let last = rows.iter().map(|row| row.row as usize).max().unwrap_or(0);
    let num_rows = logits.len() / stride;
    check(SCORE.kernel(0).name, ("a scored row", last), last < num_rows, format!("below {num_rows}"))?;
    let which: Vec<u32> = rows.iter().map(|row| row.row).collect();
    let which = buffers.which.fill(executor, &which, "rows to score")?;
    let raw = buffers.raw.resize(executor, rows.len() * stride, "rows to score")?;
    take_rows(executor, (logits, stride), which.view_as(0..rows.len()), raw)
}

/// Scores the rows that [`copy_raw_rows`] has copied. `drawing` has the latest draws.
pub(crate) fn score<E: Executor>(
    executor: &mut E,
    buffers: &mut ScoreBuffers<E::Memory>,
    drawing: &DrawBuffers<E::Memory>,
    rows: &[ScoreRow],
    shape: LogitsShape,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let (kernel, LogitsShape { vocab, stride }) = (SCORE.kernel(0), shape);
    if rows.is_empty() {
        return Ok(());
    }
    check(kernel.name, ("vocab", vocab), (1..=stride).contains(&vocab), format!("1 to {stride}"))?;
    check_len(kernel.name, "raw", buffers.raw.len(), rows.len() * stride)?;
    let num_drawn = drawing.drawn().len();
    let draw_of = |row: &ScoreRow| match row.token {
        ScoredToken::Drawn { draw_idx } => Some(draw_idx as usize),
        ScoredToken::Given(_) => None,
    };
    let last = rows.iter().filter_map(draw_of).max();
    let is_good = last.is_none_or(|last| last < num_drawn);
    check(kernel.name, ("a draw", last.unwrap_or(0)), is_good, format!("below {num_drawn}"))?;
    let ask = |row: &ScoreRow| {
        let (draw, given) = match row.token {
            ScoredToken::Drawn { draw_idx } => (draw_idx, 0),
            ScoredToken::Given(token_id) => (NO_DRAW, token_id),
        };
        ScoreRequest { draw, top_n: row.top_n.min(vocab as u32), given }
    };
    let requests: Vec<ScoreRequest> = rows.iter().map(ask).collect();
    let width = width(rows);
    let ScoreBuffers { raw, requests: places, scored, top, .. } = buffers;
    let requests = places.fill(executor, &requests, "scores")?;
    let scored = scored.resize(executor, rows.len(), "scores")?;
    let top = top.resize(executor, rows.len() * width, "most likely tokens")?;
    let params =
        Params::default().read(raw.tensor()).read(requests).read_if(drawing.drawn().get()).write(scored);
    let params = params.write(top).u32(vocab).u32(stride).u32(width);
    // SAFETY: these are the kernel's parameters; the checks ensure that rows, draws and the room for the most
    // likely tokens are in bounds.
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
    rows: &[ScoreRow],
    redrawn: &[Option<u32>],
    shape: LogitsShape,
) -> Result<Vec<TokenLogprobs>, CudaError>
where
    E::Memory: DeviceMemory,
{
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let (width, LogitsShape { vocab, stride }) = (width(rows), shape);
    let scored = buffers.scored.tensor().read(executor, 0..rows.len())?;
    let top = buffers.top.tensor().read(executor, 0..rows.len() * width)?;
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
                buffers.raw.tensor().read(executor, at..at + 1)?[0]
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
    use crate::cuda::emulator::Emulator;
    use crate::cuda::ops::{DrawRow, draw};

    #[test]
    fn what_cannot_be_scored_is_refused_by_name() {
        let mut e = Emulator::build();
        let logits = Tensor::of(&mut e, &[1.0f32; 12], "logits").unwrap();
        let (mut drawing, mut scoring) = (DrawBuffers::default(), ScoreBuffers::default());
        let shape = |vocab| LogitsShape { vocab, stride: 4 };
        let spec = speculation::SequenceSpec::default();
        draw(&mut e, &mut drawing, &logits, &[DrawRow::new(0, &spec, 5)], shape(4)).unwrap();
        let rows = |row, draw_idx| [ScoreRow { row, top_n: 2, token: ScoredToken::Drawn { draw_idx } }];
        let error = copy_raw_rows(&mut e, &mut scoring, &logits, (&rows(3, 0), 4)).unwrap_err().to_string();
        assert!(error.contains("a scored row is 3, expected below 3"), "{error}");
        copy_raw_rows(&mut e, &mut scoring, &logits, (&rows(2, 0), 4)).unwrap();
        for (draw_idx, vocab, says) in [
            (1, 4, "a draw is 1, expected below 1"),
            (0, 5, "vocab is 5, expected 1 to 4"),
            (0, 0, "vocab is 0, expected 1 to 4"),
        ] {
            let refused = score(&mut e, &mut scoring, &drawing, &rows(2, draw_idx), shape(vocab));
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(score(&mut e, &mut scoring, &drawing, &rows(2, 0), shape(4)), Ok(()));
    }
}
