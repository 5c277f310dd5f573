//! bf16 products in one tensor-core shape and one order of K, whatever the number of rows.

use half::bf16;

use super::MAX_GRID_YZ;
use crate::cuda::CudaError;
use crate::cuda::blas::Product;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::{GEMM_BF16, Kernel};
use crate::k_slices::{KSlices, NUM_SLICES};

/// Numbers that a lane reads at a time: slices must not cut them.
pub(crate) const GRAIN: usize = 8;
/// Output columns of a block.
pub(super) const COLUMNS: usize = 16;
/// Rows of a block of the narrow and of the wide kernel.
pub(super) const ROWS: [usize; 2] = [8, 32];

/// The borders of K that a kernel's eight warps sum by themselves: the contract's slices where it cuts.
pub(crate) fn borders(slices: &KSlices, grain: usize) -> Vec<u32> {
    let ranges = slices.ranges();
    if ranges.len() == NUM_SLICES {
        return std::iter::once(0).chain(ranges.iter().map(|slice| slice.end as u32)).collect();
    }
    let k = ranges.last().map_or(0, |slice| slice.end);
    whole_borders(k, grain)
}

/// Eighths of K in whole grains, where the contract leaves the order to the kernel.
fn whole_borders(k: usize, grain: usize) -> Vec<u32> {
    let slices = KSlices::eighths(k, grain);
    std::iter::once(0).chain(slices.ranges().iter().map(|slice| slice.end as u32)).collect()
}

/// What is wrong with borders: not nine, not ascending from 0 to `k`, or not on whole grains.
pub(crate) fn check_borders(
    kernel: &'static str,
    borders: &[u32],
    (k, grain): (usize, usize),
) -> Result<(), CudaError> {
    check(kernel, ("k", k), k > 0 && k.is_multiple_of(grain), format!("a multiple of {grain}"))?;
    let ends_right = borders.first() == Some(&0) && borders.last() == Some(&(k as u32));
    let whole = borders.iter().all(|&border| (border as usize).is_multiple_of(grain));
    let is_good = borders.len() == NUM_SLICES + 1 && ends_right && borders.is_sorted() && whole;
    check(kernel, ("borders", borders.len()), is_good, format!("nine, from 0 to {k}, multiples of {grain}"))
}

/// What every product holds its operands to: weights `[n, k]`, borders, bias `[n]`, `out` `[rows, n]`.
pub(super) fn check_product<T: bytemuck::Pod, M: DeviceMemory>(
    kernel: &'static str,
    (rows, n, k): (usize, usize, usize),
    (weights, bias): (&Tensor<M, T>, Option<&Tensor<M, f32>>),
    borders: &Tensor<M, u32>,
    out: &Tensor<M, f32>,
) -> Result<(), CudaError> {
    check_len(kernel, "weights", weights.len(), n * k)?;
    check_len(kernel, "borders", borders.len(), NUM_SLICES + 1)?;
    check_len(kernel, "out", out.len(), rows * n)?;
    check_len(kernel, "bias", bias.map_or(n, Tensor::len), n)
}

/// The kernel for so many rows, and its grid.
pub(super) fn choose(
    kernels: [&'static Kernel; 2],
    rows: usize,
    n: usize,
) -> Result<(&'static Kernel, [u32; 3]), CudaError> {
    let wide = usize::from(rows > ROWS[0]);
    let (kernel, row_blocks) = (kernels[wide], rows.div_ceil(ROWS[wide]));
    check(kernel.name, ("rows", rows), rows > 0 && row_blocks <= MAX_GRID_YZ, "1 to 2 million")?;
    check(kernel.name, ("n", n), n > 0, "at least 1")?;
    Ok((kernel, [n.div_ceil(COLUMNS) as u32, row_blocks as u32, 1]))
}

/// `x` times `weights`.
#[derive(Debug)]
pub(crate) struct GemmBf16<'a, M> {
    /// `[rows, k]`.
    pub(crate) x: &'a Tensor<M, bf16>,
    /// `[n, k]`.
    pub(crate) weights: &'a Tensor<M, bf16>,
    /// `[n]`.
    pub(crate) bias: Option<&'a Tensor<M, f32>>,
    /// On the device and, the same, on the host.
    pub(crate) borders: (&'a Tensor<M, u32>, &'a [u32]),
    /// `[rows, n]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
}

