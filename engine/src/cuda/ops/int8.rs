//! int8 products (docs/contract.md C1): activations quantized per row and slice, exact sums.

use std::ops::Range;

use cpu_kernels::NUM_SLICES;

use super::blocks::Variant;
use super::gemm::{ChosenKernel, KernelFamily, check_borders, check_product};
use super::{INT8_PANEL_COLUMNS, MAX_GRID_YZ};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::{GEMM_TILED, INT8, Kernel};

/// Numbers per load of a lane.
pub(crate) const GRAIN: usize = 16;
/// From this K on, a sum of products could overflow i32.
pub(super) const MAX_K: usize = 1 << 17;

const FEW: [[&Kernel; 2]; 2] = [[INT8.kernel(1), INT8.kernel(2)], [INT8.kernel(3), INT8.kernel(4)]];
/// Kernels with one scale per row, and with one per row and slice.
const EXACT: KernelFamily =
    KernelFamily { few: FEW, tiled: &[GEMM_TILED.kernel(3), GEMM_TILED.kernel(4), GEMM_TILED.kernel(5)] };
const SLICED: KernelFamily =
    KernelFamily { few: FEW, tiled: &[GEMM_TILED.kernel(6), GEMM_TILED.kernel(7), GEMM_TILED.kernel(8)] };

/// Quantized rows: steps `[rows, k]` and scales `[rows, slices]`.
pub(crate) type Int8Rows<'a, M> = (&'a Tensor<M, i8>, &'a Tensor<M, f32>);

/// How quantized rows are in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepLayout {
    /// Row after row.
    Rows,
    /// Tiles of this many rows, a multiple of 8; a tile is panels of 8 rows by 128 columns (`step_index` of
    /// int8.cu).
    Tiles(usize),
}

impl StepLayout {
    /// One tile of `rows` rows: inputs of products of panels.
    pub(crate) fn one_tile(rows: usize) -> Self {
        Self::Tiles(rows.next_multiple_of(8))
    }

    /// Number of elements of `rows` rows.
    pub(crate) fn len(self, rows: usize, width: usize) -> usize {
        match self {
            Self::Rows => rows * width,
            Self::Tiles(of_tile) => rows.next_multiple_of(of_tile) * width,
        }
    }

    /// The kernel's parameter `panels`: panels of a tile, 0 for rows.
    fn check(self, kernel: &'static str, (to_row, kept): (usize, usize)) -> Result<usize, CudaError> {
        let Self::Tiles(of_tile) = self else { return Ok(0) };
        check(kernel, ("rows of a tile", of_tile), of_tile > 0 && of_tile.is_multiple_of(8), "whole panels")?;
        check(kernel, ("first row", to_row), to_row.is_multiple_of(of_tile), "whole tiles")?;
        check(kernel, ("columns", kept), kept.is_multiple_of(INT8_PANEL_COLUMNS), "whole panels")?;
        Ok(of_tile / 8)
    }
}

/// Quantizes rows to int8, with one scale per row and slice.
#[derive(Debug)]
pub(crate) struct QuantizeRows<'a, M> {
    /// `[rows, k]`.
    pub(crate) x: &'a Tensor<M, f32>,
    /// `[slices + 1]`, from 0 to k.
    pub(crate) borders: &'a Tensor<M, u32>,
    /// `[rows, columns.len()]`, from row `to_row` on.
    pub(crate) steps: &'a mut Tensor<M, i8>,
    pub(crate) layout: StepLayout,
    /// `[rows, slices]`, from row `to_row` on.
    pub(crate) scales: &'a mut Tensor<M, f32>,
    pub(crate) to_row: usize,
    /// Columns whose steps are stored; scales cover all columns.
    pub(crate) columns: Range<usize>,
}

