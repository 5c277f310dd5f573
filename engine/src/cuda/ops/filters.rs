//! min-p, top-k and top-p on the device: excluded tokens are masked, so that a draw sees only the kept ones.

use speculation::SamplingParams;

use super::draw::{LogitsShape, PART, num_parts};
use super::step_arrays::{Downloaded, Place, StepArrays};
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

/// The filters of a step, intermediate results of their kernels, and the rows that they could not decide.
#[derive(Debug)]
pub(super) struct FilterBuffers<M> {
    filters: Vec<FilterRow>,
    on_device: Place<FilterRow>,
    parts: StepBuffer<M, FilterPart>,
    ranks: StepBuffer<M, u64>,
    last_kept: StepBuffer<M, u64>,
    undecided: Place<u32>,
}

impl<M> Default for FilterBuffers<M> {
    fn default() -> Self {
        Self {
            filters: Vec::new(),
            on_device: Place::EMPTY,
            parts: StepBuffer::default(),
            ranks: StepBuffer::default(),
            last_kept: StepBuffer::default(),
            undecided: Place::EMPTY,
        }
    }
}

impl<M> FilterBuffers<M> {
    /// Adds the filters of a step to its arrays.
    pub(super) fn prepare(&mut self, arrays: &mut StepArrays<M>, filters: Vec<FilterRow>) {
        self.on_device = arrays.put(&filters);
        self.undecided = arrays.reserve(filters.len());
        self.filters = filters;
    }

    /// Rows that could not be decided.
    pub(super) fn undecided(&self, results: &Downloaded) -> Vec<u32> {
        let said = results.get(&self.undecided);
        self.filters.iter().zip(said).filter(|(_, said)| *said != 0).map(|(filter, _)| filter.row).collect()
    }
}

/// Masks the tokens that the step's filters exclude in rows of `logits` `[*, stride]`, of which the first
/// `vocab` columns are used. Rows that it cannot decide are left unchanged
/// ([`undecided`](DrawBuffers::undecided)).
pub(crate) fn apply_filters<E: Executor>(
    executor: &mut E,
    buffers: &mut DrawBuffers<E::Memory>,
    logits: &mut Tensor<E::Memory, f32>,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let [find, join, mask] = [0, 1, 2].map(|index| FILTERS.kernel(index));
    let DrawBuffers { arrays, shape, filtering, .. } = buffers;
    let FilterBuffers { filters, on_device, parts, ranks, last_kept, undecided } = filtering;
    if filters.is_empty() {
        return Ok(());
    }
    let LogitsShape { vocab, stride } = *shape;
    let num_parts = num_parts(find.name, *shape)?;
    let last = filters.iter().map(|filter| filter.row as usize).max().unwrap_or(0);
    let rows = logits.len() / stride;
    check(find.name, ("a filtered row", last), last < rows, format_args!("below {rows}"))?;
    let most = filters.len().min(ROWS);
    let parts = parts.resize(executor, most * num_parts, "parts of filtered rows")?;
    let ranks = ranks.resize(executor, most * num_parts * CANDIDATES, "candidates of filters")?;
    let last_kept = last_kept.resize(executor, filters.len(), "last tokens that filters keep")?;
    let (on_device, undecided) = (arrays.input(on_device), arrays.result(undecided));
    for first in (0..filters.len()).step_by(ROWS) {
        let rows = (filters.len() - first).min(ROWS) as u32;
        let (by_part, by_row) = ([rows, num_parts as u32, 1], [rows, 1, 1]);
        let params = Params::default().read(logits).view_from(on_device, first).write(parts).write(ranks);
        // SAFETY: these are the kernel's parameters; the checks ensure that every row is in bounds, and parts
        // and candidates have room for this number of rows.
        unsafe { executor.launch(find, by_part, &mut { params.u32(vocab).u32(stride) }) }?;
        let params = Params::default().read(parts).read(ranks).view_from(on_device, first);
        let params = params.write_from(last_kept, first).view_from(undecided, first);
        // SAFETY: as above.
        unsafe { executor.launch(join, by_row, &mut { params.u32(vocab).u32(num_parts) }) }?;
        let params = Params::default().write(logits).view_from(on_device, first).read_from(last_kept, first);
        // SAFETY: as above.
        unsafe { executor.launch(mask, by_part, &mut { params.u32(vocab).u32(stride) }) }?;
    }
    Ok(())
}
