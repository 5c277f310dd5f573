//! Products of weights in each of their formats.

use super::State;
use super::fusion::DelayedOp;
use super::load::{GpuLinear, GpuWeights};
use super::rounding::ProductRows;
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    GemmBf16, GemmFp8, GemmInt8, GemmPanels, InputLayout, QuantizeRows, TiledWeights, ensure_capacity,
    finish_sum,
};

impl<E: Executor> State<E> {
    /// `x` times a matrix, with its bias.
    pub(super) fn multiply(
        &mut self,
        linear: &GpuLinear<E::Memory>,
        (x, x_len): (&Tensor<E::Memory, f32>, usize),
        out: &mut Tensor<E::Memory, f32>,
    ) -> Result<(), CudaError> {
        let GpuLinear { n, k, .. } = *linear;
        let (rows, bias) = (x_len / k, linear.bias.as_ref());
        let input = ProductRows { x, rows, width: k, source: self.rounded_source.take() };
        self.flush_delayed()?;
        let borders = (&linear.borders.0, linear.borders.1.as_slice());
        let executor = &mut self.executor;
        match &linear.weights {
            GpuWeights::Bf16Tiles(weights) => {
                self.multiply_tiles(linear, TiledWeights::Bf16(weights), &input, out)
            }
            GpuWeights::Fp8Tiles { codes, channel_scales } => {
                let channel_scales = channel_scales.as_ref();
                let weights = TiledWeights::Fp8 { codes, channel_scales };
                self.multiply_tiles(linear, weights, &input, out)
            }
            GpuWeights::Bf16(weights) => {
                let x = input.rounded(executor, &mut self.rounded, InputLayout::Rows)?;
                let mut gemm = GemmBf16 { x, weights, bias, borders, out };
                match (gemm.launch_cublaslt(executor, (rows, n, k))?, bias) {
                    (false, _) => gemm.launch(executor, (rows, n, k)),
                    (true, None) => Ok(()),
                    (true, bias) => finish_sum(executor, out, (None, bias), (rows, n)),
                }
            }
            GpuWeights::Fp8 { codes: weights, channel_scales, layout: (borders, layout) } => {
                let x = input.rounded(executor, &mut self.rounded, InputLayout::Rows)?;
                let (channel_scales, layout) = (channel_scales.as_ref(), (borders, layout));
                GemmFp8 { x, weights, channel_scales, bias, layout, out }.launch(executor, (rows, n, k))
            }
            GpuWeights::Int8 { steps: weights, channel_scales, slice_borders } => {
                let slices = slice_borders.len() - 1;
                let steps = ensure_capacity(&mut self.steps, executor, x_len, "quantized activations")?;
                let scales =
                    ensure_capacity(&mut self.scales, executor, rows * slices, "scales of activations")?;
                QuantizeRows { x, borders: slice_borders, steps, scales, to_row: 0, columns: 0..k }
                    .launch(executor, rows, k)?;
                let channel_scales = channel_scales.as_ref();
                GemmInt8 { x: (steps, scales), weights, channel_scales, bias, borders, slices, out }
                    .launch(executor, (rows, n, k))
            }
        }
    }

    /// A product of weights in tiles. Groups of slices that it leaves are added by the next operation.
    fn multiply_tiles(
        &mut self,
        linear: &GpuLinear<E::Memory>,
        weights: TiledWeights<'_, E::Memory>,
        input: &ProductRows<'_, E::Memory>,
        out: &mut Tensor<E::Memory, f32>,
    ) -> Result<(), CudaError> {
        let shape = (input.rows, linear.n, linear.k);
        let State { executor, rounded, sums, .. } = self;
        let x = input.rounded(executor, rounded, InputLayout::Panels)?;
        let (borders, bias) = ((&linear.borders.0, linear.borders.1.as_slice()), linear.bias.as_ref());
        let gemm = GemmPanels { x, weights, bias, borders, sums, out };
        self.delayed = gemm.launch(executor, shape)?.map(DelayedOp::AddGroups);
        Ok(())
    }
}
