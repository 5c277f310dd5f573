//! min-p, top-k and top-p on the device: excluded tokens are masked, so that a draw sees only the kept ones.

use speculation::SamplingParams;

use super::draw::{LogitsShape, PART, num_parts};
use super::{DrawBuffers, StepBuffer};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check};
use crate::cuda::sources::FILTERS;

/// One row's filters, in the layout of `filters.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct FilterRow {
    /// Row of the logits.
    pub(crate) row: u32,
    pub(crate) top_k: u32,
    pub(crate) top_p: f32,
    pub(crate) temperature: f32,
    /// Negative infinity without min_p.
    ln_min_p: f64,
}

impl FilterRow {
    /// Returns the filters of a sequence on row `row`, or `None` if it has none or is greedy.
    pub(crate) fn new(row: u32, sampling: &SamplingParams) -> Option<Self> {
        if sampling.is_greedy() || !sampling.has_filters() {
            return None;
        }
        let SamplingParams { top_k, top_p, temperature, min_p, .. } = *sampling;
        // A min_p of 0 has the logarithm -infinity, which excludes nothing.
        let ln_min_p = if min_p > 0.0 { speculation::math::ln(f64::from(min_p)) } else { f64::NEG_INFINITY };
        Some(Self { row, top_k, top_p, temperature, ln_min_p })
    }

    /// The same on another row.
    pub(crate) fn of_row(self, row: u32) -> Self {
        Self { row, ..self }
    }
}

/// Maximum number of sorted candidates per part and per row: `CANDIDATES` of `filters.cu`.
const CANDIDATES: usize = 1024;
/// Rows filtered per batch; further batches reuse the same memory.
const ROWS: usize = 64;

/// Size of the candidates of one batch of rows of `vocab` tokens, in bytes.
pub(crate) fn candidate_bytes(vocab: usize) -> usize {
    ROWS * vocab.div_ceil(PART) * CANDIDATES * size_of::<u64>()
}

/// Summary of a part of a row, in the layout of `filters.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
struct FilterPart {
    max: f64,
    sum: f64,
    bad: u32,
    allowed: u32,
    num: u32,
    unused: u32,
}

/// Intermediate results of the filter kernels, and the rows that they could not decide.
#[derive(Debug)]
pub(super) struct FilterBuffers<M> {
    parts: StepBuffer<M, FilterPart>,
    ranks: StepBuffer<M, u64>,
    last: StepBuffer<M, u64>,
    undecided: StepBuffer<M, u32>,
}

impl<M> Default for FilterBuffers<M> {
    fn default() -> Self {
        Self {
            parts: StepBuffer::default(),
            ranks: StepBuffer::default(),
            last: StepBuffer::default(),
            undecided: StepBuffer::default(),
        }
    }
}

/// Masks the tokens that `filters` exclude in rows of `logits` `[*, stride]`, of which the first `vocab`
/// columns are used; [`undecided`] returns the rows that it could not decide.
pub(crate) fn apply_filters<E: Executor>(
    executor: &mut E,
    buffers: &mut DrawBuffers<E::Memory>,
    logits: &mut Tensor<E::Memory, f32>,
    filters: &[FilterRow],
    shape: LogitsShape,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let [find, join, mask] = [0, 1, 2].map(|index| FILTERS.kernel(index));
    if filters.is_empty() {
        return Ok(());
    }
    let LogitsShape { vocab, stride } = shape;
    let num_parts = num_parts(find.name, shape)?;
    let last = filters.iter().map(|filter| filter.row as usize).max().unwrap_or(0);
    let rows = logits.len() / stride;
    check(find.name, ("a filtered row", last), last < rows, format!("below {rows}"))?;
    let most = filters.len().min(ROWS);
    let on_device = buffers.filters.fill(executor, filters, "filters")?;
    let FilterBuffers { parts, ranks, last, undecided } = &mut buffers.filtering;
    let parts = parts.resize(executor, most * num_parts, "parts of filtered rows")?;
    let ranks = ranks.resize(executor, most * num_parts * CANDIDATES, "candidates of filters")?;
    let last = last.resize(executor, filters.len(), "last tokens that filters keep")?;
    let undecided = undecided.resize(executor, filters.len(), "undecided rows")?;
    for first in (0..filters.len()).step_by(ROWS) {
        let rows = (filters.len() - first).min(ROWS) as u32;
        let (by_part, by_row) = ([rows, num_parts as u32, 1], [rows, 1, 1]);
        let params = Params::default().read(logits).read_from(on_device, first).write(parts).write(ranks);
        // SAFETY: these are the kernel's parameters; the checks ensure that every row is in bounds, and parts
        // and candidates have room for this number of rows.
        unsafe { executor.launch(find, by_part, &mut { params.u32(vocab).u32(stride) }) }?;
        let params = Params::default().read(parts).read(ranks).read_from(on_device, first);
        let params = params.write_from(last, first).write_from(undecided, first).u32(vocab).u32(num_parts);
        // SAFETY: as above.
        unsafe { executor.launch(join, by_row, &mut { params }) }?;
        let params = Params::default().write(logits).read_from(on_device, first).read_from(last, first);
        // SAFETY: as above.
        unsafe { executor.launch(mask, by_part, &mut { params.u32(vocab).u32(stride) }) }?;
    }
    Ok(())
}

/// Waits for the latest [`apply_filters`], which had these filters, and returns the rows that it could not
/// decide and left unchanged.
pub(crate) fn undecided<E: Executor>(
    executor: &mut E,
    buffers: &DrawBuffers<E::Memory>,
    filters: &[FilterRow],
) -> Result<Vec<u32>, CudaError>
where
    E::Memory: DeviceMemory,
{
    if filters.is_empty() {
        return Ok(Vec::new());
    }
    let said = buffers.filtering.undecided.tensor().read(executor, 0..filters.len())?;
    Ok(filters.iter().zip(said).filter(|(_, said)| *said != 0).map(|(filter, _)| filter.row).collect())
}
