//! The coupled draw on the device; only ids are copied to the host.

use speculation::SequenceSpec;
use speculation::noise::Purpose;

use super::filters::{FilterBuffers, FilterRow};
use super::logits::LogitEdit;
use super::{MAX_GRID_YZ, StepBuffer};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check};
use crate::cuda::sources::DRAW;

/// One row's draw, in the layout of `draw.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct DrawRow {
    pub(crate) seed: u64,
    pub(crate) choice: u32,
    pub(crate) position: u32,
    pub(crate) temperature: f32,
    pub(crate) purpose: u32,
    /// Row of the logits.
    pub(crate) row: u32,
    unused: u32,
}

impl DrawRow {
    /// Creates the draw of a sequence's token at `position` from row `row`.
    pub(crate) fn new(row: u32, spec: &SequenceSpec, position: u32) -> Self {
        let (seed, choice, temperature) = (spec.seed, spec.choice, spec.sampling.temperature);
        Self { seed, choice, position, temperature, purpose: Purpose::Draw as u32, row, unused: 0 }
    }

    /// The same draw from another row.
    pub(crate) fn of_row(self, row: u32) -> Self {
        Self { row, ..self }
    }
}

/// Result of a row.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Drawn {
    pub(crate) token_id: u32,
    /// 0: drawn; 1: `token_id`'s logit is NaN or +infinity; 2: every logit is -infinity.
    pub(crate) status: u32,
}

/// Columns of rows of logits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogitsShape {
    /// Number of columns that are used, from the first on.
    pub(crate) vocab: usize,
    /// Number of columns.
    pub(crate) stride: usize,
}

/// Consecutive numbers of a row per block: `PART` of `parts.cuh`.
pub(super) const PART: usize = 4096;

/// Number of parts of a row, which is a grid size.
pub(super) fn num_parts(kernel: &'static str, shape: LogitsShape) -> Result<usize, CudaError> {
    let LogitsShape { vocab, stride } = shape;
    check(kernel, ("vocab", vocab), (1..=stride).contains(&vocab), format!("1 to {stride}"))?;
    let parts = vocab.div_ceil(PART);
    check(kernel, ("parts of a row", parts), parts <= MAX_GRID_YZ, format!("at most {MAX_GRID_YZ}"))?;
    Ok(parts)
}

/// Result of a part of a row, in the layout of `draw.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct DrawPart {
    most_likely: f64,
    best: f64,
    most_likely_id: u32,
    best_id: u32,
}

/// Inputs and outputs of edits, filters and draws; reused between steps.
#[derive(Debug)]
pub(crate) struct DrawBuffers<M> {
    pub(super) edits: StepBuffer<M, LogitEdit>,
    pub(super) filters: StepBuffer<M, FilterRow>,
    pub(super) filtering: FilterBuffers<M>,
    draws: StepBuffer<M, DrawRow>,
    parts: StepBuffer<M, DrawPart>,
    drawn: StepBuffer<M, Drawn>,
}

impl<M> Default for DrawBuffers<M> {
    fn default() -> Self {
        Self {
            edits: StepBuffer::default(),
            filters: StepBuffer::default(),
            filtering: FilterBuffers::default(),
            draws: StepBuffer::default(),
            parts: StepBuffer::default(),
            drawn: StepBuffer::default(),
        }
    }
}

impl<M> DrawBuffers<M> {
    /// Results of the latest [`draw`], once it has run.
    pub(super) fn drawn(&self) -> &StepBuffer<M, Drawn> {
        &self.drawn
    }
}

/// Draws from rows of `logits` `[*, stride]`, of which the first `vocab` columns are used; [`drawn`] reads
/// the results.
pub(crate) fn draw<E: Executor>(
    executor: &mut E,
    buffers: &mut DrawBuffers<E::Memory>,
    logits: &Tensor<E::Memory, f32>,
    draws: &[DrawRow],
    shape: LogitsShape,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let (kernel, join) = (DRAW.kernel(0), DRAW.kernel(1));
    if draws.is_empty() {
        return Ok(());
    }
    let LogitsShape { vocab, stride } = shape;
    let num_parts = num_parts(kernel.name, shape)?;
    let last = draws.iter().map(|draw| draw.row as usize).max().unwrap_or(0);
    let rows = logits.len() / stride;
    check(kernel.name, ("a drawn row", last), last < rows, format!("below {rows}"))?;
    let rows = buffers.draws.fill(executor, draws, "draws")?;
    let parts = buffers.parts.resize(executor, draws.len() * num_parts, "parts of drawn rows")?;
    let drawn = buffers.drawn.resize(executor, draws.len(), "drawn ids")?;
    let num_draws = draws.len() as u32;
    let params = Params::default().read(logits).read(rows).write(parts).u32(vocab).u32(stride);
    // SAFETY: these are the kernel's parameters; the checks ensure that every row is in bounds.
    unsafe { executor.launch(kernel, [num_draws, num_parts as u32, 1], &mut { params }) }?;
    let params = Params::default().read(parts).read(rows).write(drawn).u32(num_parts);
    // SAFETY: these are the kernel's parameters; parts and draws are those of the previous launch.
    unsafe { executor.launch(join, [num_draws, 1, 1], &mut { params }) }
}

/// Waits for the latest [`draw`], which had the same number of draws, and returns its results.
pub(crate) fn drawn<E: Executor>(
    executor: &mut E,
    buffers: &DrawBuffers<E::Memory>,
    draws: &[DrawRow],
) -> Result<Vec<Drawn>, CudaError>
where
    E::Memory: DeviceMemory,
{
    if draws.is_empty() {
        return Ok(Vec::new());
    }
    buffers.drawn.tensor().read(executor, 0..draws.len())
}
