//! min-p, top-k and top-p where the logits are: what they bar is masked, so that a draw sees only what is kept.

use speculation::SamplingParams;

use super::DrawBuffers;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check};
use crate::cuda::sources::FILTERS;

/// One row's filters, as `filters.cu` reads them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct FilterRow {
    /// Of the logits.
    pub(crate) row: u32,
    pub(crate) top_k: u32,
    pub(crate) top_p: f32,
    pub(crate) temperature: f32,
    /// Negative infinity where there is no min_p.
    ln_min_p: f64,
}

impl FilterRow {
    /// The filters of a sequence on row `row`; nothing where it has none, or is greedy.
    pub(crate) fn new(row: u32, sampling: &SamplingParams) -> Option<Self> {
        if sampling.is_greedy() || !sampling.has_filters() {
            return None;
        }
        let SamplingParams { top_k, top_p, temperature, min_p, .. } = *sampling;
        // A min_p of 0 has a logarithm that nothing is below.
        let ln_min_p = if min_p > 0.0 { speculation::math::ln(f64::from(min_p)) } else { f64::NEG_INFINITY };
        Some(Self { row, top_k, top_p, temperature, ln_min_p })
    }

    /// The same on another row.
    pub(crate) fn of_row(self, row: u32) -> Self {
        Self { row, ..self }
    }
}

/// Masks what `filters` bar in rows of `logits` `[*, stride]`, of which the first `vocab` numbers count; [`undecided`] reads where it
/// could not.
pub(crate) fn keep<E: Executor>(
    executor: &mut E,
    buffers: &mut DrawBuffers<E::Memory>,
    logits: &mut Tensor<E::Memory, f32>,
    filters: &[FilterRow],
    (vocab, stride): (usize, usize),
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let kernel = FILTERS.kernel(0);
    if filters.is_empty() {
        return Ok(());
    }
    check(kernel.name, ("vocab", vocab), (1..=stride).contains(&vocab), format!("1 to {stride}"))?;
    let last = filters.iter().map(|filter| filter.row as usize).max().unwrap_or(0);
    let rows = logits.len() / stride;
    check(kernel.name, ("a filtered row", last), last < rows, format!("below {rows}"))?;
    let on_device = buffers.filters.fill(executor, filters, "filters")?;
    let undecided = buffers.undecided.make_room(executor, filters.len(), "undecided rows")?;
    let params = Params::default().write(logits).read(on_device).write(undecided).u32(vocab).u32(stride);
    // SAFETY: the kernel's parameters; every row is there by the checks.
    unsafe { executor.launch(kernel, [filters.len() as u32, 1, 1], &mut { params }) }
}

/// Waits for the last [`keep`], which had these filters, and reads which of the rows could not be decided and are as they were.
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
    let said = buffers.undecided.tensor().read(executor, 0..filters.len())?;
    Ok(filters.iter().zip(said).filter(|(_, said)| *said != 0).map(|(filter, _)| filter.row).collect())
}
