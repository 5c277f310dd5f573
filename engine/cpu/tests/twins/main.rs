//! Compares every kernel with its naive twin by `==`, on every instruction set of this machine, over odd
//! shapes. Attention, feed-forward layers and scales by block are in modules of their own, everything else
//! here.
#![expect(clippy::unwrap_used, reason = "the lint sees tests, but not what tests call")]

mod attention;
mod feed_forward;
mod scale_blocks;

use std::sync::Arc;

use cpu_kernels::{
    Angles, Cpu, FloatMatrix, HeadLayout, KSlices, Linear, LinearWeights, Matrix, MatrixData, MatrixFormat,
    Norm, PackedMatrix, QuantizedFormat, Table, Threads, reference,
};
use half::bf16;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// Numbers of about unit size, with some exact zeros of both signs.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match state % 37 {
            0 => 0.0,
            1 => -0.0,
            _ => (state >> 40) as f32 / (1 << 23) as f32 - 1.0,
        }
    };
    (0..len).map(|_| next()).collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

fn to_bf16(numbers: &[f32]) -> Vec<bf16> {
    numbers.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn rounded(numbers: &[f32]) -> Vec<f32> {
    numbers.iter().map(|&x| bf16::from_f32(x).to_f32()).collect()
}

fn factors(numbers: &[f32]) -> Vec<f32> {
    numbers.iter().map(|&x| reference::bf16_factor(x)).collect()
}

/// Numbers with the full spread of exponents of a product with bf16 weights: many below 2^-56, which count as
/// zeros, many just above, some so large that their sums barely fit. Often an odd element is the negative of
/// the one before it, so that sums cancel.
fn extremes(len: usize, seed: u64) -> Vec<f32> {
    let mut found: Vec<f32> = Vec::new();
    for (i, unit) in numbers(len, seed).into_iter().enumerate() {
        let chosen = unit.to_bits() >> 8;
        let exponent = [-60, -57, -56, -55, -55, -50, -1, 0, 1, 40, 55, 60][chosen as usize % 12];
        let cancels = i % 2 == 1 && chosen % 5 < 3;
        found.push(if cancels { -found[i - 1] } else { unit * 2.0f32.powi(exponent) });
    }
    found
}

/// One CPU per instruction set of this machine, and one with several threads.
fn every_cpu() -> impl Iterator<Item = Cpu> {
    Cpu::every_isa().unwrap().into_iter().chain([Cpu::always_parallel(3).unwrap()])
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 200, rng_seed: RngSeed::Fixed(7), ..ProptestConfig::default() }
}

/// A product with one matrix per width.
#[derive(Debug, Clone)]
struct Product {
    rows: usize,
    k: usize,
    widths: Vec<usize>,
    /// K-slices with units of this many columns, or a single slice.
    unit: Option<usize>,
    bf: bool,
    bias: bool,
    scaled: bool,
    /// Generator of the numbers.
    numbers: fn(usize, u64) -> Vec<f32>,
}

fn product() -> impl Strategy<Value = Product> {
    let shape = (1..40usize, 1..120usize, prop::collection::vec(1..50usize, 1..4));
    (shape, prop::option::of(1..40usize), any::<(bool, bool, bool)>()).prop_map(
        |((rows, k, widths), unit, (bf, bias, scaled))| Product {
            rows,
            k,
            widths,
            unit,
            bf,
            bias,
            scaled,
            numbers,
        },
    )
}

