//! Panels: how operands are packed, and products of panels against the kernel of few rows.

mod fp8_blocks;
mod int8;

use cpu_kernels::KSlices;
use half::bf16;

use super::linear::{REFERENCE, bits, multiply_by_reference};
use super::{Numbers, Parity, Scale, compare_equal};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    BF16_GRAIN, Fp8Layout, GemmFp8, GemmPanels, InputLayout, NUM_ALONE, PackedChannels, PanelLaunch,
    PanelOperands, RmsNorm, Swiglu, TILES, add, borders, pack_fp8, pack_panels, packed_len, to_panels,
};

/// The index of a number in panels; twin of `panel_index` in prelude.cuh.
fn panel_index(row: usize, column: usize, panels: usize) -> usize {
    let (inside, four) = (column % 64, column % 32 / 4);
    let set = inside / 32 * 2 + four % 2;
    let place = [set * 128, column % 4 / 2 * 64, row % 8 * 8, four / 2 * 2, column % 2];
    (column / 64 * panels + row / 8) * 512 + place.into_iter().sum::<usize>()
}

/// Rows in panels; zeros in rows that do not exist.
pub(super) fn packed(numbers: &[bf16], (rows, width): (usize, usize)) -> Vec<bf16> {
    let mut all = vec![bf16::ZERO; InputLayout::Panels.len(rows, width)];
    for (i, number) in numbers.iter().enumerate() {
        all[panel_index(i / width, i % width, rows.div_ceil(8))] = *number;
    }
    all
}

/// Weights in tiles of 128 channels, each in panels.
fn packed_weights(weights: &[bf16], (n, k): (usize, usize)) -> Vec<bf16> {
    let mut all = weights.to_vec();
    all.resize(packed_len(n, k), bf16::ZERO);
    all.chunks_exact(128 * k).flat_map(|tile| packed(tile, (128, k))).collect()
}

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let mut parities = layouts(e, scale.pick((11, 128), (700, 4096)))?;
    let (n, k) = scale.pick((130, 512), (4096, 14_336));
    let slices = KSlices::eighths(k, 64);
    let all = PanelLaunch::all(&TILES, 8);
    let (alone, in_clusters) = all.split_at(4 * NUM_ALONE);
    for (rows, launches) in scale.pick(
        vec![(1, alone), (45, &alone[8..16]), (130, &alone[12..]), (130, &in_clusters[1..3])],
        vec![(1, all.as_slice()), (45, &all), (160, &all), (300, &all)],
    ) {
        parities.extend(products(e, (rows, n), &slices, launches)?);
        parities.extend(fp8_products(e, (rows, n.min(520)), &slices, launches)?);
    }
    // So many steps that stages are reused many times.
    let in_clusters = PanelLaunch::all(&TILES[NUM_ALONE..], 1);
    let (rows, n, k) = scale.pick((130, 130, 1024), (300, 4096, 14_336));
    parities.extend(products(e, (rows, n), &KSlices::eighths(k, 64), &in_clusters)?);
    parities.extend(fp8_products(e, (rows, n), &KSlices::eighths(k, 64), &in_clusters)?);
    parities.extend(norms_of_groups(e, scale.pick((5, 384), (33, 4096)), &slices)?);
    for owned in [0..4, 6..8, 3..4] {
        let slices = slices.owned(owned).rebased();
        parities.extend(fp8_products(e, (9, n.min(520)), &slices, &all[..1])?);
        let used = slices.ranges().iter().filter(|slice| !slice.is_empty()).count();
        parities.extend(products(e, (9, n), &slices, &PanelLaunch::all(&TILES[..1], used))?);
    }
    parities.extend(fp8_blocks::cases(e, scale)?);
    parities.extend(int8::cases(e, scale)?);
    Ok(parities)
}

