//! The bf16, int8 and FP8 products, over row counts that do and do not fill tiles; the order of K must not
//! depend on them.

mod all_kernels;
mod fp8;
mod fp8_blocks;

#[cfg(test)]
pub(super) use all_kernels::kernels_agree;
pub(super) use all_kernels::{REFERENCE, bits, multiply_by_reference};
pub(super) use fp8_blocks::BlockProduct;

use std::ops::Range;

use cpu_kernels::{KSlices, QuantizedFormat, reference};
use half::bf16;

use super::tensor_cores::{Bounded, compare_bounded, product};
use super::{Numbers, Parity, Scale, compare, compare_equal, widened};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{BF16_GRAIN, GemmBf16, GemmInt8, INT8_GRAIN, QuantizeRows, StepLayout, borders};

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let mut parities = Vec::new();
    let (n, k) = scale.pick((20, 352), (4096, 14_336));
    let whole = scale.pick(48, 4096);
    for rows in scale.pick(vec![1, 5, 8, 9, 33], vec![1, 8, 9, 64, 256]) {
        parities.push(gemm_bf16(e, (rows, n), &KSlices::eighths(k, 32))?);
        parities.push(gemm_bf16(e, (rows, n), &KSlices::whole(whole))?);
        parities.extend(gemm_int8(e, (rows, n), &KSlices::eighths(k, 32))?);
        parities.extend(gemm_int8(e, (rows, n), &KSlices::whole(whole))?);
    }
    let (n, k) = scale.pick((20, 352), (256, 14_336));
    for rows in [1, 9, 33] {
        parities.push(fp8::gemm_fp8(e, (rows, n), &KSlices::eighths(k, 32))?);
        parities.push(fp8::gemm_fp8(e, (rows, n), &KSlices::whole(whole))?);
    }
    parities.extend(part_of_columns(e, scale.pick((5, 96), (64, 8192)))?);
    // Slices of whole heads, half of them empty.
    parities.push(gemm_bf16(e, (3, 16), &KSlices::eighths(64, 16))?);
    parities.extend(gemm_int8(e, (3, 16), &KSlices::eighths(64, 16))?);
    parities.extend(all_kernels::cases(e, scale)?);
    parities.extend(fp8_blocks::cases(e, scale)?);
    parities.push(rows_do_not_matter(e, scale.pick((40, 24, 96), (256, 4096, 4096)))?);
    Ok(parities)
}

/// One launch of `x` `[rows, k]` times `weights` `[n, k]`.
pub(super) fn multiply<E: Executor>(
    e: &mut E,
    x: &[bf16],
    weights: &Tensor<E::Memory, bf16>,
    slices: &KSlices,
    bias: Option<&Tensor<E::Memory, f32>>,
) -> Result<Vec<f32>, CudaError> {
    let k = slices.ranges().last().map_or(0, |slice| slice.end);
    let (rows, n) = (x.len() / k, weights.len() / k);
    let on_host = borders(slices, BF16_GRAIN);
    let on_device = Tensor::of(e, &on_host, "borders")?;
    let mut out = Tensor::zeros(e, rows * n, "out")?;
    let x = Tensor::of(e, x, "x")?;
    GemmBf16 { x: &x, weights, bias, borders: (&on_device, &on_host), out: &mut out }
        .launch(e, ProductShape { rows, n, k })?;
    out.read(e, 0..rows * n)
}

pub(super) fn gemm_bf16<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
) -> Result<Parity, CudaError> {
    let k = slices.ranges().last().map_or(0, |slice| slice.end);
    let mut numbers = Numbers(5);
    let (x, weights, bias) = (numbers.bf16s(rows * k, 1.0), numbers.bf16s(n * k, 1.0), numbers.vec(n, 1.0));
    let on_device = (Tensor::of(e, &weights, "weights")?, Tensor::of(e, &bias, "bias")?);
    let found = multiply(e, &x, &on_device.0, slices, Some(&on_device.1))?;
    // At a model's size a twin of all columns takes minutes, so only some columns are compared.
    let columns: Vec<usize> = (0..n).step_by((n / 64).max(1)).chain([n - 1]).collect();
    let chosen: Vec<Vec<f32>> = columns.iter().map(|&c| widened(&weights[c * k..(c + 1) * k])).collect();
    let (x, borders) = (widened(&x), borders(slices, BF16_GRAIN));
    let mut exact = Vec::new();
    for x in x.chunks_exact(k) {
        for (weights, &c) in chosen.iter().zip(&columns) {
            exact.push(product(x, weights, &borders).plus(Bounded::exact(f64::from(bias[c]))));
        }
    }
    let found: Vec<f32> =
        (0..rows).flat_map(|row| columns.iter().map(move |&c| row * n + c)).map(|i| found[i]).collect();
    let cut = if slices.ranges().len() == 1 { "whole" } else { "in 8 slices" };
    Ok(compare_bounded(format!("gemm_bf16 {rows} x {n} x {k} {cut}"), &found, &exact))
}

/// int8 rows `[rows, k]` and their scales `[rows, slices]`.
type Quantized<M> = (Tensor<M, i8>, Tensor<M, f32>);

