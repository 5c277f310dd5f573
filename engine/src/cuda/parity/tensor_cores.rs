//! By how much sums of tensor cores may differ from exact ones: the tolerances of products and of attention.
//! Derived from the published models, which `fused_sum` of emulator.hpp states with their sources.
//!
//! On compute capability 8.0 a block adds eight products, which are exact, to a sum. All nine numbers are cut
//! to multiples of 2^(e - 24), e the largest exponent among them, which leaves a number of that exponent as
//! it is. So the cuts change the sum by less than 8 times 2^-24 of the largest magnitude. The cut of the sum
//! to 24 bits changes it by less than 2^-23 of itself. On 9.0 a block is 16 products with one bit more: the
//! bound of a block is the same, and there are half as many. So the bound of 8.0 holds on both.

use std::ops::Range;

use super::{Parity, compare};

/// Largest relative error of one operation in f32, rounded to nearest.
pub(super) const ROUNDING: f64 = 1.0 / (1u64 << 24) as f64;
/// Largest error of the cuts of a block's numbers, relative to the largest magnitude.
const CUT_OF_NUMBERS: f64 = 8.0 * ROUNDING;
/// Largest relative error of the cut of a block's sum.
const CUT_OF_SUM: f64 = 2.0 * ROUNDING;
/// Numbers of K of two instructions; each adds two blocks.
const STEP: usize = 32;

/// An exact number, and the largest error of the number that a kernel computes for it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bounded {
    pub(super) value: f64,
    pub(super) error: f64,
}

impl Bounded {
    pub(super) fn exact(value: f64) -> Self {
        Self { value, error: 0.0 }
    }

    /// After a tensor core has added eight products.
    pub(super) fn plus_block(self, products: [f64; 8]) -> Self {
        let value = self.value + products.iter().sum::<f64>();
        let largest = products.iter().fold(self.value.abs() + self.error, |max, x| max.max(x.abs()));
        // Numbers are not cut any finer.
        let error = self.error + CUT_OF_NUMBERS * largest.max(f64::from(f32::MIN_POSITIVE));
        Self { value, error: error + CUT_OF_SUM * (value.abs() + error) }
    }

    /// After rounding to f32.
    pub(super) fn rounded(self) -> Self {
        Self { error: self.error + ROUNDING * (self.value.abs() + self.error), ..self }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self { value: self.value + other.value, error: self.error + other.error }.rounded()
    }

    pub(super) fn times(self, factor: f64) -> Self {
        Self { value: self.value * factor, error: self.error * factor.abs() }.rounded()
    }
}

/// Block `number` of the four of a step: which numbers of K each instruction of products.cuh multiplies.
fn block_of_step(start: usize, number: usize) -> [usize; 8] {
    std::array::from_fn(|i| start + i / 2 * 8 + number * 2 + i % 2)
}

/// A row of inputs times a channel of weights; `borders` are those of the slices, whose sums form a tree.
pub(super) fn product(x: &[f32], weights: &[f32], borders: &[u32]) -> Bounded {
    let sum_of = |slice: Range<usize>| {
        let end = slice.end;
        let product = |k: usize| if k < end { f64::from(x[k]) * f64::from(weights[k]) } else { 0.0 };
        let blocks = slice.step_by(STEP).flat_map(|start| (0..4).map(move |n| block_of_step(start, n)));
        blocks.fold(Bounded::default(), |sum, block| sum.plus_block(block.map(product)))
    };
    let mut sums: Vec<Bounded> =
        borders.windows(2).map(|cut| sum_of(cut[0] as usize..cut[1] as usize)).collect();
    while sums.len() > 1 {
        sums = sums.chunks_exact(2).map(|two| two[0].plus(two[1])).collect();
    }
    sums[0]
}

/// Compares a kernel's numbers with exact ones. The tolerance is the largest error among these.
pub(super) fn compare_bounded(case: impl Into<String>, found: &[f32], exact: &[Bounded]) -> Parity {
    let expected: Vec<f32> = exact.iter().map(|x| x.value as f32).collect();
    let largest = exact.iter().fold(f64::from(f32::MIN_POSITIVE), |max, x| max.max(x.value.abs()));
    // `expected` is rounded, too.
    let error = exact.iter().fold(0.0, |max: f64, x| max.max(x.rounded().error));
    compare(case, error / largest, found, &expected)
}

#[cfg(test)]
mod tests {
    use cpu_kernels::{KSlices, reference, tree_sum};
    use half::bf16;

    use super::super::linear::multiply;
    use super::super::{Numbers, widened};
    use super::*;
    use crate::cuda::emulator::Emulator;
    use crate::cuda::executor::Tensor;
    use crate::cuda::ops::{BF16_GRAIN, borders};

    /// The exponent of a number that is not zero.
    fn exponent(x: f32) -> i32 {
        ((x.to_bits() >> 23) & 255).max(1) as i32 - 127
    }

    /// Cuts a sum to f32, toward zero.
    fn toward_zero(sum: f64) -> f32 {
        let nearest = sum as f32;
        let is_too_large = nearest.is_finite() && f64::from(nearest).abs() > sum.abs();
        if is_too_large { f32::from_bits(nearest.to_bits() - 1) } else { nearest }
    }

