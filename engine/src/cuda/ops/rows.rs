//! What works on each row or number by itself. Shapes and twins stand in the kernels' heads.

use half::bf16;

use super::MAX_GRID_YZ;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, View, check, check_len};
use crate::cuda::sources::{EMBEDDING, Kernel, RMS_NORM, ROWS, SWIGLU};

/// Rows of a table, widened. Ids must be below the table's rows: whoever built the batch checked them.
#[derive(Debug)]
pub(crate) struct Embedding<'a, M> {
    /// `[vocab, hidden]`.
    pub(crate) table: &'a Tensor<M, bf16>,
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
        // SAFETY: the kernel's parameters; rows of `token_ids` and `out` are there by the checks, rows of the table
        // by the caller's.
        unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }
    }
}

/// Root mean square norm of rows, and what comes before and behind it.
#[derive(Debug)]
pub(crate) struct RmsNorm<'a, M> {
    /// `[rows, width]`; it is written only where something is added first.
    pub(crate) x: &'a Tensor<M, f32>,
    /// `[width]`.
    pub(crate) weight: &'a Tensor<M, f32>,
    pub(crate) eps: f32,
    /// `[rows, width]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
    /// `[rows, width]`: `out` as a product reads it.
    pub(crate) rounded: Option<&'a mut Tensor<M, bf16>>,
}

impl<M: DeviceMemory> RmsNorm<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, rows: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        // SAFETY: nothing is added, so `x` is not written.
        unsafe { self.launch_after_adding(executor, rows, 0) }
    }

    /// The same of `x + delta`, which `x` is then.
    ///
    /// # Safety
    /// `delta` is 0, for nothing, or the address of `rows * width` numbers that outlive the launch, and
    /// whoever holds `x` expects that it is written.
    pub(crate) unsafe fn launch_after_adding<E>(
        self,
        executor: &mut E,
        rows: usize,
        delta: u64,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let (kernel, width) = (RMS_NORM.kernel(0), self.weight.len());
        check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
        check_len(kernel.name, "x", self.x.len(), rows * width)?;
        check_len(kernel.name, "out", self.out.len(), rows * width)?;
        let rounded_len = self.rounded.as_ref().map_or(rows * width, |rounded| rounded.len());
        check_len(kernel.name, "rounded", rounded_len, rows * width)?;
        let params = Params::default().read(self.x).u64(delta).read(self.weight).write(self.out);
        let params = params.write_if(self.rounded).u32(width).f32(self.eps);
        // SAFETY: the kernel's parameters; every row is there by the checks and this function's contract.
        unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }
    }
}

/// `sum += x`, the first `len` numbers of both.
pub(crate) fn add<E: Executor>(
    executor: &mut E,
    sum: &mut Tensor<E::Memory, f32>,
    x: &Tensor<E::Memory, f32>,
    len: usize,
) -> Result<(), CudaError> {
    let kernel = ROWS.kernel(0);
    check_len(kernel.name, "sum", sum.len(), len)?;
    check_len(kernel.name, "x", x.len(), len)?;
    // SAFETY: every number is there by the checks.
    unsafe { add_at(executor, sum.address(), x.address(), len) }
}

/// The same by addresses.
///
/// # Safety
/// Both hold `len` numbers that outlive the launch, and nothing else writes `sum`.
pub(crate) unsafe fn add_at<E: Executor>(
    executor: &mut E,
    sum: u64,
    x: u64,
    len: usize,
) -> Result<(), CudaError> {
    let kernel = ROWS.kernel(0);
    let params = Params::default().u64(sum).u64(x).u64(len as u64);
    // SAFETY: the kernel's parameters, by this function's contract.
    unsafe { executor.launch(kernel, by_number(kernel, len)?, &mut { params }) }
}

/// The first `len` numbers, rounded.
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
    // SAFETY: the kernel's parameters; every number is there by the checks.
    unsafe { executor.launch(kernel, by_number(kernel, len)?, &mut { params }) }
}

/// Rows of `x` `[*, width]` that `which` names -> `out`. Each must be there: whoever built the batch counted them.
pub(crate) fn take_rows<E: Executor>(
    executor: &mut E,
    (x, width): (&Tensor<E::Memory, f32>, usize),
    which: View<'_, u32>,
    out: &mut Tensor<E::Memory, f32>,
) -> Result<(), CudaError> {
    let (kernel, rows) = (ROWS.kernel(2), which.len());
    check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
    check_len(kernel.name, "out", out.len(), rows * width)?;
    let params = Params::default().read(x).view(which).write(out).u32(width);
    // SAFETY: the kernel's parameters; output rows are there by the check, input rows by the caller's.
    unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }
}

/// `[width]`, where it is there.
type PerChannel<'a, M> = Option<&'a Tensor<M, f32>>;

/// Scales and biases of channels on `sum` `[rows, width]`, where they are there.
pub(crate) fn finish_sum<E: Executor>(
    executor: &mut E,
    sum: &mut Tensor<E::Memory, f32>,
    (scales, bias): (PerChannel<'_, E::Memory>, PerChannel<'_, E::Memory>),
    (rows, width): (usize, usize),
) -> Result<(), CudaError> {
    let kernel = ROWS.kernel(3);
    check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
    check_len(kernel.name, "sum", sum.len(), rows * width)?;
    check_len(kernel.name, "scales", scales.map_or(width, Tensor::len), width)?;
    check_len(kernel.name, "bias", bias.map_or(width, Tensor::len), width)?;
    let params = Params::default().write(sum).read_if(scales).read_if(bias).u32(width);
    // SAFETY: the kernel's parameters; every number is there by the checks.
    unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }
}

/// `gate_up` `[rows, 2 * width]` -> `out` `[rows, width]`, and the same as a product reads it.
pub(crate) fn swiglu<E: Executor>(
    executor: &mut E,
    gate_up: &Tensor<E::Memory, f32>,
    out: &mut Tensor<E::Memory, f32>,
    rounded: Option<&mut Tensor<E::Memory, bf16>>,
    (rows, width): (usize, usize),
) -> Result<(), CudaError> {
    let kernel = SWIGLU.kernel(0);
    check(kernel.name, ("rows", rows), (1..=MAX_GRID_YZ).contains(&rows), format!("1 to {MAX_GRID_YZ}"))?;
    check_len(kernel.name, "gate_up", gate_up.len(), rows * 2 * width)?;
    check_len(kernel.name, "out", out.len(), rows * width)?;
    check_len(kernel.name, "rounded", rounded.as_ref().map_or(rows * width, |x| x.len()), rows * width)?;
    let params = Params::default().read(gate_up).write(out).write_if(rounded).u32(width);
    let grid = [width.div_ceil(4 * kernel.threads as usize) as u32, rows as u32, 1];
    // SAFETY: the kernel's parameters; every row is there by the checks.
    unsafe { executor.launch(kernel, grid, &mut { params }) }
}

/// A grid with a thread for each number.
fn by_number(kernel: &'static Kernel, len: usize) -> Result<[u32; 3], CudaError> {
    let blocks = len.div_ceil(kernel.threads as usize);
    check(kernel.name, ("numbers", len), len > 0 && blocks < 1 << 31, "1 to 2^31 blocks of them")?;
    Ok([blocks as u32, 1, 1])
}
