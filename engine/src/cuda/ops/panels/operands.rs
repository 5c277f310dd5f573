//! Operands of a product of panels in each of their formats: which kernels multiply them, and their
//! parameters.

use cpu_kernels::NUM_SLICES;
use half::bf16;

use super::super::fp8_blocks::{BlockLayout, check_chains};
use super::super::int8::{Int8Rows, MAX_K};
use super::tile::{BLOCK_TILES, INT8_TILES, TILES, Tile};
use super::{InputLayout, PANEL_COLUMNS, packed_len};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{DeviceMemory, Params, Tensor, check, check_len};
use crate::cuda::sources::{FP8_PANELS, GEMM_PANELS, INT8_PANELS, Kernel};

/// Columns of a panel of int8: as many bytes as 64 of bf16.
pub(crate) const INT8_PANEL_COLUMNS: usize = 2 * PANEL_COLUMNS;

/// Inputs `[rows, k]` in panels and weights `[n, k]` in tiles.
#[derive(Debug)]
pub(crate) enum PanelOperands<'a, M> {
    Bf16 {
        x: &'a Tensor<M, bf16>,
        weights: &'a Tensor<M, bf16>,
    },
    Fp8 {
        x: &'a Tensor<M, bf16>,
        codes: &'a Tensor<M, u8>,
        /// `[n]`; `None` for a rank's partial sum, which is scaled after the sum over ranks.
        channel_scales: Option<&'a Tensor<M, f32>>,
    },
    Fp8Blocks {
        x: &'a Tensor<M, bf16>,
        codes: &'a Tensor<M, u8>,
        /// `[chains, n]`.
        scales: &'a Tensor<M, f32>,
        /// [`BlockLayout::on_device`], and the layout.
        layout: (&'a Tensor<M, u32>, &'a BlockLayout),
    },
    Int8 {
        x: Int8Rows<'a, M>,
        steps: &'a Tensor<M, i8>,
        /// As of FP8.
        channel_scales: Option<&'a Tensor<M, f32>>,
        /// 1, or one for each of the eight slices of K.
        scales_of_row: usize,
    },
}

impl<'a, M: DeviceMemory> PanelOperands<'a, M> {
    /// Columns of a panel and of a step: slices of K are whole multiples.
    pub(super) fn columns(&self) -> usize {
        if matches!(self, Self::Int8 { .. }) { INT8_PANEL_COLUMNS } else { PANEL_COLUMNS }
    }

    /// The tiles that have a kernel.
    pub(super) fn tiles(&self) -> &'static [Tile] {
        match self {
            Self::Bf16 { .. } | Self::Fp8 { .. } => &TILES,
            Self::Fp8Blocks { .. } => &BLOCK_TILES,
            Self::Int8 { .. } => &INT8_TILES,
        }
    }

    /// The kernel of a tile.
    pub(super) fn kernel(&self, tile: Tile) -> Result<&'static Kernel, CudaError> {
        let (file, first) = match self {
            Self::Bf16 { .. } => (&GEMM_PANELS, 0),
            Self::Fp8 { .. } => (&FP8_PANELS, 0),
            // After those of FP8 and `pack_fp8`.
            Self::Fp8Blocks { .. } => (&FP8_PANELS, TILES.len() + 1),
            Self::Int8 { .. } => (&INT8_PANELS, 0),
        };
        let tiles = self.tiles();
        let index = tiles.iter().position(|other| *other == tile).ok_or_else(|| CudaError::BadLaunch {
            kernel: file.kernel(first).name,
            what: "rows of a tile",
            found: tile.rows,
            expected: format!("one of {tiles:?}"),
        })?;
        Ok(file.kernel(first + index))
    }

    pub(super) fn channel_scales(&self) -> Option<&'a Tensor<M, f32>> {
        match *self {
            Self::Bf16 { .. } | Self::Fp8Blocks { .. } => None,
            Self::Fp8 { channel_scales, .. } | Self::Int8 { channel_scales, .. } => channel_scales,
        }
    }

    /// Scales of rows, if all slices are one exact sum: groups of it are integers.
    pub(super) fn scales_of_exact_sums(&self) -> Option<&'a Tensor<M, f32>> {
        match *self {
            Self::Int8 { x: (_, scales), scales_of_row: 1, .. } => Some(scales),
            _ => None,
        }
    }

    pub(super) fn check(
        &self,
        kernel: &'static str,
        ProductShape { rows, n, k }: ProductShape,
    ) -> Result<(), CudaError> {
        let (x_len, weights_len) = match self {
            Self::Bf16 { x, weights } => (x.len(), weights.len()),
            Self::Fp8 { x, codes, .. } | Self::Fp8Blocks { x, codes, .. } => (x.len(), codes.len()),
            Self::Int8 { x, steps, .. } => (x.0.len(), steps.len()),
        };
        check_len(kernel, "x", x_len, InputLayout::Panels.len(rows, k))?;
        check_len(kernel, "packed weights", weights_len, packed_len(n, k))?;
        check_len(kernel, "channel_scales", self.channel_scales().map_or(n, Tensor::len), n)?;
        if let Self::Fp8Blocks { scales, layout, .. } = *self {
            check_chains(kernel, layout, PANEL_COLUMNS)?;
            check_len(kernel, "scales", scales.len(), layout.1.num_chains() * n)?;
        }
        let Self::Int8 { x: (_, scales), scales_of_row, .. } = *self else { return Ok(()) };
        let is_good = scales_of_row == 1 || scales_of_row == NUM_SLICES;
        check(kernel, ("scales of a row", scales_of_row), is_good, "1 or 8")?;
        check(kernel, ("k", k), k < MAX_K, format_args!("below {MAX_K}"))?;
        check_len(kernel, "x scales", scales.len(), rows * scales_of_row)
    }

    /// The kernel's first parameters. Scales of channels multiply whole sums only.
    pub(super) fn params(&self, is_whole: bool) -> Params {
        let params = Params::default();
        match *self {
            Self::Bf16 { x, weights } => params.read(x).read(weights),
            Self::Fp8 { x, codes, channel_scales } => {
                params.read(x).read(codes).read_if(channel_scales.filter(|_| is_whole))
            }
            Self::Fp8Blocks { x, codes, .. } => params.read(x).read(codes),
            Self::Int8 { x: (x, scales), steps, channel_scales, .. } => {
                params.read(x).read(scales).read(steps).read_if(channel_scales.filter(|_| is_whole))
            }
        }
    }

    /// The parameters that follow those of all formats.
    pub(super) fn last_params(&self, params: Params) -> Params {
        match *self {
            Self::Bf16 { .. } | Self::Fp8 { .. } => params,
            Self::Fp8Blocks { scales, layout: (chains, _), .. } => params.read(scales).read(chains),
            Self::Int8 { scales_of_row, .. } => params.u32(scales_of_row),
        }
    }
}
