//! The naive twins: every operation as its definition says, one number after the other, on plain f32. Tests
//! compare the kernels with them by `==`, and the engine's oracle is built from them. They share only
//! definitions with the kernels: the fold by halves, the K-slices, the exponential.

mod fp8;
mod quantized;

use std::ops::Range;

pub use fp8::{fp8_row, fp8_value};
use half::bf16;
pub use quantized::QuantizedWeights;

use super::dispatch::{Isa, Kernel};
use super::exp::exp;
use super::simd::{F32x16, LANES, fold};
use crate::k_slices::{KSlices, NUM_SLICES, SCALE_BLOCK, tree_sum};
use crate::kv_cache::BLOCK_SIZE;

/// Dot product: element k into lane k mod 16, in order of k; missing elements are zeros; then the fold.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut start = 0;
    while start + LANES <= a.len() {
        for l in 0..LANES {
            lanes[l] = a[start + l].mul_add(b[start + l], lanes[l]);
        }
        start += LANES;
    }
    if start < a.len() {
        let rest = a.len() - start;
        for l in 0..LANES {
            let (x, y) = if l < rest { (a[start + l], b[start + l]) } else { (0.0, 0.0) };
            lanes[l] = x.mul_add(y, lanes[l]);
        }
    }
    fold(lanes)
}

/// One accumulation chain in order of k; a slice of odd length ends with a product of zeros.
#[inline(always)]
fn chain(weights: &[f32], x: &[f32]) -> f32 {
    let sum = weights.iter().zip(x).fold(0.0f32, |sum, (weight, x)| weight.mul_add(*x, sum));
    if weights.len() % 2 == 1 { 0.0f32.mul_add(0.0, sum) } else { sum }
}

/// A slice of a row whose blocks have scales: one chain for its part in each block, times the block's scale,
/// added in order of k.
#[inline(always)]
fn chains_of_blocks(weights: &[f32], x: &[f32], slice: &Range<usize>, scales: &[f32]) -> f32 {
    let (mut sum, mut at) = (0.0f32, slice.start);
    while at < slice.end {
        let block = at / SCALE_BLOCK;
        let end = slice.end.min((block + 1) * SCALE_BLOCK);
        sum = chain(&weights[at..end], &x[at..end]).mul_add(scales[block], sum);
        at = end;
    }
    sum
}

/// A row of weights times a row of activations, split into the contract's slices; `blocks` are the scales of
/// the row's blocks, if it has any.
#[inline(always)]
fn sliced_chain(weights: &[f32], x: &[f32], slices: &[Range<usize>], blocks: Option<&[f32]>) -> f32 {
    let mut sums = [0.0f32; NUM_SLICES];
    for (s, slice) in slices.iter().enumerate() {
        sums[s] = match blocks {
            Some(scales) => chains_of_blocks(weights, x, slice, scales),
            None => chain(&weights[slice.clone()], &x[slice.clone()]),
        };
    }
    if slices.len() == 1 { sums[0] } else { tree_sum(sums) }
}

/// A weight or an input of a product with bf16 weights: rounded, and below 2^-56 a zero of the same sign.
pub fn bf16_factor(x: f32) -> f32 {
    let rounded = bf16::from_f32(x).to_f32();
    if rounded.abs() < 2.0f32.powi(-56) { 0.0f32.copysign(rounded) } else { rounded }
}

/// Scales of FP8 weights `[columns, k]`.
#[derive(Debug, Clone, Copy)]
pub enum Scales<'a> {
    /// `[columns]`, applied to finished sums.
    Columns(&'a [f32]),
    /// `[columns, ceil(k / SCALE_BLOCK)]`, applied to the sum of each block's part of a slice.
    Blocks(&'a [f32]),
}

/// `x` `[rows, k]` times `weights` `[columns, k]` (times their scales) (+ bias) -> `[rows, columns]`.
pub struct Linear<'a> {
    /// `[rows, k]`.
    pub x: &'a [f32],
    /// `[columns, k]`.
    pub weights: &'a [f32],
    /// Length of a row of either.
    pub k: usize,
    /// K-slices of the sums.
    pub slices: &'a KSlices,
    /// Factors of the weights.
    pub scales: Option<Scales<'a>>,
    /// `[columns]`.
    pub bias: Option<&'a [f32]>,
}

impl Linear<'_> {
    /// The same loops as elsewhere in this file, run as a kernel only so that `mul_add` compiles to an
    /// instruction and not to a call.
    pub fn compute(self) -> Vec<f32> {
        Isa::best().run(self)
    }
}

impl Kernel for Linear<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) -> Vec<f32> {
        let mut out = Vec::new();
        for x in self.x.chunks_exact(self.k) {
            for (column, weights) in self.weights.chunks_exact(self.k).enumerate() {
                let blocks = match self.scales {
                    Some(Scales::Blocks(scales)) => {
                        let per_column = self.k.div_ceil(SCALE_BLOCK);
                        Some(&scales[column * per_column..][..per_column])
                    }
                    _ => None,
                };
                let sum = sliced_chain(weights, x, self.slices.ranges(), blocks);
                let scaled = match self.scales {
                    Some(Scales::Columns(scales)) => sum * scales[column],
                    _ => sum,
                };
                out.push(self.bias.map_or(scaled, |bias| scaled + bias[column]));
            }
        }
        out
    }
}

/// One row: `x / sqrt(mean(x^2) + eps) * weight`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    x.iter().zip(weight).map(|(x, weight)| x * scale * weight).collect()
}

/// One head, in place: rotates the pairs (i, i + half).
pub fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = head.len() / 2;
    for i in 0..half {
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

/// One row: silu(gate) * up.
pub fn silu_mul(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter().zip(up).map(|(&gate, &up)| gate / (1.0 + exp(-gate)) * up).collect()
}

/// One query over the keys and values of positions 0.., limited to those in `visible`.
pub fn attention(query: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>], visible: Range<usize>) -> Vec<f32> {
    let scale = 1.0 / (query.len() as f32).sqrt();
    let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; query.len()]);
    for begin in (0..visible.end).step_by(BLOCK_SIZE) {
        let block = visible.start.max(begin)..visible.end.min(begin + BLOCK_SIZE);
        if block.is_empty() {
            continue;
        }
        let mut weights = [f32::NEG_INFINITY; BLOCK_SIZE];
        for t in block.clone() {
            weights[t - begin] = score(query, &keys[t]) * scale;
        }
        let old_max = max;
        for &weight in &weights {
            if weight > max {
                max = weight;
            }
        }
        let rescale = exp(old_max - max);
        weights = weights.map(|weight| exp(weight - max));
        sum = sum.mul_add(rescale, fold(weights));
        for d in 0..query.len() {
            out[d] *= rescale;
            for t in block.clone() {
                out[d] = weights[t - begin].mul_add(values[t][d], out[d]);
            }
        }
    }
    out.iter().map(|x| x / sum).collect()
}

/// Sums dimensions d = i mod 4 separately, then ((a0 + a1) + (a2 + a3)).
fn score(query: &[f32], key: &[f32]) -> f32 {
    let mut chains = [0.0f32; 4];
    for (d, (q, k)) in query.iter().zip(key).enumerate() {
        chains[d % 4] = q.mul_add(*k, chains[d % 4]);
    }
    (chains[0] + chains[1]) + (chains[2] + chains[3])
}
