//! The best tokens of a row by the coupled draw's scores, for the children of a token tree. Only ids and
//! scores are copied to the host.

use speculation::tree::MAX_CANDIDATES;
use speculation::{TokenId, TokenLogprobs};

use super::draw::{DrawRow, LogitsShape, num_parts};
use super::step_arrays::{Downloaded, Place};
use super::{DrawBuffers, ScoreBuffers, ScoreRow, ScoredToken, StepBuffer, copy_raw_rows, score, scores};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check};
use crate::cuda::sources::DRAW;

/// A token with its score, in the layout of `draw.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
struct Candidate {
    score: f64,
    token_id: u32,
    unused: u32,
}

/// Marks the end of a row's candidates.
const NO_TOKEN: u32 = u32::MAX;

/// Request to list the best tokens of a row that is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ListedRow {
    pub(crate) draw: DrawRow,
    /// Index of the draw among the latest ones.
    pub(crate) draw_idx: u32,
}

/// Candidates of a row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RowCandidates {
    /// Ids and scores, best first; empty if no token may be drawn.
    pub(crate) best: Vec<(TokenId, f64)>,
    /// `-ln` of the first candidate's probability at temperature 1, before filters.
    pub(crate) surprise: f32,
}

/// The rows of a step whose candidates are listed; memory is reused between steps.
#[derive(Debug)]
pub(crate) struct CandidateBuffers<M> {
    listed: Vec<ListedRow>,
    draws: Place<DrawRow>,
    parts: StepBuffer<M, Candidate>,
    best: Place<Candidate>,
    scoring: ScoreBuffers<M>,
}

impl<M> Default for CandidateBuffers<M> {
    fn default() -> Self {
        Self {
            listed: Vec::new(),
            draws: Place::EMPTY,
            parts: StepBuffer::default(),
            best: Place::EMPTY,
            scoring: ScoreBuffers::default(),
        }
    }
}

impl<M> CandidateBuffers<M> {
    /// Adds rows whose candidates are listed to the step that [`DrawBuffers::prepare`] has begun.
    pub(crate) fn prepare(&mut self, drawing: &mut DrawBuffers<M>, listed: Vec<ListedRow>) {
        let draws: Vec<DrawRow> = listed.iter().map(|listed| listed.draw).collect();
        self.draws = drawing.arrays.put(&draws);
        self.best = drawing.arrays.reserve(listed.len() * MAX_CANDIDATES);
        self.scoring.prepare(drawing, first_scores(&listed));
        self.listed = listed;
    }
}

/// Copies the listed rows before filters mask tokens in them: the surprise depends on the whole row.
pub(crate) fn copy_edited_rows<E: Executor>(
    executor: &mut E,
    buffers: &mut CandidateBuffers<E::Memory>,
    drawing: &DrawBuffers<E::Memory>,
    logits: &Tensor<E::Memory, f32>,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    copy_raw_rows(executor, &mut buffers.scoring, drawing, logits)
}

/// Scores the first candidates of the listed rows in the copies that [`copy_edited_rows`] has made: the
/// surprise.
pub(crate) fn score_first_candidates<E: Executor>(
    executor: &mut E,
    buffers: &CandidateBuffers<E::Memory>,
    drawing: &DrawBuffers<E::Memory>,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    score(executor, &buffers.scoring, drawing)
}

/// Finds the best tokens of the listed rows of `logits` `[*, stride]`, of which the first `vocab` columns are
/// used, by the scores of their draws.
pub(crate) fn find_candidates<E: Executor>(
    executor: &mut E,
    buffers: &mut CandidateBuffers<E::Memory>,
    drawing: &DrawBuffers<E::Memory>,
    logits: &Tensor<E::Memory, f32>,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let [kernel, join] = [2, 3].map(|index| DRAW.kernel(index));
    let CandidateBuffers { listed, draws, parts, best, .. } = buffers;
    if listed.is_empty() {
        return Ok(());
    }
    let LogitsShape { vocab, stride } = drawing.shape;
    let num_parts = num_parts(kernel.name, drawing.shape)?;
    let last = listed.iter().map(|listed| listed.draw.row as usize).max().unwrap_or(0);
    let rows = logits.len() / stride;
    check(kernel.name, ("a row with candidates", last), last < rows, format_args!("below {rows}"))?;
    let num_candidates = listed.len() * MAX_CANDIDATES;
    let parts = parts.resize(executor, num_candidates * num_parts, "candidates of parts of rows")?;
    let (draws, best) = (drawing.arrays.input(draws), drawing.arrays.result(best));
    let num_draws = listed.len() as u32;
    let params = Params::default().read(logits).view(draws).write(parts).u32(vocab).u32(stride);
    // SAFETY: these are the kernel's parameters; the checks ensure that every row is in bounds.
    unsafe { executor.launch(kernel, [num_draws, num_parts as u32, 1], &mut { params }) }?;
    let params = Params::default().read(parts).view(best).u32(num_parts);
    // SAFETY: these are the kernel's parameters; the parts are those of the previous launch.
    unsafe { executor.launch(join, [num_draws, 1, 1], &mut { params }) }
}

/// Returns the results of [`score_first_candidates`] and [`find_candidates`] in the order of the listed rows.
pub(crate) fn candidates<E: Executor>(
    executor: &mut E,
    buffers: &CandidateBuffers<E::Memory>,
    results: &Downloaded,
) -> Result<Vec<RowCandidates>, CudaError>
where
    E::Memory: DeviceMemory,
{
    let best = results.get(&buffers.best);
    let scores = scores(executor, &buffers.scoring, results, &[])?;
    let of_row = |(row, score): (&[Candidate], TokenLogprobs)| {
        let listed = row.iter().take_while(|candidate| candidate.token_id != NO_TOKEN);
        let best = listed.map(|candidate| (candidate.token_id, candidate.score)).collect();
        RowCandidates { best, surprise: -score.logprob }
    };
    Ok(best.chunks_exact(MAX_CANDIDATES).zip(scores).map(of_row).collect())
}

/// Requests for the probability of each row's drawn token, which is its first candidate.
fn first_scores(listed: &[ListedRow]) -> Vec<ScoreRow> {
    let of_row = |listed: &ListedRow| {
        let token = ScoredToken::Drawn { draw_idx: listed.draw_idx };
        ScoreRow { row: listed.draw.row, top_n: 0, token }
    };
    listed.iter().map(of_row).collect()
}