fn check_linear(product: &Product) {
    let Product { rows, k, ref widths, unit, bf, bias, scaled, numbers } = *product;
    let slices = unit.map_or_else(|| KSlices::whole(k), |unit| KSlices::eighths(k, unit));
    let x = numbers(rows * k, 1);
    let weights: Vec<Vec<f32>> =
        widths.iter().enumerate().map(|(i, n)| numbers(n * k, 2 + i as u64)).collect();
    let width: usize = widths.iter().sum();
    let bias = bias.then(|| numbers(width, 99));
    let all = weights.concat();
    let (format, data) = match bf {
        true => (MatrixFormat::Bf16, MatrixData::from(to_bf16(&all))),
        false => (MatrixFormat::F32, MatrixData::from(all.clone())),
    };
    let matrix = Matrix::new(data, [width, k]);
    let packed = FloatMatrix::pack(format, &matrix, &slices, &Threads::new(1).unwrap()).unwrap();
    let packed = Arc::new(packed);
    check_rows(&Table::Rows(matrix), &packed);
    if bf {
        check_rows(&Table::Rows(Matrix::new(MatrixData::from(factors(&all)), [width, k])), &packed);
    }
    let scales = scaled.then(|| numbers(width, 98));
    let linear =
        Linear { weights: LinearWeights::Floats(packed), scales: scales.clone(), bias: bias.clone() };

    let (x_in, weights_in) = if bf { (factors(&x), factors(&all)) } else { (x.clone(), all) };
    let twin = reference::Linear {
        x: &x_in,
        weights: &weights_in,
        k,
        slices: &slices,
        scales: scales.as_deref().map(reference::Scales::Columns),
        bias: bias.as_deref(),
    };
    let expected = twin.compute();
    for cpu in every_cpu() {
        let mut out = vec![f32::NAN; rows * width];
        cpu.linear(&linear, &x, &mut out);
        assert_eq!(bits(&out), bits(&expected), "{cpu:?}: {product:?}");
    }
}

/// Checks that a row looked up in panels equals the row that was packed.
fn check_rows(stored: &Table, packed: &Arc<FloatMatrix>) {
    let ids: Vec<u32> = (0..packed.width() as u32).collect();
    let rows = |table: &Table| {
        let mut rows = vec![f32::NAN; ids.len() * packed.k()];
        Cpu::new(1).unwrap().embed(table, &ids, &mut rows);
        bits(&rows)
    };
    assert_eq!(rows(&Table::Panels(Arc::clone(packed))), rows(stored));
}

/// Shapes with several K blocks, with K blocks widened beforehand, and with several row blocks.
#[test]
fn a_linear_of_many_rows_is_its_twin() {
    for (rows, k, unit, bf) in [
        (13, 401, None, true),
        (50, 777, None, true),
        (50, 777, None, false),
        (49, 1_700, Some(35), true),
        (38, 1_700, Some(300), false),
        (100, 4_001, None, true),
    ] {
        check_linear(&Product {
            rows,
            k,
            widths: vec![33, 5],
            unit,
            bf,
            bias: true,
            scaled: rows % 2 == 0,
            numbers,
        });
    }
}

/// The smallest sum of products with bf16 weights is the smallest normal number, so that instructions which
/// treat denormal numbers as zeros agree. A factor that would allow a smaller one counts as zero.
#[test]
fn no_product_with_bf16_weights_is_denormal() {
    let unit = 2.0f32.powi(-63);
    let x = [200.0 * unit, 199.0 * unit];
    let rows = [
        ([200.0 * unit, -201.0 * unit], f32::MIN_POSITIVE),
        ([-200.0 * unit, 201.0 * unit], -f32::MIN_POSITIVE),
        ([127.5 * unit, 0.0], 0.0),
        ([128.0 * unit, 0.0], 200.0 * 128.0 * unit * unit),
        ([1.0, -127.5 * unit], 200.0 * unit),
    ];
    let weights: Vec<bf16> = rows.iter().flat_map(|(weights, _)| to_bf16(weights)).collect();
    let expected: Vec<f32> = rows.iter().map(|(_, expected)| *expected).collect();
    let matrix = Matrix::new(MatrixData::from(weights), [rows.len(), x.len()]);
    let (slices, threads) = (KSlices::whole(x.len()), Threads::new(1).unwrap());
    let packed = FloatMatrix::pack(MatrixFormat::Bf16, &matrix, &slices, &threads).unwrap();
    let linear = Linear { weights: LinearWeights::Floats(Arc::new(packed)), scales: None, bias: None };
    for cpu in every_cpu() {
        let mut out = vec![f32::NAN; rows.len()];
        cpu.linear(&linear, &x, &mut out);
        assert_eq!(bits(&out), bits(&expected), "{cpu:?}");
    }
}

