//! FP8 weights with scales by block in panels, compared with the kernel of few rows.

use cpu_kernels::KSlices;

use super::super::linear::{BlockProduct, REFERENCE, bits};
use super::super::{Parity, Scale, compare_equal};
use super::packed;
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    BLOCK_TILES, GemmPanels, PackedChannels, PanelLaunch, PanelOperands, pack_fp8, packed_len,
};

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let all = PanelLaunch::all(&BLOCK_TILES, 8);
    // Four numbers of groups of each tile: 8, 16, 40, 80 rows, and 80 in clusters.
    let (alone, in_clusters) = all.split_at(16);
    let (n, k) = scale.pick((130, 512), (4096, 14_336));
    let mut parities = Vec::new();
    for (rows, launches) in scale.pick(
        vec![(1, &alone[..8]), (45, &alone[8..12]), (130, &alone[12..14]), (170, &in_clusters[1..2])],
        vec![(1, all.as_slice()), (45, &all), (160, &all), (300, &all)],
    ) {
        parities.extend(products_agree(e, (rows, n), &KSlices::eighths(k, 64), launches)?);
    }
    // Slices of several chains, which begin and end within blocks.
    let uneven = KSlices::eighths(scale.pick(1280, 9728), 64);
    parities.extend(products_agree(e, (9, n.min(520)), &uneven, &alone[..4])?);
    parities.extend(products_agree(e, (300, 40), &uneven, &alone[12..13])?);
    for owned in [0..4, 2..4, 3..4] {
        let launches = PanelLaunch::all(&BLOCK_TILES[..1], owned.len());
        parities.extend(products_agree(e, (9, n.min(520)), &uneven.owned(owned), &launches)?);
    }
    Ok(parities)
}

/// A product by each of these launches, and by the kernel of few rows: equal bits.
fn products_agree<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
    launches: &[PanelLaunch],
) -> Result<Vec<Parity>, CudaError> {
    let (product, k) = (BlockProduct::new((rows, n), slices, 53), slices.end() - slices.start());
    let expected = product.multiply(e, REFERENCE)?;
    let by_rows = Tensor::of(e, &product.weights(packed_len(n, 1)), "weights")?;
    let mut codes = Tensor::zeros(e, packed_len(n, k), "tiles")?;
    pack_fp8(e, &by_rows, &mut codes, PackedChannels { first: 0, count: packed_len(n, 1), k })?;
    let x = Tensor::of(e, &packed(&product.x, (rows, k)), "x")?;
    let scales = Tensor::of(e, &product.scales_of_chains(), "scales")?;
    let bias = Tensor::of(e, &product.bias, "bias")?;
    let chains = Tensor::of(e, &product.layout.on_device(), "chains")?;
    let borders = Tensor::of(e, product.layout.of_k(), "borders")?;
    let mut parities = Vec::new();
    for &launch in launches {
        let mut out = Tensor::of(e, &vec![f32::NAN; rows * n], "out")?;
        let layout = (&chains, &product.layout);
        let operands = PanelOperands::Fp8Blocks { x: &x, codes: &codes, scales: &scales, layout };
        let (bias, borders) = (Some(&bias), (&borders, product.layout.of_k()));
        let gemm = GemmPanels { operands, bias, borders, sums: &mut None, out: &mut out };
        gemm.launch_whole(e, ProductShape { rows, n, k }, Some(launch))?;
        let columns = slices.start()..slices.end();
        let case = format!("fp8 by block {rows} x {n}, columns {columns:?} by {launch:?}");
        parities.push(compare_equal(case, &bits(e, &out)?, &expected));
    }
    Ok(parities)
}
