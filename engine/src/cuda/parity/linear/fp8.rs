//! FP8 products: compares their kernels with the bf16 kernel on widened weights, and with exact sums.

use cpu_kernels::{KSlices, reference};
use half::bf16;

use super::super::tensor_cores::{Bounded, compare_bounded, product};
use super::super::{Numbers, Parity, widened};
use super::all_kernels::{REFERENCE, bits};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{BF16_GRAIN, Fp8Layout, GemmBf16, GemmFp8, Variant, borders};

/// Operands of a product.
struct Product {
    x: Vec<bf16>,
    /// All FP8 codes except NaN.
    codes: Vec<u8>,
    /// `None` if they are applied after a sum over ranks.
    scales: Option<Vec<f32>>,
    bias: Vec<f32>,
}

impl Product {
    fn new((rows, n): (usize, usize), k: usize, seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let x = numbers.bf16s(rows * k, 1.0);
        let code = |bits: u64| if bits & 0x7f == 0x7f { 0x80 } else { bits as u8 };
        let codes = (0..n * k).map(|_| code(numbers.bits() >> 56)).collect();
        let scales = seed.is_multiple_of(2).then(|| numbers.vec(n, 0.01));
        Self { x, codes, scales, bias: numbers.vec(n, 1.0) }
    }

    fn weights(&self) -> Vec<bf16> {
        self.codes.iter().map(|&code| bf16::from_f32(reference::fp8_value(code))).collect()
    }
}

/// Computes the bits of an FP8 product with a kernel.
pub(super) fn by_fp8<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
    seed: u64,
) -> Result<impl Fn(&mut E, Variant) -> Result<Vec<u32>, CudaError> + use<E>, CudaError> {
    let k = slices.end();
    let product = Product::new((rows, n), k, seed);
    let layout = Fp8Layout::new(&borders(slices, BF16_GRAIN));
    let borders = Tensor::of(e, layout.borders(), "borders")?;
    let x = Tensor::of(e, &product.x, "x")?;
    let mut rows_of_weights = vec![0; n * layout.row_bytes()];
    let places = rows_of_weights.chunks_exact_mut(layout.row_bytes());
    product.codes.chunks_exact(k).zip(places).for_each(|(codes, out)| layout.pack(codes, out));
    let weights = Tensor::of(e, &rows_of_weights, "weights")?;
    let scales = product.scales.map(|scales| Tensor::of(e, &scales, "scales")).transpose()?;
    let bias = Tensor::of(e, &product.bias, "bias")?;
    Ok(move |e: &mut E, variant| {
        let mut out = Tensor::of(e, &vec![f32::NAN; rows * n], "out")?;
        let gemm = GemmFp8 {
            x: &x,
            weights: &weights,
            channel_scales: scales.as_ref(),
            bias: Some(&bias),
            layout: (&borders, &layout),
            out: &mut out,
        };
        gemm.launch_variant(e, ProductShape { rows, n, k }, Some(variant))?;
        bits(e, &out)
    })
}

/// Computes the same with the bf16 kernel on widened weights: its sums, times the scale, plus the bias.
pub(super) fn reference_of_fp8<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
    seed: u64,
) -> Result<Vec<u32>, CudaError> {
    let k = slices.end();
    let product = Product::new((rows, n), k, seed);
    let on_host = borders(slices, BF16_GRAIN);
    let (x, weights) = (Tensor::of(e, &product.x, "x")?, Tensor::of(e, &product.weights(), "weights")?);
    let (borders, mut out) = (Tensor::of(e, &on_host, "borders")?, Tensor::zeros(e, rows * n, "out")?);
    GemmBf16 { x: &x, weights: &weights, bias: None, borders: (&borders, &on_host), out: &mut out }
        .launch_variant(e, ProductShape { rows, n, k }, Some(REFERENCE))?;
    let finish = |(i, sum): (usize, f32)| {
        let scaled = product.scales.as_ref().map_or(sum, |scales| sum * scales[i % n]);
        (scaled + product.bias[i % n]).to_bits()
    };
    Ok(out.read(e, 0..rows * n)?.into_iter().enumerate().map(finish).collect())
}

/// Compares the kernel that is chosen for `rows` rows with exact sums.
pub(super) fn gemm_fp8<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
) -> Result<Parity, CudaError> {
    const SEED: u64 = 14;
    let (k, given) = (slices.end(), Product::new((rows, n), slices.end(), SEED));
    let variant = Variant::Few { rows: if rows > 8 { 32 } else { 8 }, channels: 16 };
    let found = by_fp8(e, (rows, n), slices, SEED)?(e, variant)?;
    let found: Vec<f32> = found.into_iter().map(f32::from_bits).collect();
    let (x, weights) = (widened(&given.x), widened(&given.weights()));
    let borders = borders(slices, BF16_GRAIN);
    let mut exact = Vec::new();
    for x in x.chunks_exact(k) {
        for (channel, weights) in weights.chunks_exact(k).enumerate() {
            let sum = product(x, weights, &borders);
            let scaled = given.scales.as_ref().map_or(sum, |scales| sum.times(f64::from(scales[channel])));
            exact.push(scaled.plus(Bounded::exact(f64::from(given.bias[channel]))));
        }
    }
    Ok(compare_bounded(format!("gemm_fp8 {rows} x {n} x {k}"), &found, &exact))
}
