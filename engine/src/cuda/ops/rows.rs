//! Operations on single rows or numbers. Shapes and twins are documented in the kernel files.

use half::bf16;

use super::{GroupSums, InputLayout, PANEL_COLUMNS, ProductInput, check_grid};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, View, check, check_len};
use crate::cuda::sources::{EMBEDDING, Kernel, RMS_NORM, ROWS, SWIGLU};

/// Rows of the embedding table, widened to f32. Ids must be below the table's number of rows: the builder of
/// the batch checks them.
#[derive(Debug)]
pub(crate) struct Embedding<'a, M> {
    /// `[vocab, hidden]`, row after row or in tiles.
    pub(crate) table: &'a Tensor<M, bf16>,
    pub(crate) is_tiled: bool,
    /// `[rows]`.
    pub(crate) token_ids: View<'a, u32>,
    /// `[rows, hidden]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
}

impl<M: DeviceMemory> Embedding<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, rows: usize, hidden: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let kernel = EMBEDDING.kernel(0);
        check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
        check_len(kernel.name, "token_ids", self.token_ids.len(), rows)?;
        check_len(kernel.name, "out", self.out.len(), rows * hidden)?;
        check(
            kernel.name,
            ("table", self.table.len()),
            self.table.len().is_multiple_of(hidden),
            "whole rows",
        )?;
        let params = Params::default().read(self.table).view(self.token_ids).write(self.out).u32(hidden);
        let params = params.u32(usize::from(self.is_tiled));
        // SAFETY: these are the kernel's parameters; the checks ensure that rows of `token_ids` and `out` are
        // in bounds, the caller that rows of the table are.
        unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }
    }
}

/// RMS norm of rows, optionally fused with a preceding add and a following rounding.
#[derive(Debug)]
pub(crate) struct RmsNorm<'a, M> {
    /// `[rows, width]`; written only by the variant that adds first.
    pub(crate) x: &'a Tensor<M, f32>,
    /// `[width]`.
    pub(crate) weight: &'a Tensor<M, f32>,
    pub(crate) eps: f32,
    /// `[rows, width]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
    /// `[rows, width]`: `out` as the input of a product.
    pub(crate) rounded: Option<ProductInput<'a, M>>,
}

impl<M: DeviceMemory> RmsNorm<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, rows: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        // SAFETY: nothing is added, so `x` is not written.
        unsafe { self.launch_with_add(executor, rows, None) }
    }

    /// Adds `delta` to `x` in place, if it is given, then normalizes it.
    ///
    /// # Safety
    /// `delta` must be sums of `rows * width` numbers that outlive the launch, and the owner of `x` must
    /// expect it to be written.
    pub(crate) unsafe fn launch_with_add<E>(
        self,
        executor: &mut E,
        rows: usize,
        delta: Option<GroupSums>,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let (kernel, width) = (RMS_NORM.kernel(0), self.weight.len());
        check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
        check_len(kernel.name, "x", self.x.len(), rows * width)?;
        check_len(kernel.name, "out", self.out.len(), rows * width)?;
        let (rounded, panels) = check_rounded(kernel.name, self.rounded, (rows, width))?;
        check_len(kernel.name, "delta", delta.map_or(rows * width, |delta| delta.len()), rows * width)?;
        let (delta, [groups, slices]) = delta.map_or((0, [1, 8]), |delta| delta.params());
        let params = Params::default().read(self.x).u64(delta).read(self.weight).write(self.out);
        let params = params.write_if(rounded).u32(width).f32(self.eps).u32(panels).u32(groups).u32(slices);
        // SAFETY: these are the kernel's parameters; the checks and this function's contract ensure that
        // every row is in bounds.
        unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }
    }
}

/// `sum += x` for the first `len` numbers of both.
pub(crate) fn add<E: Executor>(
    executor: &mut E,
    sum: &mut Tensor<E::Memory, f32>,
    x: &Tensor<E::Memory, f32>,
    len: usize,
) -> Result<(), CudaError> {
    let kernel = ROWS.kernel(0);
    check_len(kernel.name, "sum", sum.len(), len)?;
    check_len(kernel.name, "x", x.len(), len)?;
    // SAFETY: the checks ensure that every number is in bounds.
    unsafe { add_at(executor, sum.address(), x.address(), len) }
}

/// [`add`] by addresses.
///
/// # Safety
/// Both must hold `len` numbers that outlive the launch, and nothing else may write `sum`.
pub(crate) unsafe fn add_at<E: Executor>(
    executor: &mut E,
    sum: u64,
    x: u64,
    len: usize,
) -> Result<(), CudaError> {
    let kernel = ROWS.kernel(0);
    let params = Params::default().u64(sum).u64(x).u64(len as u64);
    // SAFETY: these are the kernel's parameters, by this function's contract.
    unsafe { executor.launch(kernel, by_number(kernel, len)?, &mut { params }) }
}

/// Rounds the first `len` numbers to bf16.
pub(crate) fn to_bf16<E: Executor>(
    executor: &mut E,
    x: &Tensor<E::Memory, f32>,
    out: &mut Tensor<E::Memory, bf16>,
    len: usize,
) -> Result<(), CudaError> {
    let kernel = ROWS.kernel(1);
    check_len(kernel.name, "x", x.len(), len)?;
    check_len(kernel.name, "out", out.len(), len)?;
    let params = Params::default().read(x).write(out).u64(len as u64);
    // SAFETY: these are the kernel's parameters; the checks ensure that every number is in bounds.
    unsafe { executor.launch(kernel, by_number(kernel, len)?, &mut { params }) }
}

