//! bf16 products in one tensor-core shape and one order of K, at every row count.

use cpu_kernels::{KSlices, NUM_SLICES};
use half::bf16;

use super::blocks::{CHANNELS, LaunchShape, TILE_ROWS, Variant};
use super::{MAX_GRID_YZ, PANEL_COLUMNS};
use crate::cuda::CudaError;
use crate::cuda::blas::{Product, ProductShape};
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::{GEMM_BF16, GEMM_TILED, Kernel};

/// Numbers per load of a lane: slices must not cut them.
pub(crate) const GRAIN: usize = 8;
/// Maximum number of rows per launch: far more than a pass has, and offsets inside a block's operands stay
/// below 2^32.
const MAX_ROWS: usize = 1 << 21;

const FAMILY: KernelFamily = KernelFamily {
    few: [[GEMM_BF16.kernel(0), GEMM_BF16.kernel(1)], [GEMM_BF16.kernel(2), GEMM_BF16.kernel(3)]],
    tiled: &[GEMM_TILED.kernel(0), GEMM_TILED.kernel(1), GEMM_TILED.kernel(2)],
};

/// Returns the borders of K between the slices that are summed separately: the contract's slices, if it
/// defines any, else eighths of K, of whole panels where each slice has at least one.
pub(crate) fn borders(slices: &KSlices, grain: usize) -> Vec<u32> {
    let ranges = slices.ranges();
    if ranges.len() == NUM_SLICES {
        return std::iter::once(0).chain(ranges.iter().map(|slice| slice.end as u32)).collect();
    }
    let k = ranges.last().map_or(0, |slice| slice.end);
    let has_panels = k.is_multiple_of(PANEL_COLUMNS) && k >= NUM_SLICES * PANEL_COLUMNS;
    whole_borders(k, if has_panels { PANEL_COLUMNS.max(grain) } else { grain })
}

/// Eighths of K in whole grains, for products whose order the contract leaves to the kernel.
fn whole_borders(k: usize, grain: usize) -> Vec<u32> {
    let slices = KSlices::eighths(k, grain);
    std::iter::once(0).chain(slices.ranges().iter().map(|slice| slice.end as u32)).collect()
}

/// Returns an error unless there are nine borders, ascending from 0 to `k`, all multiples of `grain`.
pub(crate) fn check_borders(
    kernel: &'static str,
    borders: &[u32],
    (k, grain): (usize, usize),
) -> Result<(), CudaError> {
    check(kernel, ("k", k), k > 0 && k.is_multiple_of(grain), format_args!("a multiple of {grain}"))?;
    let ends_right = borders.first() == Some(&0) && borders.last() == Some(&(k as u32));
    let whole = borders.iter().all(|&border| (border as usize).is_multiple_of(grain));
    let is_good = borders.len() == NUM_SLICES + 1 && ends_right && borders.is_sorted() && whole;
    check(
        kernel,
        ("borders", borders.len()),
        is_good,
        format_args!("nine, from 0 to {k}, multiples of {grain}"),
    )
}

/// Checks the operands that products of all formats share: borders, bias `[n]`, `out` `[rows, n]`.
pub(super) fn check_product<M: DeviceMemory>(
    kernel: &'static str,
    ProductShape { rows, n, .. }: ProductShape,
    borders: &Tensor<M, u32>,
    bias: Option<&Tensor<M, f32>>,
    out: &Tensor<M, f32>,
) -> Result<(), CudaError> {
    check_len(kernel, "borders", borders.len(), NUM_SLICES + 1)?;
    check_len(kernel, "out", out.len(), rows * n)?;
    check_len(kernel, "bias", bias.map_or(n, Tensor::len), n)
}

/// Kernels of one format: those for few rows (8 and 32, each with 16 and with fewer channels per group), and
/// those whose warps share tiles, of the first [`TILE_ROWS`].
pub(super) struct KernelFamily {
    pub(super) few: [[&'static Kernel; 2]; 2],
    pub(super) tiled: &'static [&'static Kernel],
}

/// A kernel, its grid, and the parameters that divide the work among its warps.
#[derive(Debug)]
pub(super) struct ChosenKernel {
    pub(super) kernel: &'static Kernel,
    pub(super) grid: [u32; 3],
    cut: Option<[usize; 3]>,
}

impl ChosenKernel {
    /// Chooses the kernel for this number of rows and channels over slices with these borders; `forced`
    /// selects a kernel, for tests.
    pub(super) fn new(
        family: &KernelFamily,
        (rows, n): (usize, usize),
        borders: &[u32],
        forced: Option<Variant>,
    ) -> Result<Self, CudaError> {
        let name = family.few[0][0].name;
        check(name, ("rows", rows), rows > 0 && rows <= MAX_ROWS, format_args!("1 to {MAX_ROWS}"))?;
        check(name, ("n", n), n > 0, "at least 1")?;
        let heights = &TILE_ROWS[..family.tiled.len()];
        let variant = forced.unwrap_or_else(|| Variant::choose((rows, n), borders, heights));
        let LaunchShape { grid, cut } = LaunchShape::new(variant, (rows, n), borders);
        let (kernel, cut) = match variant {
            Variant::Few { rows, channels } => {
                (family.few[usize::from(rows > 8)][usize::from(channels < CHANNELS[0])], Some(cut))
            }
            Variant::Tiled { rows } => {
                let tile = heights.iter().position(|height| *height == rows);
                let tile = tile.ok_or_else(|| CudaError::BadLaunch {
                    kernel: name,
                    what: "rows of a tile",
                    found: rows,
                    expected: format!("one of {heights:?}"),
                })?;
                (family.tiled[tile], None)
            }
        };
        check(
            kernel.name,
            ("blocks along n", grid[1]),
            grid[1] <= MAX_GRID_YZ,
            format_args!("at most {MAX_GRID_YZ}"),
        )?;
        Ok(Self { kernel, grid: [grid[0] as u32, grid[1] as u32, 1], cut })
    }