/// Quantizes `x` `[rows, k]` to int8, with a scale for each slice between two borders.
fn quantized<E: Executor>(
    e: &mut E,
    x: &[f32],
    borders: &[u32],
    rows: usize,
) -> Result<Quantized<E::Memory>, CudaError> {
    let k = x.len() / rows;
    let (x, on_device) = (Tensor::of(e, x, "x")?, Tensor::of(e, borders, "borders")?);
    let mut steps = Tensor::zeros(e, rows * k, "steps")?;
    let mut scales = Tensor::zeros(e, rows * (borders.len() - 1), "scales")?;
    QuantizeRows {
        x: &x,
        borders: &on_device,
        steps: &mut steps,
        layout: StepLayout::Rows,
        scales: &mut scales,
        to_row: 0,
        columns: 0..k,
    }
    .launch(e, rows, k)?;
    Ok((steps, scales))
}

pub(super) fn gemm_int8<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
) -> Result<Vec<Parity>, CudaError> {
    let k = slices.ranges().last().map_or(0, |slice| slice.end);
    let mut numbers = Numbers(6);
    let (mut x, weights, bias) = (numbers.vec(rows * k, 3.0), numbers.vec(n * k, 1.0), numbers.vec(n, 1.0));
    // Rows that quantize to zeros, and to NaN.
    x[..k].fill(if rows > 8 { 1e-35 } else { 0.5 });
    if rows > 8 {
        x[k] = f32::NAN;
    }
    let (steps, scales) = quantized(e, &weights, &[0, k as u32], n)?;
    let ranges = slices.ranges();
    let slice_ends: Vec<u32> =
        std::iter::once(0).chain(ranges.iter().map(|slice| slice.end as u32)).collect();
    let (x_steps, x_scales) = quantized(e, &x, &slice_ends, rows)?;
    let on_host = borders(slices, INT8_GRAIN);
    let on_device = Tensor::of(e, &on_host, "borders")?;
    let bias_on_device = Tensor::of(e, &bias, "bias")?;
    let mut out = Tensor::zeros(e, rows * n, "out")?;
    let gemm = GemmInt8 {
        x: (&x_steps, &x_scales),
        weights: &steps,
        channel_scales: Some(&scales),
        bias: Some(&bias_on_device),
        borders: (&on_device, &on_host),
        slices: ranges.len(),
        out: &mut out,
    };
    gemm.launch(e, ProductShape { rows, n, k })?;

    let columns: Vec<usize> = (0..n).step_by((n / 64).max(1)).chain([n - 1]).collect();
    let chosen: Vec<f32> = columns.iter().flat_map(|&c| weights[c * k..(c + 1) * k].to_vec()).collect();
    let chosen_bias: Vec<f32> = columns.iter().map(|&c| bias[c]).collect();
    let twin = reference::QuantizedWeights::new(QuantizedFormat::Int8, &chosen, k);
    let expected = twin.multiply(&x, slices, Some(&chosen_bias));
    let all = out.read(e, 0..rows * n)?;
    let found: Vec<f32> =
        (0..rows).flat_map(|row| columns.iter().map(move |&c| row * n + c)).map(|i| all[i]).collect();
    Ok(vec![compare(
        format!("gemm_int8 {rows} x {n} x {k}, {} scales a row", ranges.len()),
        0.0,
        &found,
        &expected,
    )])
}

/// Quantizes some columns only: equal steps and the same scales as for all columns.
fn part_of_columns<E: Executor>(e: &mut E, (rows, k): (usize, usize)) -> Result<Vec<Parity>, CudaError> {
    let on_device = Tensor::of(e, &Numbers(13).vec(rows * k, 2.0), "x")?;
    let borders = Tensor::of(e, &[0, k as u32], "borders")?;
    let mut quantized = |columns: Range<usize>| -> Result<(Vec<i8>, Vec<f32>), CudaError> {
        let len = rows * columns.len();
        let (mut steps, mut scales) = (Tensor::zeros(e, len, "steps")?, Tensor::zeros(e, rows, "scales")?);
        let (x, borders, layout) = (&on_device, &borders, StepLayout::Rows);
        QuantizeRows { x, borders, steps: &mut steps, layout, scales: &mut scales, to_row: 0, columns }
            .launch(e, rows, k)?;
        Ok((steps.read(e, 0..len)?, scales.read(e, 0..rows)?))
    };
    let (all, scales) = quantized(0..k)?;
    let mut parities = Vec::new();
    for columns in [0..k / 3, k / 3..k / 2, k / 2..k] {
        let expected: Vec<i8> = all.chunks_exact(k).flat_map(|row| &row[columns.clone()]).copied().collect();
        let (steps, scales_of_part) = quantized(columns.clone())?;
        parities.push(compare_equal(format!("quantize_rows of {k}, columns {columns:?}"), &steps, &expected));
        parities.push(compare(format!("their scales, columns {columns:?}"), 0.0, &scales_of_part, &scales));
    }
    Ok(parities)
}

/// The rows of a large product, computed one by one, have the same bits.
fn rows_do_not_matter<E: Executor>(
    e: &mut E,
    (rows, n, k): (usize, usize, usize),
) -> Result<Parity, CudaError> {
    let mut numbers = Numbers(8);
    let (x, weights) = (numbers.bf16s(rows * k, 1.0), numbers.bf16s(n * k, 1.0));
    let weights = Tensor::of(e, &weights, "weights")?;
    let slices = KSlices::eighths(k, 32);
    let together = multiply(e, &x, &weights, &slices, None)?;
    let mut parts = Vec::new();
    let mut first = 0;
    for size in [1, 7, 8, 1, 9].into_iter().cycle() {
        let end = rows.min(first + size);
        parts.extend(multiply(e, &x[first * k..end * k], &weights, &slices, None)?);
        first = end;
        if first == rows {
            break;
        }
    }
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    Ok(compare_equal(format!("gemm_bf16 {rows} x {n} x {k}: in parts"), &bits(&parts), &bits(&together)))
}
