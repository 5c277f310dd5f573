//! Compares every kernel of a product with the kernel for few rows: equal bits for every tile size. No other
//! reference checks the bits of bf16 kernels, because the twin on the host adds in another order. The
//! reference of FP8 kernels is the bf16 kernel on the widened weights.

use cpu_kernels::KSlices;
use half::bf16;

use super::super::{Numbers, Parity, Scale, compare_equal};
use super::fp8::{by_fp8, reference_of_fp8};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{BF16_GRAIN, GemmBf16, GemmInt8, INT8_GRAIN, Variant, borders};

/// The reference kernel: blocks of 8 rows, groups of 16 channels.
pub(in crate::cuda::parity) const REFERENCE: Variant = Variant::Few { rows: 8, channels: 16 };

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let (rows, n) = scale.pick((300, 20), (300, 4096));
    let (whole, cut) = scale.pick((80, 352), (4096, 14_336));
    let mut parities = kernels_agree(e, (rows, n), &KSlices::whole(whole), 16)?;
    // Slices with several iterations of every kernel's main loop and a remainder.
    parities.extend(kernels_agree(e, (9, scale.pick(20, n)), &KSlices::whole(scale.pick(2128, 8240)), 18)?);
    // Several tiles of every height, over more steps than a ring of stages holds.
    parities.extend(kernels_agree(e, (300, 20), &KSlices::eighths(704, 32), 19)?);
    // All slices, and the slices of single ranks.
    let slices = KSlices::eighths(cut, 32);
    parities.extend(kernels_agree(e, (scale.pick(9, 70), scale.pick(140, n)), &slices, 16)?);
    for owned in [0..4, 6..8, 3..4] {
        parities.extend(kernels_agree(e, (9, 40), &slices.owned(owned).rebased(), 17)?);
    }
    Ok(parities)
}

/// Computes the bits of one product with a kernel.
type Multiply<'a, E> = dyn Fn(&mut E, Variant) -> Result<Vec<u32>, CudaError> + 'a;

/// Runs every kernel on one product, bf16 and int8; `seed` determines the numbers.
pub(crate) fn kernels_agree<E: Executor>(
    e: &mut E,
    shape: (usize, usize),
    slices: &KSlices,
    seed: u64,
) -> Result<Vec<Parity>, CudaError> {
    let few = |rows| [16, 8, 4, 2].map(|channels| Variant::Few { rows, channels });
    let tiled = [64, 80, 128].map(|rows| Variant::Tiled { rows });
    let variants: Vec<Variant> = few(8).into_iter().chain(few(32)).chain(tiled).collect();
    let mut products: Vec<(&str, Box<Multiply<'_, E>>)> = vec![
        ("bf16", Box::new(by_bf16(e, shape, slices, seed)?)),
        ("fp8", Box::new(by_fp8(e, shape, slices, seed)?)),
    ];
    if slices.ranges().iter().all(|slice| slice.end % INT8_GRAIN == 0) {
        products.push(("int8", Box::new(by_int8(e, shape, slices, seed)?)));
    }
    let mut parities = Vec::new();
    for (format, multiply) in &products {
        let expected = match *format {
            "fp8" => reference_of_fp8(e, shape, slices, seed)?,
            _ => multiply(e, REFERENCE)?,
        };
        let (rows, n) = shape;
        for &variant in &variants {
            let case = format!("{format} {rows} x {n} x {} by {variant:?}", slices.end());
            parities.push(compare_equal(case, &multiply(e, variant)?, &expected));
        }
    }
    Ok(parities)
}

/// Computes the bits of a bf16 product with a kernel.
fn by_bf16<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
    seed: u64,
) -> Result<impl Fn(&mut E, Variant) -> Result<Vec<u32>, CudaError> + use<E>, CudaError> {
    let (k, mut numbers) = (slices.end(), Numbers(seed));
    let on_host = borders(slices, BF16_GRAIN);
    let borders = Tensor::of(e, &on_host, "borders")?;
    let x: Tensor<_, bf16> = Tensor::of(e, &numbers.bf16s(rows * k, 1.0), "x")?;
    let weights: Tensor<_, bf16> = Tensor::of(e, &numbers.bf16s(n * k, 1.0), "weights")?;
    let bias = Tensor::of(e, &numbers.vec(n, 1.0), "bias")?;
    Ok(move |e: &mut E, variant| {
        let mut out = Tensor::of(e, &vec![f32::NAN; rows * n], "out")?;
        let borders = (&borders, on_host.as_slice());
        GemmBf16 { x: &x, weights: &weights, bias: Some(&bias), borders, out: &mut out }.launch_variant(
            e,
            ProductShape { rows, n, k },
            Some(variant),
        )?;
        bits(e, &out)
    })
}