/// Rounds rows to bf16 in panels; `width` is a multiple of 64.
pub(crate) fn to_panels<E: Executor>(
    executor: &mut E,
    x: &Tensor<E::Memory, f32>,
    out: &mut Tensor<E::Memory, bf16>,
    (rows, width): (usize, usize),
) -> Result<(), CudaError> {
    let kernel = ROWS.kernel(2);
    check_grid(kernel.name, "rows", rows)?;
    check(
        kernel.name,
        ("width", width),
        width > 0 && width.is_multiple_of(PANEL_COLUMNS),
        "a multiple of 64",
    )?;
    check_len(kernel.name, "x", x.len(), rows * width)?;
    let (out, panels) = check_rounded(kernel.name, Some((out, InputLayout::Panels)), (rows, width))?;
    let params = Params::default().read(x).write_if(out).u32(width).u32(panels);
    let grid = [width.div_ceil(4 * kernel.threads as usize) as u32, rows as u32, 1];
    // SAFETY: these are the kernel's parameters; the checks ensure that every row is in bounds.
    unsafe { executor.launch(kernel, grid, &mut { params }) }
}

/// A rounded output and the kernels' parameter `panels`.
type RoundedParams<'a, M> = (Option<&'a mut Tensor<M, bf16>>, usize);

/// Checks that a rounded output has room for its rows. Returns it and the kernels' parameter `panels`.
pub(super) fn check_rounded<'a, M: DeviceMemory>(
    kernel: &'static str,
    rounded: Option<ProductInput<'a, M>>,
    (rows, width): (usize, usize),
) -> Result<RoundedParams<'a, M>, CudaError> {
    let Some((tensor, layout)) = rounded else { return Ok((None, 0)) };
    check_len(kernel, "rounded", tensor.len(), layout.len(rows, width))?;
    let is_whole = layout == InputLayout::Rows || width.is_multiple_of(PANEL_COLUMNS);
    check(kernel, ("width", width), is_whole, "a multiple of 64 in panels")?;
    Ok((Some(tensor), layout.panels(rows)))
}

/// Copies the rows of `x` `[*, width]` that `which` lists -> `out`. The rows must exist: the builder of the
/// batch counts them.
pub(crate) fn take_rows<E: Executor>(
    executor: &mut E,
    (x, width): (&Tensor<E::Memory, f32>, usize),
    which: View<'_, u32>,
    out: &mut Tensor<E::Memory, f32>,
) -> Result<(), CudaError> {
    let (kernel, rows) = (ROWS.kernel(3), which.len());
    check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
    check_len(kernel.name, "out", out.len(), rows * width)?;
    let params = Params::default().read(x).view(which).write(out).u32(width);
    // SAFETY: these are the kernel's parameters; the check ensures that output rows are in bounds, the caller
    // that input rows are.
    unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }
}

/// Scales and biases of channels, applied to a finished sum.
#[derive(Debug)]
pub(crate) struct FinishSum<'a, M> {
    /// `[rows, width]`, changed in place.
    pub(crate) sum: &'a mut Tensor<M, f32>,
    /// `[width]`.
    pub(crate) scales: Option<&'a Tensor<M, f32>>,
    /// `[width]`.
    pub(crate) bias: Option<&'a Tensor<M, f32>>,
}

impl<M: DeviceMemory> FinishSum<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, rows: usize, width: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let (kernel, Self { sum, scales, bias }) = (ROWS.kernel(4), self);
        check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
        check_len(kernel.name, "sum", sum.len(), rows * width)?;
        check_len(kernel.name, "scales", scales.map_or(width, Tensor::len), width)?;
        check_len(kernel.name, "bias", bias.map_or(width, Tensor::len), width)?;
        let params = Params::default().write(sum).read_if(scales).read_if(bias).u32(width);
        // SAFETY: these are the kernel's parameters; the checks ensure that every number is in bounds.
        unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }
    }
}

/// silu(gate) * up of rows, optionally fused with a following rounding.
#[derive(Debug)]
pub(crate) struct Swiglu<'a, M> {
    /// `[rows, 2 * width]`.
    pub(crate) gate_up: &'a Tensor<M, f32>,
    /// `[rows, width]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
    /// `[rows, width]`: `out` as the input of a product.
    pub(crate) rounded: Option<ProductInput<'a, M>>,
}

impl<M: DeviceMemory> Swiglu<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, rows: usize, width: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let (kernel, Self { gate_up, out, rounded }) = (SWIGLU.kernel(0), self);
        check_grid(kernel.name, "rows", rows)?;
        check_len(kernel.name, "gate_up", gate_up.len(), rows * 2 * width)?;
        check_len(kernel.name, "out", out.len(), rows * width)?;
        let (rounded, panels) = check_rounded(kernel.name, rounded, (rows, width))?;
        let params = Params::default().read(gate_up).write(out).write_if(rounded).u32(width).u32(panels);
        let grid = [width.div_ceil(4 * kernel.threads as usize) as u32, rows as u32, 1];
        // SAFETY: these are the kernel's parameters; the checks ensure that every row is in bounds.
        unsafe { executor.launch(kernel, grid, &mut { params }) }
    }
}

/// Returns a grid with one thread per number.
fn by_number(kernel: &'static Kernel, len: usize) -> Result<[u32; 3], CudaError> {
    let blocks = len.div_ceil(kernel.threads as usize);
    check(kernel.name, ("numbers", len), len > 0 && blocks < 1 << 31, "1 to 2^31 blocks of them")?;
    Ok([blocks as u32, 1, 1])
}