impl<M: DeviceMemory> QuantizeRows<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, rows: usize, k: usize) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let kernel = INT8.kernel(0);
        let slices = self.borders.len().saturating_sub(1);
        check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
        check(kernel.name, ("slices", slices), (1..=MAX_GRID_YZ).contains(&slices), "at least 1")?;
        check_len(kernel.name, "x", self.x.len(), rows * k)?;
        let kept = self.columns.len();
        check(
            kernel.name,
            ("columns", self.columns.end),
            self.columns.end <= k,
            format_args!("at most {k}"),
        )?;
        let panels = self.layout.check(kernel.name, (self.to_row, kept))?;
        check_len(kernel.name, "steps", self.steps.len(), self.layout.len(self.to_row + rows, kept))?;
        check_len(kernel.name, "scales", self.scales.len(), (self.to_row + rows) * slices)?;
        let params = Params::default().read(self.x).read(self.borders);
        let params = params.write_from(self.steps, self.to_row * kept);
        let params = params.write_from(self.scales, self.to_row * slices);
        let params = params.u32(k).u32(self.columns.start).u32(kept).u32(panels);
        // SAFETY: these are the kernel's parameters; the checks ensure that rows are in bounds, and
        // `check_borders` of the product that uses the borders that they end at k.
        unsafe { executor.launch(kernel, [rows as u32, slices as u32, 1], &mut { params }) }
    }
}

/// Quantized `x` times quantized `weights`.
#[derive(Debug)]
pub(crate) struct GemmInt8<'a, M> {
    pub(crate) x: Int8Rows<'a, M>,
    /// `[n, k]`.
    pub(crate) weights: &'a Tensor<M, i8>,
    /// `[n]`; `None` for a rank's partial sum, which is scaled after the sum over ranks.
    pub(crate) channel_scales: Option<&'a Tensor<M, f32>>,
    /// `[n]`.
    pub(crate) bias: Option<&'a Tensor<M, f32>>,
    /// Nine borders on the device, and the same borders on the host.
    pub(crate) borders: (&'a Tensor<M, u32>, &'a [u32]),
    /// Scales per row: 1, or one for each slice of K.
    pub(crate) slices: usize,
    /// `[rows, n]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
}

impl<M: DeviceMemory> GemmInt8<'_, M> {
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
        let family = if self.slices == 1 { &EXACT } else { &SLICED };
        let chosen = ChosenKernel::new(family, (rows, n), self.borders.1, forced)?;
        let kernel = chosen.kernel;
        check_borders(kernel.name, self.borders.1, (k, GRAIN))?;
        check(kernel.name, ("k", k), k < MAX_K, format_args!("below {MAX_K}"))?;
        let is_good = self.slices == 1 || self.slices == NUM_SLICES;
        check(kernel.name, ("slices", self.slices), is_good, "1 or 8")?;
        check_len(kernel.name, "x", self.x.0.len(), rows * k)?;
        check_len(kernel.name, "x scales", self.x.1.len(), rows * self.slices)?;
        check_len(kernel.name, "channel_scales", self.channel_scales.map_or(n, Tensor::len), n)?;
        check_len(kernel.name, "weights", self.weights.len(), n * k)?;
        check_product(kernel.name, shape, self.borders.0, self.bias, self.out)?;
        let params = Params::default().read(self.x.0).read(self.x.1).read(self.weights);
        let params =
            params.read_if(self.channel_scales).read_if(self.bias).read(self.borders.0).write(self.out);
        let params = chosen.params(params.u32(rows).u32(n).u32(k));
        // Tiled kernels are compiled for a fixed number of scales.
        let params = if chosen.is_tiled() { params } else { params.u32(self.slices) };
        // SAFETY: these are the kernel's parameters; the checks ensure that every element is in bounds.
        unsafe { executor.launch(kernel, chosen.grid, &mut { params }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Many rows take shared tiles, with one scale or eight a row.
    #[test]
    fn the_kernel_fits_the_rows_and_their_scales() {
        let borders: Vec<u32> = (0..9).map(|slice| slice * 512).collect();
        for (rows, n, exact, sliced) in [
            (8, 4096, "gemm_int8_8", "gemm_int8_8"),
            (32, 28_672, "gemm_int8_32", "gemm_int8_32"),
            (40, 28_672, "gemm_int8_tiled_64", "gemm_int8_sliced_64"),
            (160, 28_672, "gemm_int8_tiled_80", "gemm_int8_sliced_80"),
            (160, 1280, "gemm_int8_32", "gemm_int8_32"),
            (2048, 4096, "gemm_int8_tiled_128", "gemm_int8_sliced_128"),
        ] {
            for (family, name) in [(&EXACT, exact), (&SLICED, sliced)] {
                let chosen = ChosenKernel::new(family, (rows, n), &borders, None).unwrap();
                assert_eq!(chosen.kernel.name, name, "{rows} x {n}");
            }
        }
    }
}
