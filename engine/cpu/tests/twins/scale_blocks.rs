//! Products whose weights have scales by block, compared with their twin: any slices, odd lengths, parts of
//! ranks whose border cuts a block, every number of rows of a tile, and several tiles.

use std::sync::Arc;

use cpu_kernels::{
    FloatMatrix, KSlices, Linear, LinearWeights, Matrix, MatrixData, SCALE_BLOCK, Threads, reference,
};
use proptest::prelude::*;

use crate::{bits, config, every_cpu, extremes, factors, numbers, to_bf16};

/// A product over the slices of one rank.
#[derive(Debug, Clone)]
struct Product {
    rows: usize,
    width: usize,
    /// Columns of the whole matrix.
    k: usize,
    /// Slices of whole rows; those of a rank if it does not own all.
    slices: KSlices,
    bias: bool,
    /// Generator of the numbers.
    numbers: fn(usize, u64) -> Vec<f32>,
}

/// The columns that the slices cover, of rows of `k` numbers.
fn own_columns(rows: &[f32], k: usize, slices: &KSlices) -> Vec<f32> {
    rows.chunks_exact(k).flat_map(|row| &row[slices.start()..slices.end()]).copied().collect()
}

fn check(product: &Product) {
    let Product { rows, width, k, ref slices, bias, numbers: generate } = *product;
    let (x, weights) = (generate(rows * k, 1), generate(width * k, 2));
    let per_row = k.div_ceil(SCALE_BLOCK);
    // Small ones make denormal sums.
    let size = |i: usize| [0.01, 1e-30, 3.0][i % 3];
    let scales: Vec<f32> =
        numbers(width * per_row, 3).into_iter().enumerate().map(|(i, x)| x * size(i)).collect();
    let bias = bias.then(|| numbers(width, 99));
    let twin = reference::Linear {
        x: &factors(&x),
        weights: &factors(&weights),
        k,
        slices,
        scales: Some(reference::Scales::Blocks(&scales)),
        bias: bias.as_deref(),
    };
    let expected = twin.compute();

    let own_weights = to_bf16(&own_columns(&weights, k, slices));
    let matrix = Matrix::new(MatrixData::from(own_weights), [width, slices.end() - slices.start()]);
    let first = slices.start() / SCALE_BLOCK;
    let own_blocks = |row: &[f32]| row[first..first + slices.num_blocks()].to_vec();
    let own_scales = || scales.chunks_exact(per_row).flat_map(own_blocks).collect();
    let packed = FloatMatrix::pack_by_block(&matrix, slices, &Threads::new(1).unwrap(), own_scales).unwrap();
    let linear = Linear { weights: LinearWeights::Floats(Arc::new(packed)), scales: None, bias };
    let x = own_columns(&x, k, slices);
    for cpu in every_cpu() {
        let mut out = vec![f32::NAN; rows * width];
        cpu.linear(&linear, &x, &mut out);
        assert_eq!(bits(&out), bits(&expected), "{cpu:?}: {product:?}");
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_linear_with_scales_by_block_is_its_twin(
        (rows, width, k) in (1..40usize, 1..140usize, 1..600usize),
        unit in prop::option::of(1..90usize),
        (bias, is_extreme) in any::<(bool, bool)>(),
    ) {
        let slices = unit.map_or_else(|| KSlices::whole(k), |unit| KSlices::eighths(k, unit));
        let numbers = if is_extreme { extremes } else { numbers };
        check(&Product { rows, width, k, slices, bias, numbers });
    }

    #[test]
    fn a_ranks_part_is_its_twin(
        (rows, width, k) in (1..14usize, 1..70usize, 64..900usize),
        unit in 1..64usize,
        (first, count) in prop::sample::select(vec![(0, 4), (4, 4), (2, 2), (6, 2), (3, 1), (7, 1)]),
    ) {
        let slices = KSlices::eighths(k, unit).owned(first..first + count);
        prop_assume!(slices.start() < slices.end());
        check(&Product { rows, width, k, slices, bias: false, numbers });
    }
}

/// Shapes with several row blocks, and with K blocks that are widened beforehand.
#[test]
fn many_rows_with_scales_by_block_are_their_twin() {
    for (rows, k, unit) in [(13, 401, None), (50, 777, None), (49, 1_700, Some(35)), (100, 4_001, None)] {
        let slices = unit.map_or_else(|| KSlices::whole(k), |unit| KSlices::eighths(k, unit));
        check(&Product { rows, width: 38, k, slices, bias: true, numbers });
    }
}