/// The bits of `x` `[rows, k]` times `weights` `[n, k]`, plus `bias`, by the reference kernel.
pub(in crate::cuda::parity) fn multiply_by_reference<E: Executor>(
    e: &mut E,
    (x, weights): (&[bf16], &[bf16]),
    slices: &KSlices,
    bias: &Tensor<E::Memory, f32>,
) -> Result<Vec<u32>, CudaError> {
    let (n, k) = (bias.len(), slices.end());
    let rows = x.len() / k;
    let on_host = borders(slices, BF16_GRAIN);
    let borders = Tensor::of(e, &on_host, "borders")?;
    let (x, weights) = (Tensor::of(e, x, "x")?, Tensor::of(e, weights, "weights")?);
    let mut out = Tensor::zeros(e, rows * n, "out")?;
    let (borders, bias) = ((&borders, on_host.as_slice()), Some(bias));
    GemmBf16 { x: &x, weights: &weights, bias, borders, out: &mut out }.launch_variant(
        e,
        ProductShape { rows, n, k },
        Some(REFERENCE),
    )?;
    bits(e, &out)
}

/// Computes the bits of an int8 product with a kernel.
fn by_int8<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
    seed: u64,
) -> Result<impl Fn(&mut E, Variant) -> Result<Vec<u32>, CudaError> + use<E>, CudaError> {
    let (k, count, mut numbers) = (slices.end(), slices.ranges().len(), Numbers(seed));
    let on_host = borders(slices, INT8_GRAIN);
    let borders = Tensor::of(e, &on_host, "borders")?;
    let mut steps = |len: usize| (0..len).map(|_| (numbers.bits() >> 56) as i8).collect::<Vec<i8>>();
    let x = Tensor::of(e, &steps(rows * k), "steps")?;
    let weights = Tensor::of(e, &steps(n * k), "weights")?;
    let mut scales = numbers.vec(rows * count, 0.01);
    // The scales of zeros, and of numbers that are not finite.
    if let [.., of_zeros, of_nan] = scales.as_mut_slice()
        && rows > 8
    {
        (*of_zeros, *of_nan) = (0.0, f32::NAN);
    }
    let scales = Tensor::of(e, &scales, "scales")?;
    let channel_scales = Tensor::of(e, &numbers.vec(n, 0.01), "scales of channels")?;
    let bias = Tensor::of(e, &numbers.vec(n, 1.0), "bias")?;
    Ok(move |e: &mut E, variant| {
        let mut out = Tensor::of(e, &vec![f32::NAN; rows * n], "out")?;
        let gemm = GemmInt8 {
            x: (&x, &scales),
            weights: &weights,
            channel_scales: Some(&channel_scales),
            bias: Some(&bias),
            borders: (&borders, on_host.as_slice()),
            slices: count,
            out: &mut out,
        };
        gemm.launch_variant(e, ProductShape { rows, n, k }, Some(variant))?;
        bits(e, &out)
    })
}

pub(in crate::cuda::parity) fn bits<E: Executor>(
    e: &mut E,
    out: &Tensor<E::Memory, f32>,
) -> Result<Vec<u32>, CudaError> {
    Ok(out.read(e, 0..out.len())?.iter().map(|x| x.to_bits()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;

    /// Blocks read as many bytes as the model predicts: rows of weights and of inputs, once per block.
    #[test]
    fn blocks_read_their_operands_once() {
        let (rows, n, k) = (160, 256, 256);
        let mut e = Emulator::build();
        let multiply = by_bf16(&mut e, (rows, n), &KSlices::whole(k), 1).unwrap();
        let mut read = |variant| {
            let before = e.global_bytes();
            multiply(&mut e, variant).unwrap();
            (e.global_bytes() - before) as usize
        };
        assert_eq!(read(Variant::Few { rows: 32, channels: 16 }), 5 * 16 * (16 + 32) * k * 2);
        assert_eq!(read(Variant::Tiled { rows: 80 }), 2 * 2 * (128 + 80) * k * 2);
        assert_eq!(read(Variant::Tiled { rows: 128 }), 2 * 2 * (128 + 128) * k * 2);
        // FP8 weights take one byte each; K is a whole number of blocks here.
        let k = 512;
        let multiply = by_fp8(&mut e, (rows, n), &KSlices::whole(k), 1).unwrap();
        let mut read = |variant| {
            let before = e.global_bytes();
            multiply(&mut e, variant).unwrap();
            (e.global_bytes() - before) as usize
        };
        assert_eq!(read(Variant::Few { rows: 32, channels: 16 }), 5 * 16 * (16 + 2 * 32) * k);
        assert_eq!(read(Variant::Tiled { rows: 80 }), 2 * 2 * (128 + 2 * 80) * k);
        // int8 inputs and weights take one byte each, with one scale a row and with eight.
        for slices in [KSlices::whole(k), KSlices::eighths(k, 64)] {
            let multiply = by_int8(&mut e, (rows, n), &slices, 1).unwrap();
            let mut read = |variant| {
                let before = e.global_bytes();
                multiply(&mut e, variant).unwrap();
                (e.global_bytes() - before) as usize
            };
            assert_eq!(read(Variant::Few { rows: 32, channels: 16 }), 5 * 16 * (16 + 32) * k);
            assert_eq!(read(Variant::Tiled { rows: 64 }), 3 * 2 * (128 + 64) * k);
            assert_eq!(read(Variant::Tiled { rows: 80 }), 2 * 2 * (128 + 80) * k);
            assert_eq!(read(Variant::Tiled { rows: 128 }), 2 * 2 * (128 + 128) * k);
        }
    }
}
