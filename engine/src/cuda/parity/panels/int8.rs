//! Panels of int8: how rows are quantized into them, and products against the kernel of few rows.

use cpu_kernels::{KSlices, NUM_SLICES};

use super::super::linear::{REFERENCE, bits};
use super::super::{Numbers, Parity, Scale, compare, compare_equal};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    GemmInt8, GemmPanels, INT8_GRAIN, INT8_PANEL_COLUMNS, INT8_TILES, NUM_ALONE, PanelLaunch, PanelOperands,
    QuantizeRows, StepLayout, TILE_CHANNELS, borders,
};

/// The index of a step in a tile of this many panels; twin of `step_index` in int8.cu within one tile.
fn step_index(row: usize, column: usize, panels: usize) -> usize {
    let (panel, inside) = (column / 128 * panels + row / 8, column % 128);
    ((panel * 8 + inside / 16) * 8 + row % 8) * 16 + inside % 16
}

/// Rows of `width` in tiles of `of_tile` rows; zeros in rows that do not exist.
fn packed(steps: &[i8], width: usize, of_tile: usize) -> Vec<i8> {
    let mut all = Vec::new();
    for rows in steps.chunks(of_tile * width) {
        let first = all.len();
        all.resize(first + of_tile * width, 0);
        for (i, step) in rows.iter().enumerate() {
            all[first + step_index(i / width, i % width, of_tile / 8)] = *step;
        }
    }
    all
}

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let mut parities = layouts(e, scale.pick((300, 384), (700, 4096)))?;
    let (n, k) = scale.pick((130, 1280), (520, 14_336));
    let all = PanelLaunch::all(&INT8_TILES, NUM_SLICES);
    let (alone, in_clusters) = all.split_at(4 * NUM_ALONE);
    let (exact, sliced) = (KSlices::whole(k), KSlices::eighths(k, 128));
    for (rows, launches) in scale.pick(
        vec![(9, alone), (45, &alone[8..12]), (130, &alone[14..18]), (130, &in_clusters[3..10])],
        vec![(1, all.as_slice()), (45, &all), (160, &all), (300, &all)],
    ) {
        for slices in [&exact, &sliced] {
            parities.extend(products(e, (rows, n), slices, launches)?);
        }
    }
    // Slices that ranks own, and fewer columns than there are slices.
    for owned in [0..4, 6..8, 3..4] {
        let launches = PanelLaunch::all(&INT8_TILES[..1], owned.len());
        parities.extend(products(e, (9, n), &sliced.owned(owned).rebased(), &launches)?);
    }
    parities.extend(products(e, (9, n), &KSlices::whole(128), &all[..1])?);
    parities.extend(products(e, (9, n), &KSlices::whole(384), &all[..4])?);
    // Sums of groups that are too long for a float.
    parities.extend(products(e, (3, 20), &KSlices::whole(8192), &all[..4])?);
    Ok(parities)
}

/// Rows quantized into one tile, as inputs are, and into tiles of channels in two parts, as weights are
/// loaded: equal to rows quantized one after another and packed on the host. Some columns only, too.
fn layouts<E: Executor>(e: &mut E, (rows, k): (usize, usize)) -> Result<Vec<Parity>, CudaError> {
    let x = Numbers(45).vec(rows * k, 2.0);
    let borders = Tensor::of(e, &[0, k as u32 / 2, k as u32], "borders")?;
    let mut parities = Vec::new();
    for columns in [0..k, INT8_PANEL_COLUMNS..2 * INT8_PANEL_COLUMNS] {
        let mut quantized = |layout: StepLayout, of_part: usize| -> Result<(Vec<i8>, Vec<f32>), CudaError> {
            let len = layout.len(rows, columns.len());
            let (mut steps, mut scales) =
                (Tensor::zeros(e, len, "steps")?, Tensor::zeros(e, 2 * rows, "scales")?);
            for (part, x) in x.chunks(of_part * k).enumerate() {
                let on_device = Tensor::of(e, x, "x")?;
                let (steps, scales) = (&mut steps, &mut scales);
                let (x, borders, columns, to_row) = (&on_device, &borders, columns.clone(), part * of_part);
                QuantizeRows { x, borders, steps, layout, scales, to_row, columns }.launch(
                    e,
                    x.len() / k,
                    k,
                )?;
            }
            Ok((steps.read(e, 0..len)?, scales.read(e, 0..2 * rows)?))
        };
        let (by_rows, expected_scales) = quantized(StepLayout::Rows, rows)?;
        let of_tile = rows.next_multiple_of(8);
        for (layout, of_tile, of_part) in [
            (StepLayout::one_tile(rows), of_tile, rows),
            (StepLayout::Tiles(TILE_CHANNELS), TILE_CHANNELS, TILE_CHANNELS),
        ] {
            let (found, scales) = quantized(layout, of_part)?;
            let expected = packed(&by_rows, columns.len(), of_tile);
            let case = format!("quantize_rows of {rows} x {k}, columns {columns:?}, into {layout:?}");
            parities.push(compare_equal(case, &found, &expected));
            parities.push(compare(format!("their scales, into {layout:?}"), 0.0, &scales, &expected_scales));
        }
    }
    Ok(parities)
}