/// Kernels that pack rows, or write them packed.
fn layouts<E: Executor>(e: &mut E, (rows, width): (usize, usize)) -> Result<Vec<Parity>, CudaError> {
    let (mut numbers, len) = (Numbers(41), InputLayout::Panels.len(rows, width));
    let x = numbers.vec(rows * width, 2.0);
    let on_device = Tensor::of(e, &x, "x")?;
    let bits = |numbers: &[bf16]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let round = |x: &[f32]| x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
    let mut parities = Vec::new();
    let mut check = |case: &str, found: &[bf16], rounded: &[bf16]| {
        let expected = bits(&packed(rounded, (rows, width)));
        parities.push(compare_equal(format!("{case} of {rows} x {width}"), &bits(found), &expected));
    };

    let mut out = Tensor::zeros(e, len, "panels")?;
    to_panels(e, &on_device, &mut out, (rows, width))?;
    check("to_panels", &out.read(e, 0..len)?, &round(&x));

    let weight = Tensor::of(e, &numbers.vec(width, 1.0), "weight")?;
    let (mut normed, mut out) = (Tensor::zeros(e, rows * width, "out")?, Tensor::zeros(e, len, "panels")?);
    let rounded = Some((&mut out, InputLayout::Panels));
    RmsNorm { x: &on_device, weight: &weight, eps: 1e-5, out: &mut normed, rounded }.launch(e, rows)?;
    check("panels of rms_norm", &out.read(e, 0..len)?, &round(&normed.read(e, 0..rows * width)?));

    let gate_up = Tensor::of(e, &numbers.vec(rows * 2 * width, 2.0), "gate_up")?;
    let (mut gated, mut out) = (Tensor::zeros(e, rows * width, "out")?, Tensor::zeros(e, len, "panels")?);
    let rounded = Some((&mut out, InputLayout::Panels));
    Swiglu { gate_up: &gate_up, out: &mut gated, rounded }.launch(e, rows, width)?;
    check("panels of swiglu", &out.read(e, 0..len)?, &round(&gated.read(e, 0..rows * width)?));

    let weights = numbers.bf16s(256 * width, 1.0);
    let on_device = Tensor::of(e, &weights, "weights")?;
    let mut out = Tensor::zeros(e, packed_len(256, width), "packed weights")?;
    pack_panels(e, &on_device, &mut out, PackedChannels { first: 0, count: 256, k: width })?;
    let found = out.read(e, 0..out.len())?;
    let expected = packed_weights(&weights, (256, width));
    parities.push(compare_equal(format!("pack_panels of 256 x {width}"), &bits(&found), &bits(&expected)));
    Ok(parities)
}

/// Groups of slices that a norm adds, and that `sum_groups` and `add` add before it: equal bits.
fn norms_of_groups<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
) -> Result<Vec<Parity>, CudaError> {
    let (k, mut numbers, len) = (slices.end(), Numbers(44), rows * n);
    let x = Tensor::of(e, &packed(&numbers.bf16s(rows * k, 1.0), (rows, k)), "x")?;
    let weights = Tensor::of(e, &packed_weights(&numbers.bf16s(n * k, 1.0), (n, k)), "weights")?;
    let (hidden, weight) = (numbers.vec(len, 2.0), Tensor::of(e, &numbers.vec(n, 1.0), "weight")?);
    let on_host = borders(slices, BF16_GRAIN);
    let on_device = Tensor::of(e, &on_host, "borders")?;
    let mut parities = Vec::new();
    for launch in PanelLaunch::all(&TILES[..1], 8) {
        let (mut sums, borders) = (None, (&on_device, on_host.as_slice()));
        let mut out = Tensor::zeros(e, len, "out")?;
        let operands = PanelOperands::Bf16 { x: &x, weights: &weights };
        let gemm = GemmPanels { operands, bias: None, borders, sums: &mut sums, out: &mut out };
        let Some(groups) = gemm.launch_as(e, ProductShape { rows, n, k }, launch)? else { continue };
        let normed = |e: &mut E, sum: &Tensor<E::Memory, f32>, delta| -> Result<Vec<u32>, CudaError> {
            let mut out = Tensor::zeros(e, len, "normed")?;
            let norm = RmsNorm { x: sum, weight: &weight, eps: 1e-5, out: &mut out, rounded: None };
            // SAFETY: the sums have as many numbers as `sum`, and the product's memory is still allocated.
            unsafe { norm.launch_with_add(e, rows, delta) }?;
            bits(e, &out)
        };
        let fused = Tensor::of(e, &hidden, "hidden")?;
        let found = normed(e, &fused, Some(groups))?;
        // SAFETY: as above.
        unsafe { groups.add(e) }?;
        let mut apart = Tensor::of(e, &hidden, "hidden")?;
        add(e, &mut apart, &out, len)?;
        let expected = normed(e, &apart, None)?;
        let case = format!("of groups, {rows} x {n} x {k} by {launch:?}");
        parities.push(compare_equal(format!("sum {case}"), &bits(e, &fused)?, &bits(e, &apart)?));
        parities.push(compare_equal(format!("norm {case}"), &found, &expected));
    }
    Ok(parities)
}