/// Checks an integer product of that shape. With `extremes`, numbers are of very different size, and some
/// rows are zero.
fn check_quantized(product: &Product, format: QuantizedFormat, extremes: bool) {
    let Product { rows, k, ref widths, unit, bias, .. } = *product;
    let slices = unit.map_or_else(|| KSlices::whole(k), |unit| KSlices::eighths(k, unit));
    let width: usize = widths.iter().sum();
    let (mut x, mut weights) = (numbers(rows * k, 1), numbers(width * k, 2));
    if extremes {
        let size = |i: usize| [1.0, 1e-20, 3e18, 0.0, 1e-38, 1e-31][i % 6];
        x.iter_mut().enumerate().for_each(|(i, x)| *x *= size(i / 7));
        weights.iter_mut().enumerate().for_each(|(i, x)| *x *= size(i / k));
    }
    let bias = bias.then(|| numbers(width, 99));
    check_packed(format, &slices, (&x, &weights), bias);
}

/// Checks rows of activations times rows of weights, both as long as the slices.
fn check_packed(
    format: QuantizedFormat,
    slices: &KSlices,
    (x, weights): (&[f32], &[f32]),
    bias: Option<Vec<f32>>,
) {
    let k = slices.ranges().last().expect("there are slices").end;
    let (rows, width) = (x.len() / k, weights.len() / k);
    let matrix = Matrix::new(MatrixData::from(weights.to_vec()), [width, k]);
    let packed = PackedMatrix::pack(format, slices, &matrix, &Threads::new(1).unwrap()).unwrap();
    let twin = reference::QuantizedWeights::new(format, weights, k);
    let expected = twin.multiply(x, slices, bias.as_deref());
    let linear = Linear { weights: LinearWeights::Packed(packed), scales: None, bias };
    for cpu in every_cpu() {
        let mut out = vec![f32::NAN; rows * width];
        cpu.linear(&linear, x, &mut out);
        assert_eq!(
            bits(&out),
            bits(&expected),
            "{cpu:?}: {format:?}, {rows} rows, {width} columns, {slices:?}"
        );
    }
}

/// Sums of a group where all products have the largest magnitude and either sign: 16 bits still suffice.
#[test]
fn the_largest_sums_of_a_group_of_int4_fit() {
    let (k, width) = (96, 20);
    // The number farthest from zero becomes code -8, the others 7 or, in odd rows, also -8.
    let weight = |i: usize| if i.is_multiple_of(32) || i / k % 2 == 1 { -8.0 } else { 7.0 };
    let weights: Vec<f32> = (0..width * k).map(weight).collect();
    for rows in 1..14 {
        let sign = |i: usize| if (i / k).is_multiple_of(2) { 1.0 } else { -1.0 };
        let x: Vec<f32> = (0..rows * k).map(sign).collect();
        for format in [QuantizedFormat::Int8, QuantizedFormat::Int4] {
            check_packed(format, &KSlices::whole(k), (&x, &weights), None);
        }
    }
}