/// Steps of which some rows are large and of one sign: their sums are too long for a float.
fn steps(numbers: &mut Numbers, (rows, k): (usize, usize)) -> Vec<i8> {
    let step = |i: usize, bits: u64| match i / k % 3 {
        0 => 127 - (bits >> 60) as i8,
        _ => ((bits >> 56) as i8).max(-127),
    };
    (0..rows * k).map(|i| step(i, numbers.bits())).collect()
}

/// Scales of rows and slices; 0 for empty slices, as they are quantized. Of more than 8 rows, one is 0 and
/// one NaN in their first numbers.
fn scales(numbers: &mut Numbers, rows: usize, slices: &KSlices) -> Vec<f32> {
    let of_row = slices.ranges();
    let first = of_row.iter().position(|slice| !slice.is_empty()).unwrap_or(0);
    let scale = |row: usize, slice: usize, x: f32| match (row, rows > 8) {
        _ if of_row[slice].is_empty() => 0.0,
        (0, true) if slice == first => 0.0,
        (1, true) if slice == first => f32::NAN,
        _ => x.abs(),
    };
    let random = numbers.vec(rows * of_row.len(), 0.01).into_iter().enumerate();
    random.map(|(i, x)| scale(i / of_row.len(), i % of_row.len(), x)).collect()
}

/// A product by each of these launches, and by the kernel of few rows: equal bits.
fn products<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
    launches: &[PanelLaunch],
) -> Result<Vec<Parity>, CudaError> {
    let (k, count, mut numbers) = (slices.end(), slices.ranges().len(), Numbers(46));
    let (x, weights) = (steps(&mut numbers, (rows, k)), steps(&mut numbers, (n, k)));
    let scales = scales(&mut numbers, rows, slices);
    let scales = Tensor::of(e, &scales, "scales")?;
    let channel_scales = Tensor::of(e, &numbers.vec(n, 0.01), "scales of channels")?;
    let bias = Tensor::of(e, &numbers.vec(n, 1.0), "bias")?;

    let on_host = borders(slices, INT8_GRAIN);
    let on_device = Tensor::of(e, &on_host, "borders")?;
    let mut out = Tensor::zeros(e, rows * n, "out")?;
    let (x_rows, weight_rows) = (Tensor::of(e, &x, "x")?, Tensor::of(e, &weights, "weights")?);
    let gemm = GemmInt8 {
        x: (&x_rows, &scales),
        weights: &weight_rows,
        channel_scales: Some(&channel_scales),
        bias: Some(&bias),
        borders: (&on_device, &on_host),
        slices: count,
        out: &mut out,
    };
    gemm.launch_variant(e, ProductShape { rows, n, k }, Some(REFERENCE))?;
    let expected = bits(e, &out)?;

    let on_host = borders(slices, INT8_PANEL_COLUMNS);
    let on_device = Tensor::of(e, &on_host, "borders")?;
    let x = Tensor::of(e, &packed(&x, k, rows.next_multiple_of(8)), "x")?;
    let weights = Tensor::of(e, &packed(&weights, k, TILE_CHANNELS), "weights")?;
    let mut parities = Vec::new();
    for &launch in launches {
        let mut out = Tensor::of(e, &vec![f32::NAN; rows * n], "out")?;
        let mut sums = None;
        let operands = PanelOperands::Int8 {
            x: (&x, &scales),
            steps: &weights,
            channel_scales: Some(&channel_scales),
            scales_of_row: count,
        };
        let (borders, bias) = ((&on_device, on_host.as_slice()), Some(&bias));
        let gemm = GemmPanels { operands, bias, borders, sums: &mut sums, out: &mut out };
        gemm.launch_whole(e, ProductShape { rows, n, k }, Some(launch))?;
        let case = format!("int8 {rows} x {n} x {k}, {count} scales a row, by {launch:?}");
        parities.push(compare_equal(case, &bits(e, &out)?, &expected));
    }
    Ok(parities)
}
