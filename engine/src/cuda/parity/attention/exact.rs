//! Attention in f64, and by how much the kernel's results may differ: the errors that each of its operations
//! allows, to first order.

use std::ops::Range;

use half::bf16;

use super::super::tensor_cores::{Bounded, ROUNDING};

/// Keys of an instruction, of a split, which a warp sums by itself, and of a group of splits.
const SET: usize = 16;
const SPLIT: usize = 128;
const GROUP: usize = 8 * SPLIT;
/// Relative error of the kernel's exponential, besides that of its argument: a polynomial of degree 7 in f32,
/// whose last steps round twice.
const EXPONENTIAL: f64 = 4.0 * ROUNDING;
/// A weight is a product of exponentials: of its step, of a later step's maximum, and of each fold.
const WEIGHT: f64 = 2.0 * EXPONENTIAL + ROUNDING;
/// What a fold may add to it: its exponential, and a product.
const WEIGHT_OF_FOLD: f64 = EXPONENTIAL + ROUNDING;
/// Relative error of a weight as the sum of two bf16: each is within 2^-9 of what it stands for.
const TWO_BF16: f64 = 64.0 * ROUNDING;
/// Roundings of a split's sum of weights: a lane adds 16 numbers in each of two steps, lanes are added twice,
/// and the first step's sum is rescaled.
const ROUNDINGS_OF_SUM: f64 = 2.0 * 16.0 + 2.0 + 1.0;
/// Roundings besides folds: the division, and the rescaled first step.
const ROUNDINGS_OF_ROW: f64 = 1.0 + 1.0;
/// Roundings of a fold: the rescaled sum of earlier keys, and the sum.
const ROUNDINGS_OF_FOLD: f64 = 2.0;

/// Maximum number of folds that a key's value goes through: in its group, then over the groups.
fn folds(visible: &Range<usize>) -> f64 {
    let (first, end) = (visible.start / SPLIT, visible.end.div_ceil(SPLIT));
    let groups = visible.end.div_ceil(GROUP) - visible.start / GROUP;
    ((end - first).min(GROUP / SPLIT) - 1 + groups - 1) as f64
}

/// Scaled product of a query, given as two bf16 per number, and a key.
fn score(query: &[f32], [high, low]: [&[f32]; 2], key: &[f32]) -> Bounded {
    let product = |query: &[f32], i: usize| f64::from(query[i]) * f64::from(key[i]);
    let exact: f64 = (0..query.len()).map(|i| product(query, i)).sum();
    let mut sum = Bounded::default();
    for set in (0..query.len()).step_by(SET) {
        for part in [low, high] {
            for first in [set, set + SET / 2] {
                sum = sum.plus_block(std::array::from_fn(|i| product(part, first + i)));
            }
        }
    }
    // What the two bf16 leave out is part of the error.
    let unscaled = Bounded { value: exact, error: sum.error + (exact - sum.value).abs() };
    // The scale is rounded, too.
    unscaled.times(1.0 / (query.len() as f64).sqrt()).rounded()
}

/// Weights of the values relative to the largest one, and their relative errors.
fn weights(query: &[f32], keys: &[Vec<f32>], folds: f64) -> Vec<Bounded> {
    let high: Vec<f32> = query.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    let low: Vec<f32> = query.iter().zip(&high).map(|(x, high)| bf16::from_f32(x - high).to_f32()).collect();
    let scores: Vec<Bounded> = keys.iter().map(|key| score(query, [&high, &low], key)).collect();
    let largest = scores.iter().fold(f64::NEG_INFINITY, |max, score| max.max(score.value));
    let weight = |score: &Bounded| {
        // Arguments of exponentials are rounded differences, which together span the distance to the maximum.
        let argument = score.error + ROUNDING * (largest - score.value);
        Bounded {
            value: (score.value - largest).exp(),
            error: argument.exp_m1() + WEIGHT + folds * WEIGHT_OF_FOLD,
        }
    };
    scores.iter().map(weight).collect()
}

/// The sum of one dimension's weighted values, without the errors of weights; `first` is the position of the
/// first of them.
fn weighted_sum(products: &[f64], first: usize) -> Bounded {
    let product =
        |position: usize| position.checked_sub(first).and_then(|i| products.get(i).copied()).unwrap_or(0.0);
    let end = first + products.len();
    let splits = (first / SPLIT * SPLIT..end).step_by(SPLIT);
    splits.fold(Bounded::default(), |all, split| {
        let mut sum = Bounded::default();
        for set in (split..end.min(split + SPLIT)).step_by(SET) {
            // Low parts come first. They are at most 2^-8 of the weights.
            for share in [1.0 / 256.0, 255.0 / 256.0] {
                for half in [set, set + SET / 2] {
                    sum = sum.plus_block(std::array::from_fn(|i| share * product(half + i)));
                }
            }
        }
        Bounded { value: all.value + sum.value, error: all.error + sum.error }
    })
}

/// One query over the keys and values at the positions in `visible`.
pub(super) fn attention(
    query: &[f32],
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
    visible: Range<usize>,
) -> Vec<Bounded> {
    let values = &values[visible.clone()];
    let folds = folds(&visible);
    let weights = weights(query, &keys[visible.clone()], folds);
    let sum: f64 = weights.iter().map(|weight| weight.value).sum();
    let of_dimension = |d: usize| {
        let value_at = |i: usize| f64::from(values[i][d]);
        let products: Vec<f64> = (0..values.len()).map(|i| weights[i].value * value_at(i)).collect();
        let weighted = weighted_sum(&products, visible.start);
        let mean = weighted.value / sum;
        // A weight that is too large moves the mean toward its value.
        let moved: f64 =
            (0..values.len()).map(|i| weights[i].value * weights[i].error * (value_at(i) - mean).abs()).sum();
        let magnitude: f64 = products.iter().map(|product| product.abs()).sum();
        let roundings = (ROUNDINGS_OF_ROW + folds * ROUNDINGS_OF_FOLD) * ROUNDING;
        let of_values = weighted.error + (TWO_BF16 + roundings) * magnitude;
        let of_sum = (ROUNDINGS_OF_SUM * ROUNDING + roundings) * mean.abs();
        Bounded { value: mean, error: (moved + of_values) / sum + of_sum }
    };
    (0..query.len()).map(of_dimension).collect()
}