    /// Twin of `fused_sum` in emulator.hpp: `c` plus the products of a block, cut to `bits` bits.
    fn fused_sum(bits: i32, c: f32, factors: &[(f32, f32)]) -> f32 {
        let nonzero = factors.iter().filter(|(a, b)| *a != 0.0 && *b != 0.0);
        let of_products = nonzero.map(|&(a, b)| exponent(a) + exponent(b));
        let largest = of_products.fold(if c == 0.0 { -126 } else { exponent(c) }, i32::max);
        let unit = 2.0f64.powi(largest - bits);
        let products = factors.iter().map(|&(a, b)| f64::from(a) * f64::from(b));
        let units: f64 = products.chain([f64::from(c)]).map(|x| (x / unit).trunc()).sum();
        toward_zero(units * unit)
    }

    /// An instruction's set of 16 products, added to `c`.
    fn multiply_set(capability: u32, c: f32, factors: &[(f32, f32); 16]) -> f32 {
        if capability == 90 {
            return fused_sum(25, c, factors);
        }
        fused_sum(24, fused_sum(24, c, &factors[..8]), &factors[8..])
    }

    /// One element of a product, as a kernel computes it.
    fn product_by_model(capability: u32, x: &[f32], weights: &[f32], borders: &[u32]) -> f32 {
        let mut sums = [0.0f32; 8];
        for (sum, cut) in sums.iter_mut().zip(borders.windows(2)) {
            for start in (cut[0]..cut[1]).step_by(STEP) {
                let blocks: [[usize; 8]; 4] = std::array::from_fn(|n| block_of_step(start as usize, n));
                let factor = |k: usize| if k < cut[1] as usize { (x[k], weights[k]) } else { (0.0, 0.0) };
                for two in [0, 2] {
                    let factors = std::array::from_fn(|i| factor(blocks[two + i / 8][i % 8]));
                    *sum = multiply_set(capability, *sum, &factors);
                }
            }
        }
        tree_sum(sums)
    }

    /// Products with one, at these places of a set.
    fn ones(numbers: &[(usize, f32)]) -> [(f32, f32); 16] {
        let mut factors = [(0.0, 1.0); 16];
        numbers.iter().for_each(|&(place, number)| factors[place].0 = number);
        factors
    }

    /// Worked out by hand, for 8.0 and 9.0. `HALF` and `QUARTER` are parts of the last bit of 1.
    #[test]
    fn blocks_are_cut_toward_zero() {
        const ULP: f32 = f32::EPSILON;
        const HALF: f32 = ULP / 2.0;
        const QUARTER: f32 = ULP / 4.0;
        let quarters = ones(&[(0, QUARTER), (1, QUARTER), (2, QUARTER), (3, QUARTER)]);
        let cases = [
            // Rounded to nearest it would be 1 + 2 ULP.
            (1.0, ones(&[(0, HALF), (1, HALF), (2, HALF)]), [1.0 + ULP, 1.0 + ULP]),
            (-1.0, ones(&[(0, -HALF), (1, -HALF), (2, -HALF)]), [-1.0 - ULP, -1.0 - ULP]),
            // 24 bits hold no quarter, 25 do. An eighth is lost in both.
            (1.0, quarters, [1.0, 1.0 + ULP]),
            (1.0, ones(&[(0, QUARTER / 2.0), (1, QUARTER / 2.0)]), [1.0, 1.0]),
            (0.0, ones(&[(0, 1.0), (1, QUARTER), (2, -1.0)]), [0.0, QUARTER]),
            // Two blocks lose a half each, one block adds them first.
            (1.0, ones(&[(0, HALF), (8, HALF)]), [1.0, 1.0 + ULP]),
            // One block in any order.
            (1.0, ones(&[(6, HALF), (7, HALF)]), [1.0 + ULP, 1.0 + ULP]),
            // The first block comes first: nothing of its 1 aligns the second.
            (0.0, ones(&[(0, 1.0), (1, -1.0), (8, QUARTER)]), [QUARTER, QUARTER]),
            (0.0, ones(&[(0, QUARTER), (8, 1.0), (9, -1.0)]), [0.0, QUARTER]),
            // Zeros align nothing, whatever their factors are.
            (f32::MIN_POSITIVE, [(0.0, 1e30); 16], [f32::MIN_POSITIVE, f32::MIN_POSITIVE]),
        ];
        for (i, (c, factors, expected)) in cases.iter().enumerate() {
            assert_eq!(
                [80, 90].map(|capability| multiply_set(capability, *c, factors)),
                *expected,
                "case {i}"
            );
            // The bound holds for both.
            let products = factors.map(|(a, b)| f64::from(a) * f64::from(b));
            let [first, second] = [0, 8].map(|at| std::array::from_fn(|i| products[at + i]));
            let bounded = Bounded::exact(f64::from(*c)).plus_block(first).plus_block(second);
            for found in expected {
                assert!((f64::from(*found) - bounded.value).abs() <= bounded.error, "case {i}: {bounded:?}");
            }
        }
    }

