//! Sums and concatenations of the ranks' partial results, read in place from each rank's memory.

use cpu_kernels::NUM_SLICES;

use super::check_grid;
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::RANKS;

/// Adds the first `len` numbers of all parts in the contract's tree -> `sum`.
///
/// # Safety
/// Each of `parts` must be the address of `len` f32 numbers that the executor's device can read, and that are
/// neither changed nor freed before the launch has finished.
pub(crate) unsafe fn sum_ranks<E: Executor>(
    executor: &mut E,
    parts: &[u64],
    sum: &mut Tensor<E::Memory, f32>,
    len: usize,
) -> Result<(), CudaError> {
    let kernel = RANKS.kernel(0);
    check_ranks(kernel.name, parts)?;
    check_len(kernel.name, "sum", sum.len(), len)?;
    let blocks = len.div_ceil(kernel.threads as usize);
    check(kernel.name, ("numbers", len), len > 0 && blocks < 1 << 31, "1 to 2^31 blocks of them")?;
    let params = addresses(parts).write(sum).u64(len as u64).u32(parts.len());
    // SAFETY: these are the kernel's parameters; the check ensures that `sum` is in bounds, this function's
    // contract that the parts are.
    unsafe { executor.launch(kernel, [blocks as u32, 1, 1], &mut { params }) }
}

/// Concatenates the columns of parts `[rows, width of the rank]` -> `out` `[rows, width]`. A rank's columns
/// begin at floor(rank * width / ranks).
///
/// # Safety
/// As for [`sum_ranks`], for each part's numbers.
pub(crate) unsafe fn concat_ranks<E: Executor>(
    executor: &mut E,
    parts: &[u64],
    out: &mut Tensor<E::Memory, f32>,
    (rows, width): (usize, usize),
) -> Result<(), CudaError> {
    let kernel = RANKS.kernel(1);
    check_ranks(kernel.name, parts)?;
    check_grid(kernel.name, "rows", rows)?;
    check(kernel.name, ("width", width), width >= parts.len(), "at least a column a rank")?;
    check_len(kernel.name, "out", out.len(), rows * width)?;
    let params = addresses(parts).write(out).u32(width).u32(parts.len());
    let grid = [width.div_ceil(kernel.threads as usize) as u32, rows as u32, 1];
    // SAFETY: these are the kernel's parameters; the check ensures that `out` is in bounds, this function's
    // contract that the parts are.
    unsafe { executor.launch(kernel, grid, &mut { params }) }
}

pub(super) fn check_ranks(kernel: &'static str, parts: &[u64]) -> Result<(), CudaError> {
    check(kernel, ("ranks", parts.len()), matches!(parts.len(), 1 | 2 | 4 | 8), "1, 2, 4 or 8")?;
    let missing = parts.iter().position(|&address| address == 0);
    check(kernel, ("a rank without a part", missing.unwrap_or(0)), missing.is_none(), "one part a rank")
}

/// One pointer for each possible rank.
pub(super) fn addresses(parts: &[u64]) -> Params {
    (0..NUM_SLICES).fold(Params::default(), |params, rank| params.u64(parts.get(rank).copied().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;

    #[test]
    fn what_ranks_cannot_be_is_refused_by_name() {
        let mut e = Emulator::build();
        let numbers = Tensor::of(&mut e, &[1.0f32; 6], "parts").unwrap();
        let (at, mut out) = (numbers.address(), Tensor::zeros(&mut e, 4, "sums").unwrap());
        let mut check = |parts: &[u64], len, says: &str| {
            // SAFETY: every address points to six numbers.
            let error = unsafe { sum_ranks(&mut e, parts, &mut out, len) }.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        };
        check(&[at; 3], 4, "sum_ranks: ranks is 3, expected 1, 2, 4 or 8");
        check(&[at, 0], 4, "a rank without a part is 1");
        check(&[at, at], 5, "sum is 4, expected at least 5 elements");
        check(&[at, at], 0, "numbers is 0");
        // SAFETY: as above.
        let error = unsafe { concat_ranks(&mut e, &[at; 4], &mut out, (1, 3)) }.unwrap_err().to_string();
        assert!(error.contains("width is 3, expected at least a column a rank"), "{error}");
    }
}
