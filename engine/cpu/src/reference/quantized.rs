//! The naive twin of int8 and int4: quantizes weights and activations and multiplies them as docs/contract.md
//! C1 says, one number after the other. It shares only the K-slices and their tree with the kernels.

use std::ops::Range;

use half::bf16;

use crate::k_slices::{KSlices, NUM_SLICES, tree_sum};
use crate::matrix::QuantizedFormat;

/// Numbers along K per int4 scale.
const GROUP: usize = 32;
/// Smaller numbers are treated as zero.
const SMALLEST: f32 = 1e-30;

/// `[columns, k]`, quantized.
#[derive(Debug)]
pub struct QuantizedWeights {
    format: QuantizedFormat,
    k: usize,
    codes: Vec<i32>,
    /// int8: `[columns]`; int4: `[columns][ceil(k / 32)]`.
    scales: Vec<f32>,
}

impl QuantizedWeights {
    /// Quantizes `weights` `[columns, k]`.
    pub fn new(format: QuantizedFormat, weights: &[f32], k: usize) -> Self {
        let mut quantized = Self { format, k, codes: Vec::new(), scales: Vec::new() };
        for row in weights.chunks_exact(k) {
            match format {
                QuantizedFormat::Int8 => {
                    let (codes, scale) = int8(row);
                    quantized.codes.extend(codes);
                    quantized.scales.push(scale);
                }
                QuantizedFormat::Int4 => {
                    for group in row.chunks(GROUP) {
                        let (codes, scale) = int4(group);
                        quantized.codes.extend(codes);
                        quantized.scales.push(scale);
                    }
                }
            }
        }
        quantized
    }

    /// `x` `[rows, k]` times these weights (+ bias) -> `[rows, columns]`.
    pub fn multiply(&self, x: &[f32], slices: &KSlices, bias: Option<&[f32]>) -> Vec<f32> {
        let mut out = Vec::new();
        for row in x.chunks_exact(self.k) {
            let quantized: Vec<(Vec<i32>, f32)> =
                slices.ranges().iter().map(|slice| int8(&row[slice.clone()])).collect();
            for column in 0..self.codes.len() / self.k {
                let mut sums = [0.0f32; NUM_SLICES];
                for (s, slice) in slices.ranges().iter().enumerate() {
                    let (codes, scale) = &quantized[s];
                    sums[s] = self.slice_sum(column, slice.clone(), codes) * scale;
                }
                let mut sum = if slices.ranges().len() == 1 { sums[0] } else { tree_sum(sums) };
                if self.format == QuantizedFormat::Int8 {
                    sum *= self.scales[column];
                }
                out.push(bias.map_or(sum, |bias| sum + bias[column]));
            }
        }
        out
    }

    /// Sum of one column over one slice, with the activations' codes.
    fn slice_sum(&self, column: usize, slice: Range<usize>, x: &[i32]) -> f32 {
        let weights = &self.codes[column * self.k..(column + 1) * self.k];
        let exact = |range: Range<usize>| {
            range.map(|k| i64::from(weights[k]) * i64::from(x[k - slice.start])).sum::<i64>() as f32
        };
        if self.format == QuantizedFormat::Int8 {
            return exact(slice.clone());
        }
        let groups = self.k.div_ceil(GROUP);
        let mut sum = 0.0f32;
        for group in 0..groups {
            let part = slice.start.max(group * GROUP)..slice.end.min((group + 1) * GROUP);
            if !part.is_empty() {
                sum = exact(part).mul_add(self.scales[column * groups + group], sum);
            }
        }
        sum
    }
}

/// Quantizes symmetrically: the largest number becomes 127.
fn int8(numbers: &[f32]) -> (Vec<i32>, f32) {
    if numbers.iter().any(|x| !x.is_finite()) {
        return (vec![0; numbers.len()], f32::NAN);
    }
    let largest = numbers.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    if largest < SMALLEST {
        return (vec![0; numbers.len()], 0.0);
    }
    let quantize = |x: &f32| (x * (127.0 / largest)).round_ties_even().clamp(-127.0, 127.0) as i32;
    (numbers.iter().map(quantize).collect(), largest / 127.0)
}

/// Quantizes so that the number farthest from zero (the first one if several) becomes -8, with a bf16 scale.
fn int4(group: &[f32]) -> (Vec<i32>, f32) {
    if group.iter().any(|x| !x.is_finite()) {
        return (vec![0; group.len()], f32::NAN);
    }
    let farthest = group.iter().fold(0.0f32, |far, &x| if x.abs() > far.abs() { x } else { far });
    if farthest.abs() < SMALLEST {
        return (vec![0; group.len()], 0.0);
    }
    let scale = bf16::from_f32(farthest / -8.0).to_f32();
    let quantize = |x: &f32| (x * (1.0 / scale)).round_ties_even().clamp(-8.0, 7.0) as i32;
    (group.iter().map(quantize).collect(), scale)
}