/// Products of FP8 weights, with scales of channels, by each of these launches, and by the kernel of few rows:
/// equal bits.
fn fp8_products<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
    launches: &[PanelLaunch],
) -> Result<Vec<Parity>, CudaError> {
    let (k, mut numbers) = (slices.end(), Numbers(43));
    let x = numbers.bf16s(rows * k, 1.0);
    // Every code but the two that are no numbers.
    let codes: Vec<u8> = (0..n * k)
        .map(|_| (numbers.bits() >> 56) as u8)
        .map(|code| if code & 127 == 127 { code - 1 } else { code })
        .collect();
    let bias = Tensor::of(e, &numbers.vec(n, 1.0), "bias")?;
    let scales = Tensor::of(e, &numbers.vec(n, 0.5), "scales")?;
    let on_host = borders(slices, BF16_GRAIN);
    let layout = Fp8Layout::new(&on_host);
    let mut by_rows = vec![0; packed_len(n, k)];
    codes.chunks_exact(k).zip(by_rows.chunks_exact_mut(k)).for_each(|(codes, row)| layout.pack(codes, row));
    let by_rows = Tensor::of(e, &by_rows, "weights")?;
    let on_device = Tensor::of(e, layout.borders(), "borders")?;

    let mut out = Tensor::zeros(e, rows * n, "out")?;
    let x_rows = Tensor::of(e, &x, "x")?;
    let (channel_scales, bias) = (Some(&scales), Some(&bias));
    let layout = (&on_device, &layout);
    let gemm = GemmFp8 { x: &x_rows, weights: &by_rows, channel_scales, bias, layout, out: &mut out };
    gemm.launch_variant(e, ProductShape { rows, n, k }, Some(REFERENCE))?;
    let expected = bits(e, &out)?;

    let mut codes = Tensor::zeros(e, packed_len(n, k), "tiles")?;
    pack_fp8(e, &by_rows, &mut codes, PackedChannels { first: 0, count: packed_len(n, 1), k })?;
    let x = Tensor::of(e, &packed(&x, (rows, k)), "x")?;
    let mut parities = Vec::new();
    for &launch in launches {
        let mut out = Tensor::of(e, &vec![f32::NAN; rows * n], "out")?;
        let (borders, mut sums) = ((&on_device, on_host.as_slice()), None);
        let operands = PanelOperands::Fp8 { x: &x, codes: &codes, channel_scales };
        let gemm = GemmPanels { operands, bias, borders, sums: &mut sums, out: &mut out };
        gemm.launch_whole(e, ProductShape { rows, n, k }, Some(launch))?;
        let case = format!("fp8 {rows} x {n} x {k} by {launch:?}");
        parities.push(compare_equal(case, &bits(e, &out)?, &expected));
    }
    Ok(parities)
}

/// A product by each of these launches, and by the kernel of few rows: equal bits.
fn products<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
    launches: &[PanelLaunch],
) -> Result<Vec<Parity>, CudaError> {
    let (k, mut numbers) = (slices.end(), Numbers(42));
    let (x, weights) = (numbers.bf16s(rows * k, 1.0), numbers.bf16s(n * k, 1.0));
    let bias = Tensor::of(e, &numbers.vec(n, 1.0), "bias")?;
    let expected = multiply_by_reference(e, (&x, &weights), slices, &bias)?;
    let on_host = borders(slices, BF16_GRAIN);
    let on_device = Tensor::of(e, &on_host, "borders")?;
    let x = Tensor::of(e, &packed(&x, (rows, k)), "x")?;
    let weights = Tensor::of(e, &packed_weights(&weights, (n, k)), "weights")?;
    let mut parities = Vec::new();
    for &launch in launches {
        let mut out = Tensor::of(e, &vec![f32::NAN; rows * n], "out")?;
        let (borders, bias) = ((&on_device, on_host.as_slice()), Some(&bias));
        let mut sums = None;
        let operands = PanelOperands::Bf16 { x: &x, weights: &weights };
        let gemm = GemmPanels { operands, bias, borders, sums: &mut sums, out: &mut out };
        gemm.launch_whole(e, ProductShape { rows, n, k }, Some(launch))?;
        let case = format!("bf16 {rows} x {n} x {k} by {launch:?}");
        parities.push(compare_equal(case, &bits(e, &out)?, &expected));
    }
    Ok(parities)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;

    /// Two row tiles and two channel tiles: each block reads its operands alone, or what blocks of a cluster
    /// share is read once.
    #[test]
    fn clusters_read_operands_once() {
        let (n, k) = (256, 512);
        let mut e = Emulator::build();
        let slices = KSlices::eighths(k, 64);
        let on_host = borders(&slices, BF16_GRAIN);
        let on_device = Tensor::of(&mut e, &on_host, "borders").unwrap();
        let weights = Tensor::zeros(&mut e, packed_len(n, k), "weights").unwrap();
        let mut read = |rows, tile: usize| {
            let x = Tensor::zeros(&mut e, InputLayout::Panels.len(rows, k), "x").unwrap();
            let mut out = Tensor::zeros(&mut e, rows * n, "out").unwrap();
            let (operands, borders) =
                (PanelOperands::Bf16 { x: &x, weights: &weights }, (&on_device, on_host.as_slice()));
            let gemm = GemmPanels { operands, bias: None, borders, sums: &mut None, out: &mut out };
            let before = e.global_bytes();
            gemm.launch_whole(
                &mut e,
                ProductShape { rows, n, k },
                Some(PanelLaunch::all(&TILES[tile..=tile], 1)[0]),
            )
            .unwrap();
            (e.global_bytes() - before) as usize
        };
        let operands = |weights: usize, rows: usize| (weights * 128 + rows) * k * 2;
        assert_eq!([3, 5].map(|tile| read(160, tile)), [operands(4, 4 * 80), operands(2, 4 * 80)]);
        let all = [operands(4, 4 * 128), operands(2, 4 * 128), operands(2, 2 * 128)];
        assert_eq!([4, 6, 7].map(|tile| read(256, tile)), all);
    }
}
