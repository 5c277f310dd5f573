//! Products of weights in each of their formats.

use super::State;
use super::fusion::DelayedOp;
use super::load::{GpuLinear, GpuWeights};
use super::rounding::ProductRows;
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    FinishSum, GemmBf16, GemmFp8, GemmFp8Blocks, GemmInt8, GemmPanels, InputLayout, PanelOperands, StepLayout,
};

impl<E: Executor> State<E> {
    /// `x` times a matrix, with its bias. Groups of slices that a product of panels leaves are added by the
    /// next operation.
    pub(super) fn multiply(
        &mut self,
        linear: &GpuLinear<E::Memory>,
        (x, x_len): (&Tensor<E::Memory, f32>, usize),
        out: &mut Tensor<E::Memory, f32>,
    ) -> Result<(), CudaError> {
        let GpuLinear { n, k, .. } = *linear;
        let (rows, bias) = (x_len / k, linear.bias.as_ref());
        let (shape, borders) =
            (ProductShape { rows, n, k }, (&linear.borders.0, linear.borders.1.as_slice()));
        let input = ProductRows { x, rows, width: k, source: self.rounded_source.take() };
        self.flush_delayed()?;
        let Self { executor, rounded, quantized, sums, .. } = self;
        let operands = match &linear.weights {
            GpuWeights::Bf16Tiles(weights) => {
                let x = input.rounded(executor, rounded, InputLayout::Panels)?;
                PanelOperands::Bf16 { x, weights }
            }
            GpuWeights::Fp8Tiles { codes, channel_scales } => {
                let x = input.rounded(executor, rounded, InputLayout::Panels)?;
                PanelOperands::Fp8 { x, codes, channel_scales: channel_scales.as_ref() }
            }
            GpuWeights::Fp8Blocks { codes, is_tiled, scales, layout: (chains, layout) } => {
                let of_input = if *is_tiled { InputLayout::Panels } else { InputLayout::Rows };
                let (x, layout) = (input.rounded(executor, rounded, of_input)?, (chains, layout));
                if !is_tiled {
                    return GemmFp8Blocks { x, weights: codes, scales, bias, layout, out }
                        .launch(executor, shape);
                }
                PanelOperands::Fp8Blocks { x, codes, scales, layout }
            }
            GpuWeights::Int8 { steps: weights, is_tiled, channel_scales, slice_borders } => {
                let layout = if *is_tiled { StepLayout::one_tile(rows) } else { StepLayout::Rows };
                let x = input.quantized(executor, quantized, slice_borders, layout)?;
                let (channel_scales, slices) = (channel_scales.as_ref(), slice_borders.len() - 1);
                if !is_tiled {
                    return GemmInt8 { x, weights, channel_scales, bias, borders, slices, out }
                        .launch(executor, shape);
                }
                PanelOperands::Int8 { x, steps: weights, channel_scales, scales_of_row: slices }
            }
            GpuWeights::Bf16(weights) => {
                let x = input.rounded(executor, rounded, InputLayout::Rows)?;
                let mut gemm = GemmBf16 { x, weights, bias, borders, out };
                return match (gemm.launch_cublaslt(executor, shape)?, bias) {
                    (false, _) => gemm.launch(executor, shape),
                    (true, None) => Ok(()),
                    (true, bias) => FinishSum { sum: out, scales: None, bias }.launch(executor, rows, n),
                };
            }
            GpuWeights::Fp8 { codes: weights, channel_scales, layout: (borders, layout) } => {
                let x = input.rounded(executor, rounded, InputLayout::Rows)?;
                let (channel_scales, layout) = (channel_scales.as_ref(), (borders, layout));
                return GemmFp8 { x, weights, channel_scales, bias, layout, out }.launch(executor, shape);
            }
        };
        let gemm = GemmPanels { operands, bias, borders, sums, out };
        self.delayed = gemm.launch(executor, shape)?.map(DelayedOp::AddGroups);
        Ok(())
    }
}