impl<M: DeviceMemory> GemmBf16<'_, M> {
    pub(crate) fn launch<E>(
        self,
        executor: &mut E,
        (rows, n, k): (usize, usize, usize),
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let (kernel, grid) = choose([GEMM_BF16.kernel(0), GEMM_BF16.kernel(1)], rows, n)?;
        check_borders(kernel.name, self.borders.1, (k, GRAIN))?;
        check_len(kernel.name, "x", self.x.len(), rows * k)?;
        let operands = (self.weights, self.bias);
        check_product(kernel.name, (rows, n, k), operands, self.borders.0, self.out)?;
        let params =
            Params::default().read(self.x).read(self.weights).read_if(self.bias).read(self.borders.0);
        let params = params.write(self.out).u32(rows).u32(n).u32(k);
        // SAFETY: the kernel's parameters; every element is there by the checks.
        unsafe { executor.launch(kernel, grid, &mut { params }) }
    }

    /// The same by the executor's library, without the bias, where it has one and takes it for so many rows; says whether it did. The
    /// order of sums is the library's.
    pub(crate) fn by_library<E>(
        &mut self,
        executor: &mut E,
        (rows, n, k): (usize, usize, usize),
    ) -> Result<bool, CudaError>
    where
        E: Executor<Memory = M>,
    {
        let name = "a product by cublaslt";
        let sizes = rows * n * k;
        check(name, ("numbers to multiply", sizes), sizes > 0, "at least 1")?;
        check_len(name, "x", self.x.len(), rows * k)?;
        check_len(name, "weights", self.weights.len(), n * k)?;
        check_len(name, "out", self.out.len(), rows * n)?;
        let (x, weights, out) = (self.x.address(), self.weights.address(), self.out.address());
        // SAFETY: every element is there by the checks.
        unsafe { executor.multiply(&Product { x, weights, out, shape: [rows, n, k] }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borders_lie_on_whole_grains_and_end_at_k() {
        for k in [8, 16, 40, 352, 704, 4096, 14_336] {
            check_borders("test", &whole_borders(k, 8), (k, 8)).unwrap();
        }
        assert_eq!(borders(&KSlices::eighths(704, 32), 8), [0, 64, 160, 256, 352, 416, 512, 608, 704]);
        assert_eq!(borders(&KSlices::whole(64), 8), [0, 8, 16, 24, 32, 40, 48, 56, 64]);
    }

    #[test]
    fn what_a_kernel_cannot_run_is_refused_by_name() {
        let check = |borders: &[u32], k, says: &str| {
            let error = check_borders("gemm", borders, (k, 8)).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        };
        check(&[0, 1, 2, 3, 4, 5, 6, 7, 12], 12, "gemm: k is 12, expected a multiple of 8");
        check(&[0, 8, 8, 8, 8, 8, 8, 8], 8, "nine");
        check(&[0, 8, 4, 8, 8, 8, 8, 8, 8], 8, "nine");
        check(&[0, 8, 8, 8, 8, 8, 8, 8, 16], 8, "from 0 to 8");
        assert!(choose([GEMM_BF16.kernel(0), GEMM_BF16.kernel(1)], 0, 16).is_err());
    }

    #[test]
    fn blocks_cover_all_rows_and_columns() {
        let kernels = [GEMM_BF16.kernel(0), GEMM_BF16.kernel(1)];
        for rows in 1..200 {
            for n in [1, 15, 16, 17, 4096] {
                let (kernel, grid) = choose(kernels, rows, n).unwrap();
                let tile = if kernel.name.ends_with("_8") { 8 } else { 32 };
                assert!(grid[1] as usize * tile >= rows && (grid[1] as usize - 1) * tile < rows);
                assert!(grid[0] as usize * 16 >= n && (grid[0] as usize - 1) * 16 < n);
            }
        }
    }
}
