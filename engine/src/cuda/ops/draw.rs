//! The coupled draw on the device; only ids are copied to the host.

use speculation::SequenceSpec;
use speculation::noise::Purpose;

use super::filters::{FilterBuffers, FilterRow};
use super::logits::LogitEdit;
use super::step_arrays::{Downloaded, Place, StepArrays};
use super::{MAX_GRID_YZ, StepBuffer};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, View, check};
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
    /// Row of the logits, or [`NO_ROW`].
    pub(crate) row: u32,
    unused: u32,
}

/// Marks an entry without a draw (`NO_ROW` of `draw.cu`).
const NO_ROW: u32 = u32::MAX;

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
#[derive(Debug, Clone, Copy, Default)]
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
    check(kernel, ("vocab", vocab), (1..=stride).contains(&vocab), format_args!("1 to {stride}"))?;
    let parts = vocab.div_ceil(PART);
    check(kernel, ("parts of a row", parts), parts <= MAX_GRID_YZ, format_args!("at most {MAX_GRID_YZ}"))?;
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

/// Edits, filters and draws of a step, and the arrays of all its kernels; memory is reused between steps.
#[derive(Debug)]
pub(crate) struct DrawBuffers<M> {
    /// What kernels of the model and of draws read, and the results of draws.
    pub(crate) arrays: StepArrays<M>,
    pub(super) shape: LogitsShape,
    pub(super) edits: Place<LogitEdit>,
    pub(super) filtering: FilterBuffers<M>,
    draws: Vec<DrawRow>,
    on_device: Place<DrawRow>,
    parts: StepBuffer<M, DrawPart>,
    drawn: Place<Drawn>,
}

impl<M> Default for DrawBuffers<M> {
    fn default() -> Self {
        Self {
            arrays: StepArrays::default(),
            shape: LogitsShape::default(),
            edits: Place::EMPTY,
            filtering: FilterBuffers::default(),
            draws: Vec::new(),
            on_device: Place::EMPTY,
            parts: StepBuffer::default(),
            drawn: Place::EMPTY,
        }
    }
}

impl<M> DrawBuffers<M> {
    /// Begins a step: [`apply_filters`](super::apply_filters) applies `filters`, and [`draw`] makes `draws`,
    /// to rows of logits of this shape. Rows to score, rows with candidates, inputs of other kernels and edits
    /// ([`DrawBuffers::put_edits`]) are added next, then [`DrawBuffers::upload`].
    pub(crate) fn prepare(&mut self, shape: LogitsShape, filters: Vec<FilterRow>, draws: Vec<DrawRow>) {
        let len = draws.len();
        self.prepare_padded(shape, filters, (draws, len));
    }

    /// The same with `len` entries for draws, of which the last ones draw nothing.
    pub(crate) fn prepare_padded(
        &mut self,
        shape: LogitsShape,
        filters: Vec<FilterRow>,
        (mut draws, len): (Vec<DrawRow>, usize),
    ) {
        draws.resize(len, DrawRow { row: NO_ROW, ..bytemuck::Zeroable::zeroed() });
        self.shape = shape;
        self.arrays.clear();
        self.filtering.prepare(&mut self.arrays, filters);
        self.on_device = self.arrays.put(&draws);
        self.drawn = self.arrays.reserve(draws.len());
        self.draws = draws;
    }

    /// Results of the step's draws, followed by those of entries that draw nothing.
    pub(crate) fn drawn(&self, results: &Downloaded) -> Vec<Drawn> {
        results.get(&self.drawn)
    }

    /// Rows whose filters the device could not decide; it left them unchanged.
    pub(crate) fn undecided(&self, results: &Downloaded) -> Vec<u32> {
        self.filtering.undecided(results)
    }

    /// Number of the step's draws.
    pub(super) fn num_draws(&self) -> usize {
        self.draws.len()
    }
}

impl<M: DeviceMemory> DrawBuffers<M> {
    /// Uploads all that the step's kernels read: of edits those of the first launch.
    pub(crate) fn upload<E>(&mut self, executor: &mut E) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        self.arrays.upload(executor)
    }

    /// Waits for the step's kernels and downloads all their results.
    pub(crate) fn download<E>(&self, executor: &mut E) -> Result<Downloaded, CudaError>
    where
        E: Executor<Memory = M>,
    {
        self.arrays.download(executor)
    }

    /// Results of the step's draws on the device, once [`draw`] has run.
    pub(super) fn drawn_on_device(&self) -> View<'_, Drawn> {
        self.arrays.result(&self.drawn)
    }
}

/// Makes the step's draws from rows of `logits` `[*, stride]`, of which the first `vocab` columns are used.
pub(crate) fn draw<E: Executor>(
    executor: &mut E,
    buffers: &mut DrawBuffers<E::Memory>,
    logits: &Tensor<E::Memory, f32>,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let (kernel, join) = (DRAW.kernel(0), DRAW.kernel(1));
    let DrawBuffers { arrays, shape, draws, on_device, parts, drawn, .. } = buffers;
    if draws.is_empty() {
        return Ok(());
    }
    let LogitsShape { vocab, stride } = *shape;
    let num_parts = num_parts(kernel.name, *shape)?;
    let last =
        draws.iter().filter(|draw| draw.row != NO_ROW).map(|draw| draw.row as usize).max().unwrap_or(0);
    let rows = logits.len() / stride;
    check(kernel.name, ("a drawn row", last), last < rows, format_args!("below {rows}"))?;
    let parts = parts.resize(executor, draws.len() * num_parts, "parts of drawn rows")?;
    let (rows, drawn) = (arrays.input(on_device), arrays.result(drawn));
    let num_draws = draws.len() as u32;
    let params = Params::default().read(logits).view(rows).write(parts).u32(vocab).u32(stride);
    // SAFETY: these are the kernel's parameters; the checks ensure that every row is in bounds.
    unsafe { executor.launch(kernel, [num_draws, num_parts as u32, 1], &mut { params }) }?;
    let params = Params::default().read(parts).view(rows).view(drawn).u32(num_parts);
    // SAFETY: these are the kernel's parameters; parts and draws are those of the previous launch.
    unsafe { executor.launch(join, [num_draws, 1, 1], &mut { params }) }
}