    pub(super) fn is_tiled(&self) -> bool {
        self.cut.is_none()
    }

    /// Adds the parameters of the cut, if the kernel takes them.
    pub(super) fn params(&self, params: Params) -> Params {
        self.cut.iter().flatten().fold(params, |params, number| params.u32(*number))
    }
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
    /// Borders on the device, and the same borders on the host.
    pub(crate) borders: (&'a Tensor<M, u32>, &'a [u32]),
    /// `[rows, n]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
}

impl<M: DeviceMemory> GemmBf16<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, shape: ProductShape) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        self.launch_variant(executor, shape, None)
    }

    /// Launches a given kernel, for tests.
    pub(crate) fn launch_variant<E>(
        self,
        executor: &mut E,
        shape: ProductShape,
        forced: Option<Variant>,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let ProductShape { rows, n, k } = shape;
        let chosen = ChosenKernel::new(&FAMILY, (rows, n), self.borders.1, forced)?;
        let kernel = chosen.kernel;
        check_borders(kernel.name, self.borders.1, (k, GRAIN))?;
        check_len(kernel.name, "x", self.x.len(), rows * k)?;
        check_len(kernel.name, "weights", self.weights.len(), n * k)?;
        check_product(kernel.name, shape, self.borders.0, self.bias, self.out)?;
        let params =
            Params::default().read(self.x).read(self.weights).read_if(self.bias).read(self.borders.0);
        let params = chosen.params(params.write(self.out).u32(rows).u32(n).u32(k));
        // SAFETY: these are the kernel's parameters; the checks ensure that every element is in bounds.
        unsafe { executor.launch(kernel, chosen.grid, &mut { params }) }
    }

    /// Computes the product with the executor's library, without the bias. Returns whether it did: the
    /// executor may have no library, or not use it for this number of rows. The order of sums is the
    /// library's.
    pub(crate) fn launch_cublaslt<E>(
        &mut self,
        executor: &mut E,
        shape: ProductShape,
    ) -> Result<bool, CudaError>
    where
        E: Executor<Memory = M>,
    {
        let (name, ProductShape { rows, n, k }) = ("a product by cublaslt", shape);
        let sizes = rows * n * k;
        check(name, ("numbers to multiply", sizes), sizes > 0, "at least 1")?;
        check_len(name, "x", self.x.len(), rows * k)?;
        check_len(name, "weights", self.weights.len(), n * k)?;
        check_len(name, "out", self.out.len(), rows * n)?;
        let (x, weights, out) = (self.x.address(), self.weights.address(), self.out.address());
        // SAFETY: the checks ensure that every element is in bounds.
        unsafe { executor.multiply(&Product { x, weights, out, shape }) }
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
        assert_eq!(borders(&KSlices::whole(896), 8), [0, 64, 192, 320, 448, 512, 640, 768, 896]);
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
        for (rows, n, says) in [(0, 16, "rows is 0"), (MAX_ROWS + 1, 16, "rows is"), (1, 0, "n is 0")] {
            let error =
                ChosenKernel::new(&FAMILY, (rows, n), &whole_borders(64, 8), None).unwrap_err().to_string();
            assert!(error.starts_with("gemm_bf16_8: ") && error.contains(says), "{error}");
        }
    }

    #[test]
    fn the_kernel_fits_the_rows() {
        let chosen = |rows, n| ChosenKernel::new(&FAMILY, (rows, n), &whole_borders(4096, 8), None).unwrap();
        for (rows, n, name) in [
            (1, 4096, "gemm_bf16_8"),
            (8, 1280, "gemm_bf16_8_narrow"),
            (9, 4096, "gemm_bf16_32"),
            (32, 1280, "gemm_bf16_32_narrow"),
            (64, 28_672, "gemm_bf16_tiled_64"),
            (160, 28_672, "gemm_bf16_tiled_80"),
            (160, 1280, "gemm_bf16_32"),
        ] {
            assert_eq!(chosen(rows, n).kernel.name, name, "{rows} x {n}");
        }
        assert_eq!(chosen(160, 28_672).grid, [2, 224, 1]);
    }
}