    /// Of similar size, or of exponents that differ by up to 24: cuts of products and of sums.
    fn factors_of(numbers: &mut Numbers, len: usize, spread: u64) -> Vec<bf16> {
        let mut number = || {
            let exponent = (numbers.bits() % (2 * spread + 1)) as i32 - spread as i32;
            bf16::from_f32(numbers.f32(1.0) * 2.0f32.powi(exponent))
        };
        (0..len).map(|_| number()).collect()
    }

    /// The emulator's tensor cores have the bits of the twin, for each compute capability, and are as near to
    /// exact sums as the bound says.
    #[test]
    fn emulated_products_are_those_of_the_models() {
        let (rows, n) = (9, 20);
        let mut all_bits = Vec::new();
        for (capability, spread) in [80, 89, 90].into_iter().flat_map(|of| [(of, 0), (of, 12)]) {
            let mut e = Emulator::build().of_capability(capability);
            for slices in [KSlices::eighths(352, 32), KSlices::whole(1032)] {
                let (k, mut numbers) = (slices.end(), Numbers(47));
                let x = factors_of(&mut numbers, rows * k, spread);
                let weights = factors_of(&mut numbers, n * k, spread);
                let on_device = Tensor::of(&mut e, &weights, "weights").unwrap();
                let found = multiply(&mut e, &x, &on_device, &slices, None).unwrap();

                let (x, weights, cuts) = (widened(&x), widened(&weights), borders(&slices, BF16_GRAIN));
                let (mut expected, mut exact) = (Vec::new(), Vec::new());
                for x in x.chunks_exact(k) {
                    for weights in weights.chunks_exact(k) {
                        expected.push(product_by_model(capability, x, weights, &cuts));
                        exact.push(product(x, weights, &cuts));
                    }
                }
                assert_eq!(found, expected, "{capability}, exponents up to {spread}, K {k}");
                let parity = compare_bounded("exact", &found, &exact);
                assert!(parity.is_good() && parity.worst > 0.0, "{parity}");
                all_bits.push((capability, found));
            }
        }
        let of = |capability| all_bits.iter().filter(move |bits| bits.0 == capability).map(|bits| &bits.1);
        assert!(of(80).eq(of(89)) && of(80).ne(of(90)), "A100 and H100 round differently");
    }

    /// The model of 9.0 differs from the twin of the CPU engine as an H200 reported for `gemm_bf16`, to both
    /// digits (docs/gpu-runs/1-kernels.txt). The model of 8.0 and sums in f64 do not.
    #[test]
    fn the_model_of_9_0_differs_from_the_twin_as_an_h200_does() {
        for ((rows, n), slices, reported) in [
            ((3, 16), KSlices::eighths(64, 16), "8.4e-8"),
            ((1, 4096), KSlices::whole(4096), "1.1e-6"),
            ((8, 4096), KSlices::whole(4096), "1.2e-6"),
            ((1, 4096), KSlices::eighths(14_336, 32), "1.5e-6"),
            ((8, 4096), KSlices::eighths(14_336, 32), "1.6e-6"),
        ] {
            // Its inputs: rows, channels, bias, of which only some channels are compared.
            let (k, numbers_from) = (slices.end(), |first: usize| Numbers(5).without(first));
            let x = widened(&numbers_from(0).bf16s(rows * k, 1.0));
            let columns: Vec<usize> = (0..n).step_by((n / 64).max(1)).chain([n - 1]).collect();
            let channel = |&c: &usize| widened(&numbers_from((rows + c) * k).bf16s(k, 1.0));
            let weights: Vec<f32> = columns.iter().flat_map(channel).collect();
            let bias: Vec<f32> = columns.iter().map(|c| numbers_from((rows + n) * k + c).f32(1.0)).collect();

            let cuts = borders(&slices, BF16_GRAIN);
            let mut found = Vec::new();
            for x in x.chunks_exact(k) {
                for (weights, bias) in weights.chunks_exact(k).zip(&bias) {
                    found.push(product_by_model(90, x, weights, &cuts) + bias);
                }
            }
            let (slices, bias) = (&slices, Some(bias.as_slice()));
            let twin =
                reference::Linear { x: &x, weights: &weights, k, slices, scales: None, bias }.compute();
            let worst = compare("differences", 1.0, &found, &twin).worst;
            assert_eq!(format!("{worst:.1e}"), reported, "{rows} x {n} x {k}");
        }
    }

    #[test]
    fn infinities_and_nans_stay() {
        let (k, mut e) = (32, Emulator::build());
        let mut x = vec![bf16::ONE; 3 * k];
        (x[5], x[k + 5]) = (bf16::NEG_INFINITY, bf16::NAN);
        let weights = Tensor::of(&mut e, &vec![bf16::ONE; k], "weights").unwrap();
        let found = multiply(&mut e, &x, &weights, &KSlices::whole(k), None).unwrap();
        assert!(found[0] == f32::NEG_INFINITY && found[1].is_nan() && found[2] == 32.0, "{found:?}");
    }
}