/// The largest possible int8 sums still fit.
#[test]
fn the_longest_sum_of_int8_fits() {
    let k = 131_072;
    let slices = KSlices::whole(k);
    let threads = Threads::new(1).unwrap();
    let pack = |slices: &KSlices, k| {
        let matrix = Matrix::new(MatrixData::from([vec![1.0; k], vec![-1.0; k]].concat()), [2, k]);
        PackedMatrix::pack(QuantizedFormat::Int8, slices, &matrix, &threads)
    };
    let packed = pack(&slices, k).unwrap();
    let linear = Linear { weights: LinearWeights::Packed(packed), scales: None, bias: None };
    for cpu in Cpu::every_isa().unwrap() {
        let mut out = [0.0; 2];
        cpu.linear(&linear, &vec![1.0; k], &mut out);
        // Codes are 127 on both sides; the scales restore the original size up to rounding.
        assert!((out[0] - k as f32).abs() < 0.1 && out[0] == -out[1], "{cpu:?}: {out:?}");
    }
    let longer = pack(&KSlices::whole(k + 1), k + 1).unwrap_err().to_string();
    assert!(longer.contains("131072"), "{longer}");
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn quantized_linear_is_its_twin(product in product(), int4 in any::<bool>(), extremes in any::<bool>()) {
        let format = if int4 { QuantizedFormat::Int4 } else { QuantizedFormat::Int8 };
        check_quantized(&product, format, extremes);
    }

    #[test]
    fn linear_is_its_twin(product in product()) {
        check_linear(&product);
    }

    #[test]
    fn linear_of_extremes_is_its_twin(product in product()) {
        check_linear(&Product { numbers: extremes, ..product });
    }

    #[test]
    fn elementwise_kernels_are_their_twins(rows in 1..5usize, half in 1..70usize, seed in any::<u64>()) {
        let width = 2 * half;
        let (x, y) = (numbers(rows * width, seed), numbers(rows * width, seed ^ 1));
        let (weight, cos, sin) = (numbers(width, 3), numbers(half, 4), numbers(half, 5));
        let scaled: Vec<f32> = x.iter().map(|x| x * 40.0).collect();
        let gate_up: Vec<f32> =
            scaled.chunks(width).zip(y.chunks(width)).flat_map(|(gate, up)| [gate, up].concat()).collect();
        let norm = Norm { weight: weight.clone(), eps: 1e-5 };
        let layout = HeadLayout { num_heads: 1, num_kv_heads: 0, head_dim: width };
        let angles = Angles { cos: cos.repeat(rows), sin: sin.repeat(rows), half };
        for cpu in Cpu::every_isa().unwrap() {
            let mut out = vec![0.0; x.len()];
            cpu.rms_norm(&norm, &x, &mut out);
            let expected: Vec<f32> =
                x.chunks(width).flat_map(|x| reference::rms_norm(x, &weight, 1e-5)).collect();
            prop_assert_eq!(bits(&out), bits(&expected));

            let mut heads = x.clone();
            cpu.rotate(layout, &angles, &mut heads);
            let mut expected = x.clone();
            expected.chunks_mut(width).for_each(|head| reference::rotate(head, &cos, &sin));
            prop_assert_eq!(bits(&heads), bits(&expected));

            cpu.silu_mul(&gate_up, width, &mut out);
            let expected: Vec<f32> =
                scaled.chunks(width).zip(y.chunks(width)).flat_map(|(g, u)| reference::silu_mul(g, u)).collect();
            prop_assert_eq!(bits(&out), bits(&expected));
        }
    }
}

#[test]
fn a_nan_stays_in_its_row() {
    let k = 48;
    let mut x = numbers(3 * k, 1);
    x[k + 5] = f32::NAN;
    let weights = numbers(20 * k, 2);
    let data = MatrixData::from(weights);
    let slices = KSlices::whole(k);
    let (matrix, threads) = (Matrix::new(data, [20, k]), Threads::new(1).unwrap());
    let packed = FloatMatrix::pack(MatrixFormat::F32, &matrix, &slices, &threads).unwrap();
    let linear = Linear { weights: LinearWeights::Floats(Arc::new(packed)), scales: None, bias: None };
    for cpu in Cpu::every_isa().unwrap() {
        let mut out = vec![0.0; 60];
        cpu.linear(&linear, &x, &mut out);
        let nans: Vec<bool> = out.chunks(20).map(|row| row.iter().all(|x| x.is_nan())).collect();
        assert_eq!(nans, [false, true, false]);
        assert!(out[..20].iter().chain(&out[40..]).all(|x| x.is_finite()));
    }
}

#[test]
fn non_finite_numbers_survive_quantization() {
    let k = 48;
    let slices = KSlices::eighths(k, 6);
    for (format, bad) in [
        (QuantizedFormat::Int8, f32::NAN),
        (QuantizedFormat::Int8, f32::INFINITY),
        (QuantizedFormat::Int4, f32::NAN),
    ] {
        let (mut x, mut weights) = (numbers(3 * k, 1), numbers(20 * k, 2));
        x[k + 5] = bad;
        weights[7 * k + 40] = bad;
        let matrix = Matrix::new(MatrixData::from(weights), [20, k]);
        let packed = PackedMatrix::pack(format, &slices, &matrix, &Threads::new(1).unwrap()).unwrap();
        let linear = Linear { weights: LinearWeights::Packed(packed), scales: None, bias: None };
        for cpu in Cpu::every_isa().unwrap() {
            let mut out = vec![0.0; 60];
            cpu.linear(&linear, &x, &mut out);
            for (i, number) in out.iter().enumerate() {
                assert_eq!(number.is_nan(), i / 20 == 1 || i % 20 == 7, "{cpu:?}: {format:?}, {i}");
            }
        }
    }
}
