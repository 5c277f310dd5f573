//! Times of products of FP8 weights with scales by block.

use cpu_kernels::KSlices;
use half::bf16;

use super::products::{best_of, panels, weight_like};
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::Tensor;
use crate::cuda::ops::{BlockLayout, GemmFp8Blocks, GemmPanels, PanelOperands};
use crate::cuda::{CudaDevice, CudaError};

/// Microseconds of a product of weights in rows, and of one of panels if there are kernels. `n` and `k` are
/// multiples of 128 and 512.
pub(super) fn time_fp8_blocks(
    device: &mut CudaDevice,
    shape: ProductShape,
    is_dry: bool,
) -> Result<(f64, Option<f64>), CudaError> {
    let ProductShape { rows, n, k } = shape;
    let layout = BlockLayout::new(&KSlices::eighths(k, 32));
    // Any bytes are valid weights in every layout; without padding both have as many.
    let number = |i: usize| (i.wrapping_mul(40_503) >> 7) as u8;
    let codes = Tensor::of(device, &(0..n * k).map(number).collect::<Vec<u8>>(), "weights")?;
    let scales = Tensor::of(device, &vec![0.01f32; layout.num_chains() * n], "scales")?;
    let chains = Tensor::of(device, &layout.on_device(), "chains")?;
    let mut out = Tensor::zeros(device, rows * n, "products")?;
    let x = Tensor::of(device, &(0..rows * k).map(weight_like).collect::<Vec<bf16>>(), "activations")?;
    let in_rows = best_of(device, is_dry, |device| {
        let (weights, scales, layout) = (&codes, &scales, (&chains, &layout));
        GemmFp8Blocks { x: &x, weights, scales, bias: None, layout, out: &mut out }.launch(device, shape)
    })?;
    if !device.has_panel_kernels() {
        return Ok((in_rows, None));
    }
    let (x, mut sums) = (panels(device, (rows, k))?, None);
    let borders = Tensor::of(device, layout.of_k(), "borders")?;
    let in_panels = best_of(device, is_dry, |device| {
        let layout_on_device = (&chains, &layout);
        let operands =
            PanelOperands::Fp8Blocks { x: &x, codes: &codes, scales: &scales, layout: layout_on_device };
        let (borders, sums, out) = ((&borders, layout.of_k()), &mut sums, &mut out);
        GemmPanels { operands, bias: None, borders, sums, out }.launch_whole(device, shape, None)
    })?;
    Ok((in_rows, Some(in_panels)))
}
